"""First values that depend on a seed and a global name alone, so that no layout changes them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def generator(seed: int, name: str) -> torch.Generator:
    """The generator, on the CPU, of one named tensor."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def normal_(parameter: Tensor, std: float, seed: int, name: str) -> None:
    """Fills a parameter of any device and dtype with N(0, std²), drawn in float32 from its own generator."""
    values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        parameter.copy_(values.normal_(0.0, std, generator=generator(seed, name)))
