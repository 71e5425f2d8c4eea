"""Top-k sparsification as a number format: of every 256 numbers the k largest travel, the others arrive as zeros.

Each costs a bfloat16 and a byte for its place, so `top32` on activations of bfloat16 sends 16/3 = 5.3 times less. A
gradient's largest numbers are chosen anew: it may use other places than its activation did. There is no memory of what
was left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import quant
from thinwire.errors import ConfigError

_BLOCK = 256  # numbers, so that a place is a byte
_NAME = re.compile(r"top([1-9]\d{0,2})")
GRAMMAR = "topK with K of every 256 numbers, 1 to 256, as in top32"


@dataclass(frozen=True)
class TopK:
    """The `count` largest magnitudes of each 256 consecutive numbers, rounded to bfloat16. NaN counts as largest."""

    count: int

    @property
    def name(self) -> str:
        return f"top{self.count}"

    def code_bytes(self, num_elements: int) -> int:
        return self.count * -(-num_elements // _BLOCK)

    def side_bytes(self, num_elements: int) -> int:
        return 2 * self.code_bytes(num_elements)

    def write(self, z: Tensor, codes: Tensor, side: Tensor) -> None:
        blocks_GS = quant.to_blocks(z, _BLOCK)
        places_GK = blocks_GS.abs().topk(self.count, dim=1, sorted=False).indices.sort(dim=1).values
        codes.copy_(places_GK.flatten().to(torch.uint8))
        side.view(torch.bfloat16).copy_(blocks_GS.gather(1, places_GK).flatten())

    def read(self, codes: Tensor, side: Tensor, shape: tuple[int, ...]) -> Tensor:
        num_elements = torch.Size(shape).numel()
        blocks_GS = torch.zeros(-(-num_elements // _BLOCK), _BLOCK, device=codes.device)
        values_GK = side.view(torch.bfloat16).float().view(-1, self.count)
        blocks_GS.scatter_(1, codes.long().view(-1, self.count), values_GK)
        return blocks_GS.flatten()[:num_elements].clone()


def parse(name: str) -> TopK | None:
    """Return the format of a name like `top32`; None where it is none.

    Raises:
        ConfigError: a name that begins like one and is none.
    """
    match = _NAME.fullmatch(name)
    if match is not None and int(match[1]) <= _BLOCK:
        return TopK(int(match[1]))
    if name.startswith("top"):
        raise ConfigError(f"wire format {name!r}", GRAMMAR)
    return None
