"""Integers for numbers: the best steps, packing, rounding that is right on average, rotation, what errors are told."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from thinwire import codecs, quant
from thinwire.codecs.format_names import get_format
from thinwire.codecs.integers import Blockwise
from thinwire.errors import ConfigError

# Mean square error of the best uniform quantiser for a normal variable (Max, 1960, table II).
MAX_ERRORS = {2: 0.1188, 3: 0.03744, 4: 0.01154}


def through(name: str, x: Tensor) -> Tensor:
    """What arrives of a tensor."""
    one = get_format(name)
    codes, side = (torch.empty(n, dtype=torch.uint8) for n in (one.code_bytes(x.numel()), one.side_bytes(x.numel())))
    one.write(x, codes, side)
    return one.read(codes, side, tuple(x.shape)).view(x.shape)


def distortion(step: float, bits: int) -> float:
    """Mean square error for a normal variable, by the trapezoidal rule."""
    x = torch.linspace(-9, 9, 1_000_001, dtype=torch.float64)
    largest = 2 ** (bits - 1) - 0.5
    level = ((x / step).floor() + 0.5).clamp(-largest, largest) * step
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    return float(torch.trapezoid((x - level).square() * density, x))


@pytest.mark.parametrize("bits", quant.NORMAL_STEPS)
def test_the_steps_are_best_for_normal_numbers(bits: int) -> None:
    step = quant.NORMAL_STEPS[bits]
    assert all(distortion(step, bits) < distortion(factor * step, bits) for factor in (0.97, 1.03))


@pytest.mark.parametrize("bits", MAX_ERRORS)
def test_clipped_integers_err_as_little_as_theory_says(bits: int) -> None:
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    clipped, whole = (
        quant.error_statistics(x, through(f"int{bits}{clip}-b4096", x)).relative_mse for clip in ("-clip", "")
    )
    assert clipped == pytest.approx(MAX_ERRORS[bits], rel=0.03) and whole > 1.5 * clipped


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_codes_survive_packing(bits: int, count: int) -> None:
    codes = torch.randint(1 << bits, (count,), dtype=torch.uint8)
    packed = quant.pack_codes(codes, bits)
    assert packed.numel() == quant.code_bytes(count, bits)
    assert torch.equal(quant.unpack_codes(packed, count, bits), codes)


def test_the_first_code_is_lowest() -> None:
    assert quant.pack_codes(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist() == [0x21, 0x03, 0, 0]


@pytest.mark.parametrize("name", ["int4-sr", "int2-sr", "had-int3-sr-b32"])
def test_stochastic_rounding_is_right_on_average_and_errs_by_less_than_a_step(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 64, generator=generator)
    x[:, 0] = 4.0  # the step stays
    total = torch.zeros_like(x)
    for _ in range(400):  # noise is drawn from the content, so another row before it draws anew
        arrived = through(name, torch.cat([torch.randn(1, 64, generator=generator), x]))[1:]
        total += arrived
    nearest = through(name.replace("-sr", ""), x)
    assert (total / 400 - x).square().mean() < 0.02 * (nearest - x).square().mean()


def test_stochastic_rounding_of_one_message_is_always_the_same() -> None:
    x = torch.randn(8, 64)
    assert torch.equal(through("int4-sr", x), through("int4-sr", x.clone()))
    assert not torch.equal(through("int4-sr", x), through("int4-sr", -x).neg())


@pytest.mark.parametrize("dim", [1, 2, 6, 32, 96, 256])
def test_a_rotation_is_orthonormal_and_mixes(dim: int) -> None:
    rotation = quant.rotation(dim, torch.device("cpu"))
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(dim))
    assert (rotation != 0).sum(1).eq(dim & -dim).all()


def test_a_rotation_spreads_outliers() -> None:
    x = torch.randn(512, 64)
    x[:, 3] *= 100
    mixed, plain = (quant.error_statistics(x[:, :3], through(name, x)[:, :3]) for name in ("had-int8", "int8"))
    small = (
        quant.error_statistics(x, through("had-int4", x)).relative_mse,
        quant.error_statistics(x, through("int4", x)).relative_mse,
    )
    assert mixed.largest < plain.largest and small[0] < 2 * small[1]


@pytest.mark.parametrize("name", ["int4-clip", "int2-sr", "had-int6", "had-int3-clip-sr-b16"])
def test_edges_of_every_kind_of_integers(name: str) -> None:
    assert get_format(name).name == name
    zeros, tiny = torch.zeros(3, 40), torch.full((3, 40), 1e-42)
    assert torch.equal(through(name, zeros), zeros)
    assert through(name, tiny).abs().max() <= 1e-38
    assert through(name, torch.full((3, 40), 1e30)).isfinite().all()
    broken = torch.randn(3, 40)
    broken[1, 2] = math.nan
    assert not through(name, broken)[1, 2].isfinite()
    assert through(name, torch.empty(0, 40)).shape == (0, 40)


@pytest.mark.parametrize("name", ["int1", "int9", "int", "int4-", "int4-b0", "int4-sr-clip", "had-", "had-bf16", 4, ""])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed.*int4"):
        get_format(name)


def test_gradients_have_their_own_format_of_the_same_cost() -> None:
    codec = codecs.get("identity", wire_format="int4-clip", gradient_format="int4-sr")
    assert [one.name for one in codec.number_formats] == ["int4-clip", "int4-sr"]
    assert codec.digest != codecs.get("identity", wire_format="int4-clip").digest
    for other in ("int3", "int4-b32", "bf16", "int5-b128"):
        with pytest.raises(ConfigError, match="one budget"):
            codecs.get("identity", wire_format="int4", gradient_format=other)


def test_more_bits_err_less() -> None:
    x = torch.randn(64, 64)
    errors = [
        quant.error_statistics(x, through(Blockwise(bits, clipped=True).name, x)).relative_mse for bits in range(2, 9)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-3


def test_error_statistics_say_what_they_say() -> None:
    x = torch.tensor([3.0, -4.0])
    told = quant.error_statistics(x, 0.9 * x)
    assert told.relative_mse == pytest.approx(0.01) and told.sqnr_db == pytest.approx(20)
    assert told.bias == pytest.approx(-0.1) and told.largest == pytest.approx(0.4)
    assert quant.error_statistics(x, x).sqnr_db == math.inf
    assert quant.error_statistics(torch.zeros(2), torch.zeros(2)).relative_mse == 0
    assert quant.error_statistics(torch.zeros(2), torch.ones(2)).relative_mse == math.inf
