"""Integers for numbers: blockwise quantisation, packing of codes, and the rotation that makes coordinates alike.

With b bits a block of numbers becomes codes 0 ... 2^b - 1 and one step s. Code c stands for `(c + 1/2 - 2^(b-1)) s`:
levels lie evenly around zero and zero is none of them, so that all 2^b are used; at 2 bits a level at zero would waste
a quarter of them. Rounding to the nearest level errs by s/2 at most, within the range of `s (2^b - 1) / 2`.

Dimension letters: N numbers, G blocks, S numbers of a block, K coordinates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.bits import random_words

MAX_BITS = 8
# Steps of the uniform quantiser with 2^b levels that is best for a normal variable of variance 1
# (Max, "Quantizing for minimum distortion", 1960, table II; 7 and 8 bits by the same condition).
NORMAL_STEPS = {1: 1.5956, 2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 7: 0.0569, 8: 0.0308}
_CODES = 8  # that are packed together, into as many bytes as a code has bits
_NOISE_BITS = 16


def to_blocks(x: Tensor, size: int) -> Tensor:
    """Return float32 `(G, S)`: the numbers of a tensor of any shape in a row, the last block filled up with zeros."""
    flat = x.detach().flatten().float()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def absmax_steps(x_GS: Tensor, bits: int) -> Tensor:
    """Return steps `(G,)` with which each block's largest magnitude is the outermost level: nothing is cut off."""
    return x_GS.abs().amax(dim=1) / (((1 << bits) - 1) / 2)


def clipped_steps(x_GS: Tensor, bits: int) -> Tensor:
    """Return steps `(G,)` that are best for normal numbers of each block's mean square; larger ones are cut off."""
    return torch.minimum(absmax_steps(x_GS, bits), NORMAL_STEPS[bits] * x_GS.square().mean(dim=1).sqrt())


def quantise(x_GS: Tensor, steps_G: Tensor, bits: int, noise_GS: Tensor | None = None) -> Tensor:
    """Return uint8 codes `(G, S)`: the nearest levels, or with `noise_GS` in [0, 1) one of the two around a number.

    With uniform noise the levels are right on average, for numbers in range. A block of step 0 gets any code.
    """
    scaled = x_GS / steps_G.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    shift = 1 << bits - 1
    codes = (scaled + shift if noise_GS is None else scaled + (shift - 0.5) + noise_GS).floor_()
    return codes.clamp_(0, (1 << bits) - 1).nan_to_num_(0).to(torch.uint8)


def dequantise(codes_GS: Tensor, steps_G: Tensor, bits: int) -> Tensor:
    """Return float32 `(G, S)`: the levels of codes. A step of 0 gives zeros, one of NaN gives NaN."""
    return (codes_GS.float() + (0.5 - (1 << bits - 1))) * steps_G.unsqueeze(1)


def noise(x: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1) in the shape of a float32 tensor, drawn from its own bits.

    So that a message is rounded alike whatever the order of messages, and no generator has to be kept in step.
    """
    seed = int(x.contiguous().view(torch.int32).sum(dtype=torch.int64))
    words = random_words(seed, x.numel(), 0, -(-x.numel() * _NOISE_BITS // 64), x.device)
    drawn = words.view(torch.int16)[: x.numel()].view(x.shape)
    uniform: Tensor = (drawn.float() + (1 << _NOISE_BITS - 1)) * 2.0**-_NOISE_BITS
    return uniform


def code_bytes(num_codes: int, bits: int) -> int:
    """Bytes that `pack_codes` needs."""
    return -(-num_codes // _CODES) * bits


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return uint8 `(code_bytes,)`: eight codes of any shape in as many bytes as a code has bits, the first lowest."""
    flat = codes.flatten().to(torch.int64)
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % _CODES)).view(-1, _CODES)
    words = (rows << _shifts(bits, codes.device)).sum(dim=1)
    return words.view(torch.uint8).view(-1, _CODES)[:, :bits].flatten()


def unpack_codes(packed: Tensor, num_codes: int, bits: int) -> Tensor:
    """Return uint8 `(num_codes,)`."""
    octets = torch.nn.functional.pad(packed.view(-1, bits), (0, _CODES - bits))
    words = octets.contiguous().view(torch.int64)
    codes = (words >> _shifts(bits, packed.device)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten()[:num_codes]


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(_CODES, device=device) * bits


# --- how far off -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorStatistics:
    """What a lossy wire did to numbers x that arrived as y.

    Attributes:
        relative_mse: mean square of y - x over that of x.
        sqnr_db: the same in decibels, -10 log10; infinite where nothing was lost.
        bias: mean of (y - x) x over the mean square of x: below zero where numbers arrive too small.
        largest: the largest |y - x|.
    """

    relative_mse: float
    sqnr_db: float
    bias: float
    largest: float


def error_statistics(x: Tensor, y: Tensor) -> ErrorStatistics:
    """Compare what was sent with what arrived, tensors of one shape, in float64. Zeros that stay zero lost nothing."""
    sent, error = x.detach().double(), (y - x).detach().double()
    power, noise_power = float(sent.square().mean()), float(error.square().mean())
    if noise_power == 0:
        return ErrorStatistics(0.0, math.inf, 0.0, 0.0)
    relative = noise_power / power if power else math.inf
    bias = float((error * sent).mean()) / power if power else 0.0
    return ErrorStatistics(relative, -10 * math.log10(relative), bias, float(error.abs().max()))


# --- rotation ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def rotation(dim: int, device: torch.device) -> Tensor:
    """Return an orthonormal `(K, K)` matrix `diag(s) H`, the same everywhere: x -> x R mixes coordinates.

    H has blocks of Hadamard's matrix as large as a power of two divides K, so an odd K is not mixed, only its signs
    change. After it a coordinate is a sum of many, with the variance of their mean (arXiv 2404.00456).
    """
    size = dim & -dim
    hadamard = torch.ones(1, 1)
    while hadamard.size(0) < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    bits = random_words(0, dim, 0, -(-dim // 64))
    signs = torch.tensor([1.0 - 2.0 * (int(bits[i // 64]) >> i % 64 & 1) for i in range(dim)])
    mixed: Tensor = signs.unsqueeze(1) * torch.block_diag(*[hadamard] * (dim // size)) / math.sqrt(size)
    return mixed.to(device)
