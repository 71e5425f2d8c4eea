"""Muon against one matrix in float64, and what an optimizer must not do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.reference.optimizers import muon_step
from thinwire import Muon
from thinwire.errors import ConfigError
from thinwire.optim.matrices import logical_matrices, orthogonalise

CLOSE = 1e-5  # float32 steps of length 0.1
LR, BETA = 0.1, 0.9


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).to(dtype))


def with_gradient(p: nn.Parameter, gradient: Tensor | None = None) -> nn.Parameter:
    p.grad = torch.randn_like(p) if gradient is None else gradient
    return p


@pytest.mark.parametrize("shape", [(4, 4), (9, 3), (3, 9), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_steps_are_those_of_the_reference(shape: tuple[int, int], nesterov: bool, decay: float) -> None:
    p = parameter(*shape)
    optimizer = Muon([p], lr=LR, momentum=BETA, nesterov=nesterov, weight_decay=decay)
    weight, momentum = p.detach().double(), torch.zeros(shape, dtype=torch.float64)
    for _ in range(3):
        with_gradient(p)
        weight, momentum = muon_step(weight, p.grad.double(), momentum, LR, BETA, nesterov, decay)
        optimizer.step()
    torch.testing.assert_close(p.detach().double(), weight, rtol=0, atol=5 * CLOSE)


def test_a_square_matrix_moves_by_lr_in_every_direction() -> None:
    p = with_gradient(parameter(8, 8))
    before = p.detach().clone()
    Muon([p], lr=LR).step()
    moved = torch.linalg.svdvals(before - p.detach())
    assert moved[0] < 1.15 * LR and moved[-2] > 0.85 * LR


@pytest.mark.parametrize("splits", [(4, 2, 2), (3, 5), (1, 7)], ids=str)
def test_fused_matrices_step_like_separate_ones(splits: tuple[int, ...]) -> None:
    fused = with_gradient(parameter(8, 6))
    rows = zip(fused.split(splits), fused.grad.split(splits), strict=True)
    parts = [with_gradient(nn.Parameter(weight.clone()), gradient) for weight, gradient in rows]
    Muon([{"params": [fused], "splits": [splits]}], lr=LR).step()
    Muon(parts, lr=LR).step()
    torch.testing.assert_close(fused, torch.cat([p.detach() for p in parts]), rtol=0, atol=CLOSE)


def test_a_fused_matrix_is_not_one_matrix() -> None:
    fused = with_gradient(parameter(8, 6))
    whole = with_gradient(nn.Parameter(fused.detach().clone()), fused.grad)
    Muon([{"params": [fused], "splits": [(4, 4)]}], lr=LR).step()
    Muon([whole], lr=LR).step()
    assert (fused - whole).abs().max() > 0.1 * LR


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_convolution_filters_step_like_matrices(layout: torch.memory_format) -> None:
    filters = with_gradient(parameter(5, 3, 2, 2))
    matrix = with_gradient(nn.Parameter(filters.detach().reshape(5, 12).clone()), filters.grad.reshape(5, 12))
    filters.data = filters.data.contiguous(memory_format=layout)
    Muon([filters], lr=LR).step()
    Muon([matrix], lr=LR).step()
    torch.testing.assert_close(filters.detach().reshape(5, 12), matrix.detach(), rtol=0, atol=CLOSE)


def test_logical_matrices_are_views() -> None:
    p = torch.zeros(6, 2, 3)
    for matrix in logical_matrices(p, (4, 2)):
        matrix.add_(1)
    assert bool((p == 1).all())


def test_matrices_of_one_shape_share_a_batch_and_stay_in_order() -> None:
    matrices = [torch.randn(3, 4), torch.randn(2, 2), torch.randn(3, 4)]
    for together, matrix in zip(orthogonalise(matrices), matrices, strict=True):
        torch.testing.assert_close(together, orthogonalise([matrix])[0], rtol=0, atol=CLOSE)


def test_gradients_are_read_only() -> None:
    p = with_gradient(parameter(4, 6))
    assert p.grad is not None
    before = p.grad.clone()
    Muon([p]).step()
    assert torch.equal(p.grad, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rate_of_zero_moves_nothing(dtype: torch.dtype) -> None:
    p = with_gradient(parameter(4, 6, dtype=dtype))
    before = p.detach().clone()
    Muon([p], lr=0.0, weight_decay=0.5).step()
    assert torch.equal(p, before)


def test_parameters_without_a_gradient_neither_move_nor_decay() -> None:
    still, moving = parameter(4, 4), with_gradient(parameter(4, 4))
    before = still.detach().clone()
    optimizer = Muon([still, moving], lr=LR, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(still, before) and not optimizer.state[still]["momentum"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_continues_bit_by_bit(dtype: torch.dtype) -> None:
    p = parameter(6, 4, dtype=dtype)
    optimizer = Muon([{"params": [p], "splits": [(4, 2)]}], lr=LR)
    with_gradient(p)
    optimizer.step()
    twin = nn.Parameter(p.detach().clone())
    resumed = Muon([{"params": [twin], "splits": [(4, 2)]}], lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[twin]["momentum"].dtype == torch.float32
    twin.grad = with_gradient(p).grad
    optimizer.step()
    resumed.step()
    assert torch.equal(twin, p)


@pytest.mark.parametrize("nesterov", [True, False])
def test_bf16_parameters_keep_a_float32_momentum(nesterov: bool) -> None:
    p = with_gradient(parameter(4, 6, dtype=torch.bfloat16))
    weight, gradient = p.detach().double(), p.grad.double()
    optimizer = Muon([p], lr=LR, momentum=BETA, nesterov=nesterov)
    optimizer.step()
    expected, momentum = muon_step(weight, gradient, torch.zeros_like(weight), LR, BETA, nesterov, 0.0)
    assert optimizer.state[p]["momentum"].dtype == torch.float32
    torch.testing.assert_close(optimizer.state[p]["momentum"].double(), momentum, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(p.detach().double(), expected, rtol=2**-8, atol=CLOSE)


def test_a_closure_is_called_with_gradients_on() -> None:
    p = parameter(3, 3)

    def closure() -> float:
        loss = p.square().sum()
        loss.backward()
        return float(loss.detach())

    assert Muon([p]).step(closure) == pytest.approx(float(p.detach().square().sum()), abs=10)
    assert p.grad is not None


def test_a_quadratic_goes_down() -> None:
    p, target = parameter(6, 4), torch.randn(6, 4)
    optimizer = Muon([p], lr=0.05)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (p - target).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(
    "arguments", [{"lr": -1.0}, {"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1.0}], ids=str
)
def test_settings_out_of_range_are_refused_for_all_and_for_one_group(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        Muon([parameter(2, 2)], **arguments)
    with pytest.raises(ConfigError, match="allowed"):
        Muon([{"params": [parameter(2, 2)], **arguments}])


def test_vectors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(5,\).*param_groups"):
        Muon([parameter(5)])


def test_a_group_added_later_is_stepped_too() -> None:
    first, later = with_gradient(parameter(2, 2)), with_gradient(parameter(3, 2))
    before = later.detach().clone()
    optimizer = Muon([first], lr=LR)
    optimizer.add_param_group({"params": [later]})
    optimizer.step()
    assert not torch.equal(later, before)
