"""Number formats of the wire: how coordinates become bytes. Nothing here is differentiated.

A format writes a tensor into the code and side sections of a payload and reads it back; its cost follows from the
number of elements alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Format(Protocol):
    """What a number format must offer."""

    @property
    def name(self) -> str:
        """Short name, as in recipes."""

    def code_bytes(self, num_elements: int) -> int:
        """Bytes of the code section."""

    def side_bytes(self, num_elements: int) -> int:
        """Bytes of the side section."""

    def write(self, z: Tensor, codes: Tensor, side: Tensor) -> None:
        """Fill the two uint8 sections from `z`, of any shape and floating dtype."""

    def read(self, codes: Tensor, side: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return what was written from a tensor of this shape as a flat float32 tensor that owns its memory."""


@dataclass(frozen=True)
class PlainFormat:
    """Each number as it is in `dtype`: float32 is exact, bfloat16 rounds to 8 bits of mantissa."""

    name: str
    dtype: torch.dtype

    def code_bytes(self, num_elements: int) -> int:
        return num_elements * self.dtype.itemsize

    def side_bytes(self, num_elements: int) -> int:
        return 0

    def write(self, z: Tensor, codes: Tensor, side: Tensor) -> None:
        codes.view(self.dtype).view(z.shape).copy_(z)

    def read(self, codes: Tensor, side: Tensor, shape: tuple[int, ...]) -> Tensor:
        return codes.view(self.dtype).to(torch.float32, copy=True)


@dataclass(frozen=True)
class ScaledHalf:
    """float16 after division by a power of two per message, so that neither gradients vanish nor activations overflow.

    Error at most 2^-11 of a number, or 2^-25 of the message's largest where that is more. The scale, a float32 in the
    side section, maps the largest magnitude into [2^14, 2^15).
    """

    name: str = "fp16"

    def code_bytes(self, num_elements: int) -> int:
        return 2 * num_elements

    def side_bytes(self, num_elements: int) -> int:
        return 4

    def write(self, z: Tensor, codes: Tensor, side: Tensor) -> None:
        largest = z.detach().abs().amax().float() if z.numel() else torch.zeros((), device=z.device)
        scale = torch.exp2(torch.frexp(largest).exponent.clamp(-110, 127).float() - 15)
        side.view(torch.float32).copy_(scale.view(1))
        codes.view(torch.float16).view(z.shape).copy_(z.float() / scale)

    def read(self, codes: Tensor, side: Tensor, shape: tuple[int, ...]) -> Tensor:
        return codes.view(torch.float16).float() * side.view(torch.float32)
