"""What the Stiefel manifold of `thinwire.stiefel` must satisfy, for wide, square, single-column and odd frames."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.reference import polar as reference
from thinwire.optim.spel import spel_step
from thinwire.polar import MUON, polar
from thinwire.stiefel import (
    orthogonality_error,
    principal_angles,
    principal_frame,
    project_tangent,
    random_frame,
    retract,
)

SHAPES = [(1, 1), (7, 1), (8, 8), (33, 5), (64, 16), (65, 65)]
EXACT = 1e-12  # float64, a few hundred additions
RETRACTED = 1e-6  # methods.md 1.3: two fp32 steps from singular values in [0.989, 1.020]
DRIFT = 1e-5  # the bound on the orthogonality error of a run

every_shape = pytest.mark.parametrize(("dim", "rank"), SHAPES)


def frame_of(dim: int, rank: int, seed: int = 0) -> Tensor:
    return random_frame(dim, rank, torch.Generator().manual_seed(seed))


def exact_frame(dim: int, rank: int, seed: int = 0) -> Tensor:
    return reference.polar(frame_of(dim, rank, seed))


def near_frame(dim: int, rank: int, smallest: float, largest: float) -> Tensor:
    """A matrix whose singular values are spread evenly over a range."""
    values = torch.linspace(smallest, largest, rank, dtype=torch.float64)
    return exact_frame(dim, rank) * values @ exact_frame(rank, rank, seed=1).mT


@every_shape
def test_projecting_twice_is_projecting_once(dim: int, rank: int) -> None:
    frame, gradient = exact_frame(dim, rank), torch.randn(dim, rank, dtype=torch.float64)
    once = project_tangent(frame, gradient)
    torch.testing.assert_close(project_tangent(frame, once), once, rtol=0, atol=EXACT)


@every_shape
def test_a_projection_is_tangent_and_what_it_removes_is_normal(dim: int, rank: int) -> None:
    frame, gradient = exact_frame(dim, rank), torch.randn(dim, rank, dtype=torch.float64)
    tangent = project_tangent(frame, gradient)
    inner = frame.mT @ tangent
    assert (inner + inner.mT).abs().max() < EXACT
    assert abs(float((tangent * (gradient - tangent)).sum())) < EXACT * dim * rank


@every_shape
def test_retraction_fixes_a_frame(dim: int, rank: int) -> None:
    frame = frame_of(dim, rank)
    torch.testing.assert_close(retract(frame), frame, rtol=0, atol=RETRACTED)


@every_shape
def test_retraction_moves_along_the_tangent_to_first_order(dim: int, rank: int) -> None:
    frame = exact_frame(dim, rank)
    tangent = project_tangent(frame, torch.randn(dim, rank, dtype=torch.float64))
    tangent /= torch.linalg.matrix_norm(tangent, 2).clamp_min(1e-30)
    for step in (1e-1, 1e-2):
        moved = retract(frame + step * tangent).double()
        assert (moved - frame - step * tangent).abs().max() <= step**2 + RETRACTED


@every_shape
@pytest.mark.parametrize("seed", range(3))
def test_retraction_is_exact_to_a_millionth_where_spel_needs_it(dim: int, rank: int, seed: int) -> None:
    near = near_frame(dim, rank, 0.989, 1.020)
    retracted = retract(near)
    assert orthogonality_error(retracted) <= RETRACTED
    torch.testing.assert_close(retracted.double(), reference.polar(near), rtol=0, atol=RETRACTED)


def test_five_bf16_muon_steps_are_no_retraction() -> None:
    near = near_frame(64, 16, 0.989, 1.020).float()
    assert orthogonality_error(polar(near, MUON, dtype=torch.bfloat16)) > 0.1


def test_a_bf16_model_gets_a_float32_retraction() -> None:
    retracted = retract(near_frame(64, 16, 0.99, 1.01).bfloat16())
    assert retracted.dtype == torch.float32 and orthogonality_error(retracted) <= RETRACTED


@pytest.mark.parametrize(("dim", "rank"), [(7, 1), (33, 5), (8, 8)])
@pytest.mark.parametrize("lr", [2e-3, 5e-2])
def test_a_thousand_steps_do_not_drift(dim: int, rank: int, lr: float) -> None:
    frame, worst = frame_of(dim, rank), 0.0
    for _ in range(1000):
        frame = spel_step(frame, project_tangent(frame, torch.randn(dim, rank)), lr)
        worst = max(worst, orthogonality_error(frame))
    assert worst <= DRIFT


@every_shape
def test_random_frames_are_float32_orthonormal_and_belong_to_their_generator(dim: int, rank: int) -> None:
    frame = frame_of(dim, rank)
    assert frame.dtype == torch.float32 and frame.shape == (dim, rank)
    assert orthogonality_error(frame) <= RETRACTED
    assert torch.equal(frame, frame_of(dim, rank))
    assert dim == 1 or not torch.equal(frame, frame_of(dim, rank, seed=1))


def test_random_frames_have_no_preferred_direction() -> None:
    # Haar: entries have mean 0 and variance 1/D; of 4,000 draws the means deviate by at most 5 standard errors.
    generator = torch.Generator().manual_seed(0)
    frames = torch.stack([random_frame(4, 2, generator) for _ in range(4000)])
    assert frames.mean(0).abs().max() < 5 * math.sqrt(1 / 4 / 4000)
    assert (frames.square().mean(0) - 1 / 4).abs().max() < 5 * math.sqrt(1 / 16 / 4000)


def test_principal_frames_span_what_varies_most_and_have_fixed_signs() -> None:
    basis = exact_frame(9, 9)
    covariance = basis * torch.arange(9, 0, -1, dtype=torch.float64) @ basis.mT
    frame = principal_frame(covariance, 3)
    assert frame.dtype == torch.float32 and orthogonality_error(frame) <= RETRACTED
    torch.testing.assert_close((frame.double().mT @ basis[:, :3]).abs(), torch.eye(3).double(), rtol=0, atol=1e-6)
    assert bool((frame.gather(0, frame.abs().argmax(0, keepdim=True)) > 0).all())


def test_orthogonality_error_is_the_largest_deviation_from_the_identity() -> None:
    assert orthogonality_error(torch.eye(5, 3)) == 0.0
    assert orthogonality_error(2 * torch.eye(5, 3)) == 3.0


def test_principal_angles_of_known_planes() -> None:
    unit = torch.eye(4, dtype=torch.float64)
    turned = math.cos(0.3) * unit[:, 1] + math.sin(0.3) * unit[:, 3]
    angles = principal_angles(unit[:, :2], torch.stack([turned, unit[:, 0]], 1))
    torch.testing.assert_close(angles, torch.tensor([0, 0.3], dtype=torch.float64), rtol=0, atol=1e-7)
    torch.testing.assert_close(
        principal_angles(unit[:, :2].float(), unit[:, 2:].float()), torch.full((2,), math.pi / 2).double()
    )


def test_principal_angles_do_not_depend_on_the_basis() -> None:
    a, b, rotation = exact_frame(12, 3), exact_frame(12, 3, seed=1), exact_frame(3, 3, seed=2)
    torch.testing.assert_close(principal_angles(a @ rotation, b), principal_angles(b, a))
