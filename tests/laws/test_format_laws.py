"""What every number format of the wire must satisfy, over all formats: error bound, cost, what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from thinwire import codecs
from thinwire.codecs.format_names import FORMATS, get_format
from thinwire.codecs.port import Port, pack, unpack
from thinwire.wire import Direction

DIM = 6

every_format = pytest.mark.parametrize("wire_format", FORMATS)


def crossed(wire_format: str, z_BTK: Tensor) -> Tensor:
    codec = codecs.get("identity", wire_format=wire_format)
    sender, receiver = (Port(codec, 0, direction) for direction in Direction)
    arrived_BTK, _ = unpack(pack(z_BTK, None, sender, 0, DIM), receiver, 0, DIM)
    return arrived_BTK


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


EDGES = [0.0, -0.0, 1.0, -1.0, 3.25, 1e-30, -1e30, 1e30, 1e-38, 1e-42, 2.0**-149]
INPUTS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(2, 3, DIM),
    "zeros": lambda: torch.zeros(2, 3, DIM),
    "constant": lambda: torch.full((2, 3, DIM), -7.3),
    "tiny": lambda: 1e-30 * torch.randn(2, 3, DIM),
    "huge": lambda: 1e30 * torch.randn(2, 3, DIM),
    "largest": lambda: torch.full((2, 3, DIM), 3.3e38),
    "wide": lambda: 10 ** torch.linspace(-30, 30, 6 * DIM).view(2, 3, DIM),
}


def bound(wire_format: str, z: Tensor) -> Tensor:
    """The largest error that a format's documentation allows, element by element."""
    magnitude = z.double().abs()
    match wire_format:
        case "fp32":
            return torch.zeros_like(magnitude)
        case "bf16":
            return 2**-8 * magnitude
        case "fp16":
            return torch.maximum(2**-11 * magnitude, 2**-25 * magnitude.max())
        case "int8" | "int6" | "int4" | "int3" | "int2":  # all of z is one block
            return (magnitude.max() / (2 ** int(wire_format[3:]) - 1) * (1 + 2**-7) + 1e-38).expand_as(magnitude)
        case "top32":  # all of z is one block: what is not among the 32 largest is lost
            lost = magnitude.flatten().sort(descending=True).values[32:33]
            return torch.maximum(2**-8 * magnitude, lost.expand_as(magnitude) if len(lost) else 0 * magnitude)
    raise AssertionError(f"state an error bound for {wire_format}")


@every_format
@pytest.mark.parametrize("kind", INPUTS)
def test_the_stated_error_bound_holds(wire_format: str, kind: str) -> None:
    z = INPUTS[kind]()
    arrived = crossed(wire_format, z)
    assert bool(((arrived.double() - z.double()).abs() <= bound(wire_format, z)).all())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_fp16_uses_its_whole_range_whatever_the_scale(scale: float) -> None:
    z = torch.tensor([1.0, 1.3 * 2**-14, 1.3 * 2**-28, 0.0, -1.0, 0.7]).view(1, 1, DIM) * scale
    arrived = crossed("fp16", z)
    assert bool(((arrived.double() - z.double()).abs() <= 2**-11 * z.double().abs()).all())


def test_fp32_is_exact_to_the_bit() -> None:
    values = torch.tensor([*EDGES, math.inf, -math.inf, math.nan])
    words = torch.cat([values.view(torch.int32), torch.tensor([0x7FA12345, 0x7FFFFFFF, 1], dtype=torch.int32)])
    z = words.view(torch.float32).repeat(6)[: 12 * DIM].view(3, 4, DIM)
    arrived = crossed("fp32", z)
    assert torch.equal(bits(arrived), bits(z))


@every_format
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_arrive_as_if_it_were(wire_format: str, value: float) -> None:
    z = torch.randn(1, 2, DIM)
    z[0, 1, 0] = value
    arrived = crossed(wire_format, z)
    assert not arrived[0, 1, 0].isfinite()


@every_format
def test_a_format_says_what_it_costs(wire_format: str) -> None:
    one = get_format(wire_format)
    assert one.name == wire_format
    if wire_format.startswith("int"):  # eight codes together; a step for every 64
        assert [one.code_bytes(n) for n in (0, 1, 8, 9)] == [int(wire_format[3:]) * octets for octets in (0, 1, 1, 2)]
        assert [one.side_bytes(n) for n in (0, 1, 64, 65)] == [0, 2, 2, 4]
    elif wire_format.startswith("top"):  # of every 256
        assert [one.code_bytes(n) for n in (0, 1, 256, 257)] == [0, 32, 32, 64]
        assert [one.side_bytes(n) for n in (0, 1, 256, 257)] == [0, 64, 64, 128]
    else:
        assert [one.code_bytes(n) for n in (0, 1, 5)] == [(4 if wire_format == "fp32" else 2) * n for n in (0, 1, 5)]


@every_format
def test_what_arrives_can_be_changed_in_place(wire_format: str) -> None:
    z_BTK = torch.randn(2, 5, DIM, requires_grad=True)
    crossed(wire_format, z_BTK).mul_(2).sum().backward()
    twos = torch.full_like(z_BTK, 2)
    assert bool(((z_BTK.grad - twos).abs() <= bound(wire_format, twos)).all())
