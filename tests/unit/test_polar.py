"""`thinwire.polar` against the singular value decomposition and against its own polynomial in float64."""

from __future__ import annotations

import sys

import pytest
import torch

import thinwire
from tests.reference import polar as reference
from thinwire.errors import ConfigError
from thinwire.polar import CONVERGED, MUON, NAMED, POLAR_EXPRESS, newton_schulz, polar

SHAPES = [(1, 1), (1, 9), (9, 1), (5, 5), (7, 16), (31, 8)]
POLAR_EXPRESS_ERROR = 0.15  # five steps map [1e-3, 1] into [0.859, 1.141]
ROUNDING = 1e-4  # five float32 quintics, whose slope at zero is 8 each

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def test_coefficients_are_those_of_the_papers() -> None:
    assert list(MUON) == reference.MUON
    assert list(POLAR_EXPRESS) == reference.POLAR_EXPRESS
    value = sum(CONVERGED)
    slope = CONVERGED[0] + 3 * CONVERGED[1] + 5 * CONVERGED[2]
    curvature = 6 * CONVERGED[1] + 20 * CONVERGED[2]
    assert (value, slope, curvature) == (1, 0, 0)


def test_the_package_exports_the_function() -> None:
    assert thinwire.polar is polar


@every_shape
def test_close_to_the_polar_factor(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    error = torch.linalg.matrix_norm(polar(x).double() - reference.polar(x), 2)
    assert error <= POLAR_EXPRESS_ERROR


@every_shape
@pytest.mark.parametrize("coefficients", [MUON, POLAR_EXPRESS], ids=["muon", "polar_express"])
def test_equals_its_polynomial_in_float64(shape: tuple[int, int], coefficients: list[tuple[float, ...]]) -> None:
    x = torch.randn(shape)
    torch.testing.assert_close(
        polar(x, coefficients).double(), reference.polynomial(x, coefficients), rtol=0, atol=ROUNDING
    )


def test_converged_steps_reach_the_polar_factor() -> None:
    x = torch.randn(6, 11)
    torch.testing.assert_close(
        polar(x, (*POLAR_EXPRESS, CONVERGED, CONVERGED)).double(), reference.polar(x), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e3, 1e20])
def test_the_scale_does_not_matter(scale: float) -> None:
    x = torch.randn(6, 11)
    torch.testing.assert_close(polar(x * scale), polar(x), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_zero_gives_zero(dtype: torch.dtype) -> None:
    assert torch.equal(polar(torch.zeros(3, 4, dtype=dtype)), torch.zeros(3, 4, dtype=dtype))


def test_a_zero_matrix_in_a_batch_leaves_the_others_alone() -> None:
    x = torch.stack([torch.zeros(3, 4), torch.randn(3, 4)])
    assert torch.equal(polar(x)[0], torch.zeros(3, 4))
    torch.testing.assert_close(polar(x)[1], polar(x[1]), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("shape", [(1, 9), (9, 1)], ids=str)
def test_a_vector_becomes_a_unit_vector(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    torch.testing.assert_close(polar(x), x / x.norm(), rtol=0, atol=POLAR_EXPRESS_ERROR)


@every_shape
def test_each_matrix_of_a_batch_is_treated_alone(shape: tuple[int, int]) -> None:
    batch = torch.randn(2, 3, *shape) * torch.tensor([1e-6, 1.0, 1e6]).view(3, 1, 1)
    alone = torch.stack([polar(x) for x in batch.flatten(0, 1)]).view_as(batch)
    torch.testing.assert_close(polar(batch), alone, rtol=0, atol=ROUNDING)


@every_shape
def test_a_tall_matrix_is_a_wide_one_transposed(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    torch.testing.assert_close(polar(x.mT), polar(x).mT, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype_comes_back_in_kind(dtype: torch.dtype) -> None:
    x = torch.randn(6, 11).to(dtype)
    result = polar(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), polar(x.float()), rtol=0, atol=2**-8)


def test_half_precision_is_normalised_before_it_overflows() -> None:
    x = torch.full((4, 4), 6e4, dtype=torch.float16)
    assert bool(polar(x).isfinite().all())
    assert bool(polar(torch.full((64, 64), 1e30), dtype=torch.bfloat16).isfinite().all())


def test_the_input_is_left_alone() -> None:
    x = torch.randn(4, 6)
    before = x.clone()
    polar(x)
    newton_schulz(x, POLAR_EXPRESS)
    assert torch.equal(x, before)


def decaying(rows: int, columns: int) -> torch.Tensor:
    """A matrix whose singular values fall to 3e-4 of the largest, as those of gradients do."""
    rank = min(rows, columns)
    left, right = (torch.linalg.qr(torch.randn(n, rank, dtype=torch.float64)).Q for n in (rows, columns))
    return left @ torch.diag(torch.logspace(0, -3.5, rank, dtype=torch.float64)) @ right.mT


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_set_is_chosen_by_name_or_by_value(name: str) -> None:
    x = torch.randn(5, 8)
    assert torch.equal(polar(x, name), polar(x, NAMED[name]))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="polar_express"):
        polar(torch.randn(2, 2), "quick")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_converging_set_converges(shape: tuple[int, int]) -> None:
    torch.testing.assert_close(polar(x := torch.randn(shape), "converging"), polar(x, exact=True), rtol=0, atol=1e-5)


def test_exact_is_the_polar_factor_and_zero_where_there_is_none() -> None:
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(polar(x[0], exact=True).double(), reference.polar(x[0]), rtol=0, atol=1e-7)
    assert torch.equal(polar(torch.zeros(2, 3), exact=True), torch.zeros(2, 3))
    assert polar(torch.diag(torch.tensor([2.0, 0.0])), exact=True).tolist() == [[1, 0], [0, 0]]
    one_direction = torch.outer(x[0, :, 0].double(), x[0, 0].double())
    torch.testing.assert_close(polar(one_direction, exact=True), one_direction / one_direction.norm())


@pytest.mark.parametrize("num_iterations", [0, 1, 2, 3, 7, 12])
def test_any_number_of_iterations(num_iterations: int) -> None:
    steps = (*POLAR_EXPRESS, *(CONVERGED,) * 7)[:num_iterations]
    x = torch.randn(5, 20)
    torch.testing.assert_close(polar(x, steps).double(), reference.polynomial(x, steps), rtol=0, atol=ROUNDING)


GRAM_ROUNDING = 5e-3  # float32, small singular values included: the first Gram matrix has lost half their digits
HALF_ROUNDING = 1.5  # the error in bfloat16 against that of iterating on X itself in bfloat16


@pytest.mark.parametrize("shape", [(32, 96), (96, 32), (64, 64)], ids=str)
@pytest.mark.parametrize("name", ["muon", "polar_express"])
def test_the_gram_form_keeps_small_singular_values(shape: tuple[int, int], name: str) -> None:
    x = decaying(*shape).float()
    expected = reference.polynomial(x, NAMED[name])
    assert torch.linalg.matrix_norm(polar(x, name).double() - expected, 2) <= GRAM_ROUNDING
    half = polar(x, name, dtype=torch.bfloat16).double()
    direct = (x / (1.02 * x.norm())).bfloat16()
    for a, b, c in NAMED[name]:
        gram = direct @ direct.mT
        direct = a * direct + (b * gram + c * gram @ gram) @ direct
    assert (half - expected).norm() <= HALF_ROUNDING * (direct.double() - expected).norm()


@pytest.mark.parametrize("shape", [(513, 520), (514, 900)], ids=str)
def test_half_products_equal_whole_ones(shape: tuple[int, int]) -> None:
    x = decaying(*shape).float()
    error = polar(x, dtype=torch.float32).double() - reference.polynomial(x, POLAR_EXPRESS)
    assert torch.linalg.matrix_norm(error, 2) <= GRAM_ROUNDING


def test_a_batch_larger_than_the_cache_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 4, 9)
    whole = polar(x)
    monkeypatch.setattr(sys.modules["thinwire.polar"], "_CACHED_NUMBERS", 80)
    torch.testing.assert_close(polar(x), whole, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 3, 4), (2, 0, 4)], ids=str)
def test_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    assert polar(torch.zeros(shape)).shape == shape


def test_a_parameter_is_taken_as_a_constant() -> None:
    assert not polar(torch.nn.Parameter(torch.randn(3, 3))).requires_grad
