"""SPEL against its reference, and that frames stay frames."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.reference import optimizers as reference
from thinwire.errors import ConfigError
from thinwire.optim import Spel
from thinwire.optim.spel import spel_step
from thinwire.stiefel import orthogonality_error, project_tangent, random_frame

CLOSE = 2e-6  # the retraction's 1e-6 per step, and float32
LR, BETA = 0.01, 0.9


def frame(dim: int = 9, rank: int = 4) -> nn.Parameter:
    return nn.Parameter(random_frame(dim, rank, torch.Generator().manual_seed(99)))


def with_gradient(p: nn.Parameter) -> nn.Parameter:
    p.grad = torch.randn_like(p)
    return p


@pytest.mark.parametrize("shape", [(9, 4), (5, 5), (8, 1)], ids=str)
def test_steps_are_those_of_the_reference(shape: tuple[int, int]) -> None:
    p = frame(*shape)
    optimizer = Spel([p], lr=LR, momentum=BETA)
    expected, momentum = p.detach().double(), torch.zeros(shape, dtype=torch.float64)
    for _ in range(3):
        with_gradient(p)
        assert p.grad is not None
        expected, momentum = reference.spel_step(expected, p.grad.double(), momentum, LR, BETA)
        optimizer.step()
    torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=10 * CLOSE)


def test_the_momentum_of_the_first_step_is_tangent() -> None:
    p = with_gradient(frame())
    before = p.detach().clone()
    optimizer = Spel([p])
    optimizer.step()
    inner = before.mT @ optimizer.state[p]["momentum"]
    torch.testing.assert_close(inner, -inner.mT, rtol=0, atol=CLOSE)


def test_the_normal_part_of_a_gradient_has_no_effect() -> None:
    a, b = frame(), frame()
    symmetric = torch.randn(4, 4)
    with_gradient(a)
    b.grad = a.grad + a.detach() @ (symmetric + symmetric.mT)
    for p in (a, b):
        Spel([p], lr=LR).step()
    torch.testing.assert_close(a, b, rtol=0, atol=10 * CLOSE)


@pytest.mark.parametrize("lr", [1e-4, 2e-3, 5e-2])
def test_frames_stay_orthonormal(lr: float) -> None:
    p = frame()
    optimizer = Spel([p], lr=lr)
    for _ in range(20):
        with_gradient(p)
        optimizer.step()
    assert optimizer.orthogonality_error() == orthogonality_error(p) <= 1e-6


def test_a_step_goes_downhill() -> None:
    p = frame()
    optimizer = Spel([p], lr=0.02, momentum=0.5)
    covariance = torch.diag(torch.arange(9.0))
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = -(p.mT @ covariance @ p).trace()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] and losses[-1] == pytest.approx(-(5 + 6 + 7 + 8), rel=0.02)


def test_a_zero_momentum_leaves_the_frame() -> None:
    p = frame().detach()
    torch.testing.assert_close(spel_step(p, torch.zeros_like(p), LR), p, rtol=0, atol=CLOSE)


def test_a_rate_of_zero_moves_nothing() -> None:
    p = with_gradient(frame())
    before = p.detach().clone()
    Spel([p], lr=0.0).step()
    assert torch.equal(p, before)


def test_frames_without_a_gradient_do_not_move() -> None:
    still, moving = frame(), with_gradient(frame(7, 2))
    before = still.detach().clone()
    Spel([still, moving]).step()
    assert torch.equal(still, before)


def test_gradients_are_read_only() -> None:
    p = with_gradient(frame())
    assert p.grad is not None
    before = p.grad.clone()
    Spel([p]).step()
    assert torch.equal(p.grad, before) and not torch.equal(project_tangent(p.detach(), before), before)


def test_a_loaded_state_continues_bit_by_bit() -> None:
    p = with_gradient(frame())
    optimizer = Spel([p], lr=LR)
    optimizer.step()
    twin = nn.Parameter(p.detach().clone())
    resumed = Spel([twin], lr=0.02)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.grad = with_gradient(p).grad
    optimizer.step()
    resumed.step()
    assert torch.equal(twin, p)


@pytest.mark.parametrize(("lr", "momentum"), [(0.06, 0.9), (-0.01, 0.9), (float("nan"), 0.9), (0.01, 1.0)])
def test_settings_out_of_range_are_refused(lr: float, momentum: float) -> None:
    with pytest.raises(ConfigError, match=r"(lr in \[0, 0.05\].*tenth of the main rate|Spel with (lr|momentum)=)"):
        Spel([frame()], lr=lr, momentum=momentum)
    with pytest.raises(ConfigError, match="allowed"):
        Spel([{"params": [frame()], "lr": lr, "momentum": momentum}])


@pytest.mark.parametrize(
    "p",
    [torch.eye(3, 2).bfloat16(), torch.ones(3), torch.eye(2, 3), torch.ones(3, 2), 1.1 * torch.eye(3, 2)],
    ids=["bf16", "a vector", "more columns than rows", "not orthonormal", "too long"],
)
def test_what_is_no_frame_is_refused(p: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        Spel([nn.Parameter(p)])
