"""Sign-Muon and the sign methods against their formulas, and the instance on which Sign-Muon climbs."""

from __future__ import annotations

import itertools
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.reference import polar as exact
from tests.reference import signs as reference
from thinwire.errors import ConfigError
from thinwire.optim import METHODS, DistributedLion, SignMuon, SignSGD, Signum, param_groups
from thinwire.polar import polar

CLOSE = 1e-6  # float32 rounding of a few steps
LR = 0.01
SHAPES = [(4, 4), (9, 3), (3, 9), (1, 7), (7, 1)]

# Unit vectors and an orthogonal matrix, found by random search and rounded, so that G = 1000 u v^T + Q is the instance.
LEFT = [-0.5666, 0.2548, -0.5573, -0.5508]
RIGHT = [-0.2047, -0.5615, -0.5776, -0.5560]
ORTHOGONAL = [
    [-0.2155, -0.6683, 0.1943, -0.6849],
    [0.9474, -0.1871, -0.1956, -0.1711],
    [-0.1553, 0.4412, -0.6733, -0.5726],
    [-0.1787, -0.5689, -0.6861, 0.4168],
]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def with_gradient(p: nn.Parameter, gradient: Tensor | None = None) -> Tensor:
    p.grad = torch.randn_like(p) if gradient is None else gradient
    return p.grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_worker_is_algorithm_1_bit_by_bit(shape: tuple[int, int]) -> None:
    w = parameter(*shape)
    optimizer = SignMuon([w], lr=1e-3, momentum=0.9)
    expected, m = w.detach().clone(), torch.zeros(shape)
    for _ in range(20):
        g = with_gradient(w)
        m = 0.9 * m + 0.1 * g
        expected -= 1e-3 * polar(m).sign()
        optimizer.step()
        assert torch.equal(w.detach(), expected)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"average": "heavy_ball"},
    {"nesterov": True},
    {"nesterov": True, "average": "heavy_ball", "momentum": 0.8},
    {"momentum": 0.0},
    {"weight_decay": 0.3},
    {"weight_decay": 0.3, "decay": "decoupled"},
    {"weight_decay": 0.3, "nesterov": True, "scale": "fan_in", "local_polar": True},
    *({"scale": scale} for scale in ("fan_in", "sqrt_mn", "rms")),
    *({"scale": scale, "local_polar": True} for scale in ("none", "fan_in", "sqrt_mn", "rms")),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_is_its_formula(options: dict[str, Any], shape: tuple[int, int]) -> None:
    w = parameter(*shape)
    optimizer = SignMuon([w], lr=LR, **options)
    expected, m = w.detach().clone(), torch.zeros(shape)
    for _ in range(5):
        expected, m = reference.sign_muon_step(expected, with_gradient(w), m, LR, options)
        optimizer.step()
    torch.testing.assert_close(w.detach(), expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("options", [{}, {"local_polar": True}, {"scale": "fan_in", "feedback": True}], ids=str)
def test_fused_matrices_step_like_separate_ones(options: dict[str, Any]) -> None:
    fused = parameter(9, 4)
    parts = [nn.Parameter(part.detach().clone()) for part in fused.split((4, 4, 1))]
    one = SignMuon([{"params": [fused], "splits": [(4, 4, 1)]}], lr=LR, **options)
    several = SignMuon(parts, lr=LR, **options)
    for _ in range(5):
        for part, g in zip(parts, with_gradient(fused).split((4, 4, 1)), strict=True):
            part.grad = g
        one.step()
        several.step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in parts]), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("options", [{}, {"local_polar": True}, {"feedback": True}], ids=str)
def test_convolution_filters_step_like_matrices(options: dict[str, Any], layout: torch.memory_format) -> None:
    filters = parameter(5, 3, 2, 2)
    matrix = nn.Parameter(filters.detach().reshape(5, 12).clone())
    filters.data = filters.data.contiguous(memory_format=layout)
    optimizers = SignMuon([filters], lr=LR, **options), SignMuon([matrix], lr=LR, **options)
    for _ in range(3):
        matrix.grad = with_gradient(filters).reshape(5, 12)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(filters.detach().reshape(5, 12), matrix.detach(), rtol=CLOSE, atol=CLOSE)


def sparse_gradient(p: nn.Parameter) -> Tensor:
    return with_gradient(p, torch.randn_like(p) * (torch.rand_like(p) < 0.7))


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_signum_and_sign_sgd_are_their_formulas(beta: float) -> None:
    w = parameter(5, 6)
    optimizer = Signum([w], lr=LR, momentum=beta) if beta else SignSGD([w], lr=LR)
    expected, m = w.detach().clone(), torch.zeros(5, 6)
    for _ in range(10):
        expected, m = reference.signum_step(expected, sparse_gradient(w), m, LR, beta)
        optimizer.step()
        assert torch.equal(w.detach(), expected)


def test_lion_is_its_formula() -> None:
    w = parameter(5, 6)
    optimizer = DistributedLion([w], lr=LR, betas=(0.8, 0.95))
    expected, m = w.detach().clone(), torch.zeros(5, 6)
    for _ in range(10):
        expected, m = reference.lion_step(expected, sparse_gradient(w), m, LR, (0.8, 0.95))
        optimizer.step()
        assert torch.equal(w.detach(), expected)


@pytest.mark.parametrize("decay", ["coupled", "decoupled"])
def test_signum_decays_as_it_is_told(decay: Any) -> None:
    w = parameter(5, 6)
    before, g = w.detach().clone(), with_gradient(w)
    Signum([w], lr=LR, weight_decay=0.5, decay=decay).step()
    if decay == "coupled":
        assert torch.equal(w.detach(), before - LR * (g + 0.5 * before).sign())
    else:
        torch.testing.assert_close(w.detach(), (1 - LR * 0.5) * before - LR * g.sign(), rtol=CLOSE, atol=CLOSE)


# --- error feedback -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["signmuon", "signum"])
def test_feedback_keeps_what_the_signs_left_out(method: str) -> None:
    w = parameter(5, 6)
    optimizer = METHODS[method]([w], lr=LR, momentum=0.0, feedback=True)
    expected, keeper = w.detach().double(), reference.Feedback()
    for _ in range(10):
        g = with_gradient(w)
        unit = sqrt(6) if method == "signmuon" else 1.0  # the step's size is in units of a polar factor's entries
        expected -= LR * unit * keeper.sign(polar(g) if method == "signmuon" else g)
        optimizer.step()
    torch.testing.assert_close(w.detach().double(), expected, rtol=10 * CLOSE, atol=10 * CLOSE)
    torch.testing.assert_close(optimizer.state[w]["feedback"].double(), keeper.error, rtol=1e-4, atol=10 * CLOSE)


def counterexample() -> Tensor:
    u, v = (torch.tensor(x, dtype=torch.float64) for x in (LEFT, RIGHT))
    return 1000 * torch.outer(u / u.norm(), v / v.norm()) + exact.polar(torch.tensor(ORTHOGONAL))


def test_the_sign_of_the_polar_factor_need_not_be_a_descent_direction() -> None:
    g = counterexample()
    for factor in (exact.polar(g), polar(g)):
        assert float((g * factor.sign()).sum()) < -100
    assert float((g * g.sign()).sum()) > 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("feedback", [False, True])
def test_on_a_linear_objective_only_feedback_descends(feedback: bool, momentum: float) -> None:
    w, g = nn.Parameter(torch.zeros(4, 4)), counterexample().float()
    optimizer = SignMuon([w], lr=LR, momentum=momentum, feedback=feedback)
    objective = [0.0]
    for _ in range(100):
        with_gradient(w, g)
        optimizer.step()
        objective.append(float((g * w.detach()).sum()))
    if feedback:
        assert objective[100] < objective[50] < objective[0] - 50 * LR * 1000 * 0.5
    else:
        assert all(after > before + LR * 100 for before, after in itertools.pairwise(objective))


# --- what is no hidden matrix -------------------------------------------------------------------------------------


def test_a_vote_on_the_others_leaves_rows_alone_that_nobody_touched() -> None:
    model = nn.Sequential(nn.Embedding(90, 8), nn.Linear(8, 8))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = SignMuon(param_groups(model, LR, adamw_lr=0.1), aux="vote")
    for step in range(5):
        optimizer.zero_grad()
        model(torch.tensor([3, 64, 89 - step])).square().sum().backward()
        optimizer.step()
    table, kept = model[0].weight.detach(), torch.ones(90, dtype=torch.bool)
    kept[[3, 64, *range(85, 90)]] = False
    assert torch.equal(table[kept], before[0][kept]) and bool((table[~kept] != before[0][~kept]).all())
    once = (table[85] - before[0][85]).abs()
    torch.testing.assert_close(once, torch.full((8,), 0.2 * 0.1), rtol=0, atol=CLOSE)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"average": "median"}, "'median'.*ema or heavy_ball"),
        ({"decay": "sudden"}, "'sudden'.*coupled or decoupled"),
        ({"scale": "huge"}, "'huge'.*none, fan_in, sqrt_mn, rms"),
        ({"aux": "sgd"}, "'sgd'.*adamw or vote"),
        ({"coefficients": "best"}, "'best'.*polar_express"),
    ],
    ids=str,
)
def test_unknown_options_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SignMuon([parameter(2, 2)], **arguments)


def test_vectors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"SignMuon.*\(5,\).*param_groups"):
        SignMuon([parameter(5)])
