"""Integers on the wire, as formats made of formats.

`Blockwise` writes blocks of numbers as codes of a few bits with one step each; `Rotated` mixes the coordinates before
another format sees them, and back. Names say what is composed: `int4`, `int4-b32` (blocks of 32), `int4-clip` (steps
that are best for normal numbers), `int4-sr` (stochastic rounding), `had-int4` (rotated).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import quant
from thinwire.codecs.formats import Format
from thinwire.errors import ConfigError

INTEGERS = ("int8", "int6", "int4", "int3", "int2")
_BLOCK = 64
_NAME = re.compile(r"(had-)?int([2-8])(-clip)?(-sr)?(?:-b([1-9]\d{0,5}))?")
GRAMMAR = "[had-]intBITS[-clip][-sr][-bBLOCK] with 2 to 8 bits, as in int8, int4-clip, had-int3-clip-b128, int4-sr"


@dataclass(frozen=True)
class Blockwise:
    """Codes of `bits` bits, and a bfloat16 step for every `block` consecutive numbers (the last block may be shorter).

    Error of a number: half a step, where `clipped` more for those cut off; a step is 2 / (2^bits - 1) of the block's
    largest magnitude, rounded up by up to 2^-7. A block of zeros is exact. One with a NaN or an infinity comes out
    without a finite number: what is not finite is not hidden. With `stochastic` the error is up to a step, and
    zero on average.
    """

    bits: int
    block: int = _BLOCK
    clipped: bool = False
    stochastic: bool = False

    @property
    def name(self) -> str:
        words = [f"int{self.bits}", "clip" * self.clipped, "sr" * self.stochastic]
        return "-".join([word for word in words if word] + [f"b{self.block}"] * (self.block != _BLOCK))

    def code_bytes(self, num_elements: int) -> int:
        return quant.code_bytes(num_elements, self.bits)

    def side_bytes(self, num_elements: int) -> int:
        return 2 * -(-num_elements // self.block)

    def write(self, z: Tensor, codes: Tensor, side: Tensor) -> None:
        blocks_GS = quant.to_blocks(z, self.block)
        steps_G = (quant.clipped_steps if self.clipped else quant.absmax_steps)(blocks_GS, self.bits)
        steps_G = _rounded_up(steps_G)
        noise_GS = quant.noise(blocks_GS) if self.stochastic else None
        codes_GS = quant.quantise(blocks_GS, steps_G, self.bits, noise_GS)
        codes.copy_(quant.pack_codes(codes_GS.flatten()[: z.numel()], self.bits))
        side.view(torch.bfloat16).copy_(steps_G)

    def read(self, codes: Tensor, side: Tensor, shape: tuple[int, ...]) -> Tensor:
        num_elements = _numel(shape)
        steps_G = side.view(torch.bfloat16).float()
        flat = quant.unpack_codes(codes, num_elements, self.bits)
        codes_GS = torch.nn.functional.pad(flat, (0, -num_elements % self.block)).view(-1, self.block)
        return quant.dequantise(codes_GS, steps_G, self.bits).flatten()[:num_elements].clone()


@dataclass(frozen=True)
class Rotated:
    """Another format behind `quant.rotation` of the last dimension: outliers are spread over all coordinates."""

    inner: Format

    @property
    def name(self) -> str:
        return f"had-{self.inner.name}"

    def code_bytes(self, num_elements: int) -> int:
        return self.inner.code_bytes(num_elements)

    def side_bytes(self, num_elements: int) -> int:
        return self.inner.side_bytes(num_elements)

    def write(self, z: Tensor, codes: Tensor, side: Tensor) -> None:
        self.inner.write(z.detach().float() @ quant.rotation(z.size(-1), z.device), codes, side)

    def read(self, codes: Tensor, side: Tensor, shape: tuple[int, ...]) -> Tensor:
        rotated = self.inner.read(codes, side, shape).view(shape)
        return (rotated @ quant.rotation(shape[-1], rotated.device).mT).flatten()


def parse(name: str) -> Format | None:
    """Return the format of a name like those above; None where it is none.

    Raises:
        ConfigError: a name that begins like one and is none.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        if re.match(r"(had-)?int", name):
            raise ConfigError(f"wire format {name!r}", GRAMMAR)
        return None
    rotated, bits, clipped, stochastic, block = match.groups()
    inner = Blockwise(int(bits), int(block or _BLOCK), clipped is not None, stochastic is not None)
    return Rotated(inner) if rotated else inner


def _rounded_up(steps: Tensor) -> Tensor:
    """The next bfloat16 that is not smaller, so that the largest number still fits."""
    rounded = steps.bfloat16()
    short = rounded.float() < steps
    return torch.where(short, (rounded.view(torch.int16) + 1).view(torch.bfloat16), rounded).float()


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
