"""Signs as bits: packing, counting in bit planes without unpacking, majority.

**The one rule.** A bit is 1 where x < 0. Everything else is 0 and counts as +1: positive numbers, zero, -0.0 and NaN
of either sign. So a zero on a one-bit wire is a vote for +1: there is no third symbol, and a rule that looks at nothing
but the value is the same on every machine. Two ways around the bias, where zeros are common:

- `pack_signs(x, draw)` takes the bit of each zero and NaN from `draw` (see `random_words`): right on average.
- `pack_ternary(x)` sends two bits, negative and positive, and a zero votes for neither: the paper's integer sum.

Which of them is used must be the same on all ranks. A worker that abstains is left out of the words that are counted.

**Layout.** Element `i` of the flattened tensor is bit `i % 64` of word `i // 64`, the lowest bit first; a word is an
int64 whose bytes lie in memory lowest first, so element `i` is also bit `i % 8` of byte `i // 8`. Bits behind the last
element are 0. The number of elements travels beside the words: whoever unpacks has to give it.

Dimension letters: M workers, W words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = TypeVar("Words", Tensor, npt.NDArray[np.int64])  # counted by the same lines of code

WORD_BITS = 64
MAX_VOTERS = 65_535

_CACHED_BITS = 1 << 17  # packed at a time on the CPU, so that the comparison is still in the cache
_CACHED_WORDS = 1 << 13  # counted at a time on the CPU, in numpy, whose operations on little cost half of torch's
_GATHER = 0x0102040810204080  # brings the lowest bits of a word's eight bytes together in its highest byte
_INFINITY_16 = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}  # codes; numpy has no bfloat16, slow float16


def num_words(num_elements: int) -> int:
    """Return how many words hold the signs of so many elements."""
    return -(-num_elements // WORD_BITS)


def pack_signs(x: Tensor, draw_W: Tensor | None = None) -> Tensor:
    """Return the signs of a real tensor of any shape as int64 words `(W,)`: 1 is negative.

    `draw_W`, if given, decides for zeros and NaN, bit for bit; its padding is ignored.
    """
    negative_W = _pack_side(x, negative=True)
    if draw_W is None:
        return negative_W
    return negative_W | (draw_W & pack_mask(~((x < 0) | (x > 0))))


def unpack_signs(words_W: Tensor, num_elements: int) -> Tensor:
    """Return int8 `(num_elements,)` of -1 where the bit is 1, else +1."""
    return unpack_mask(words_W, num_elements).view(torch.int8).mul_(-2).add_(1)


def pack_ternary(x: Tensor) -> Tensor:
    """Return int64 words `(2, W)`: where x is negative, where it is positive. Zero, -0.0 and NaN are 0 in both."""
    return torch.stack([_pack_side(x, negative=True), _pack_side(x, negative=False)])


def unpack_ternary(words_2W: Tensor, num_elements: int) -> Tensor:
    """Return int8 `(num_elements,)` of -1, 0, +1."""
    negative, positive = (unpack_mask(words_W, num_elements).view(torch.int8) for words_W in words_2W)
    return positive.sub_(negative)


def pack_mask(mask: Tensor) -> Tensor:
    """Return a boolean tensor of any shape as int64 words `(W,)`."""
    flat = mask.detach().flatten()
    words_W = torch.zeros(num_words(flat.numel()), dtype=torch.int64, device=flat.device)
    if flat.device.type == "cpu":
        packed = np.packbits(flat.numpy(), bitorder="little")
        words_W.view(torch.uint8).numpy()[: packed.size] = packed
        return words_W
    return _pack_anywhere(flat, words_W)


def unpack_mask(words_W: Tensor, num_elements: int) -> Tensor:
    """Return the bits as booleans `(num_elements,)`.

    Raises:
        ValueError: the words are not as many as so many elements need, or are not int64.
    """
    if words_W.dtype != torch.int64 or words_W.shape != (num_words(num_elements),):
        raise ValueError(
            f"{num_elements} signs from words of shape {tuple(words_W.shape)}, {words_W.dtype}; "
            f"they need ({num_words(num_elements)},), int64: give the number of elements that was packed"
        )
    octets = words_W.contiguous().view(torch.uint8)
    if words_W.device.type == "cpu":
        bits = np.unpackbits(octets.numpy(), count=num_elements, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    return _unpack_anywhere(octets)[:num_elements]


def count_planes(words_MW: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return how many of M words have each bit set, in bit planes: bit i of `planes[k]` is bit k of the count at i.

    Carry-save adders: three words of one weight become their sum and their carry, 64 counters at a time, five
    operations, no unpacking. The planes hold M, so there are `M.bit_length()` of them.
    """
    _check_num_voters(len(words_MW))
    return [plane for (plane,) in _count(list(words_MW), whole=True)]


def compare_planes(planes: Sequence[Tensor], threshold: int) -> tuple[Tensor, Tensor]:
    """Return two masks `(W,)`: where the count is greater than the threshold, where it is equal."""
    if threshold >> len(planes):
        return torch.zeros_like(planes[0]), torch.zeros_like(planes[0])
    pairs = [[plane] for plane in planes]
    greater_W = _at_least(pairs, threshold + 1)
    reached_W = _at_least(pairs, threshold) if threshold else torch.full_like(greater_W, -1)
    return greater_W, reached_W ^ greater_W


def majority(words_MW: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(negative_W, tie_W)` of the signs of M workers: where more than half are negative, where just half are.

    Equal to the sign of the integer sum of the workers' +1 and -1, with `tie_W` where that sum is zero, for
    1 <= M <= 65,535. Leave a worker that abstains out of the rows. `tie_W` is zero for odd M; padding is zero in both.
    """
    _check_num_voters(len(words_MW))
    half, is_odd = divmod(len(words_MW), 2)
    negative_W = torch.empty_like(words_MW[0])
    tie_W = torch.zeros_like(negative_W) if is_odd else torch.empty_like(negative_W)
    for words, negative, tie in _pieces(words_MW, negative_W, tie_W):
        planes = _count(list(words), whole=False)
        negative[:] = _at_least(planes, half + 1)
        if not is_odd:
            tie[:] = _at_least(planes, half) ^ negative
    return negative_W, tie_W


def majority_ternary(words_M2W: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(negative_W, tie_W)` of M workers' `pack_ternary`: the sign of the sum, a tie where it is zero.

    In the padding nobody votes, which is a tie: there `tie_W` is 1.
    """
    _check_num_voters(len(words_M2W))
    negative_W, tie_W = words_M2W.new_zeros(2, words_M2W.size(-1))
    for words, negative, tie in _pieces(words_M2W, negative_W, tie_W):
        against, favour = (_count(list(words[:, side]), whole=True) for side in (0, 1))
        equal = against[0][0] | ~against[0][0]
        for (a,), (f,) in zip(reversed(against), reversed(favour), strict=True):
            negative |= equal & a & ~f
            equal &= ~(a ^ f)
        tie[:] = equal
    return negative_W, tie_W


def break_ties(negative_W: Tensor, tie_W: Tensor, draw_W: Tensor) -> Tensor:
    """Return the words in which every tie is decided by `draw_W`: another worker's signs, or `random_words`."""
    return negative_W | (tie_W & draw_W)


def unpack_vote(negative_W: Tensor, tie_W: Tensor, num_elements: int) -> Tensor:
    """Return int8 `(num_elements,)` of -1, +1, and 0 at a tie."""
    signs = unpack_signs(negative_W, num_elements)
    return signs.mul_(unpack_mask(~tie_W, num_elements))


def random_words(seed: int, step: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return `count` words of random bits, those of the words `start, start + 1, ...` of a vector without end.

    A word depends on seed, step and its position only, not on how the vector is cut or where it is computed: all
    ranks draw the same. Counter-based: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014) with the key in place of its state, in wrapping int64 arithmetic, the same on every device.
    """
    key = _mix(torch.tensor([_signed(seed)], device=device))
    key = _mix(key + _mix(torch.tensor([_signed(step)], device=device)))
    position = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    return _mix(key + position * _signed(0x9E3779B97F4A7C15))


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser; a logical shift is an arithmetic one with the copies of the sign masked away."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> shift & (1 << WORD_BITS - shift) - 1)) * _signed(factor)
    return z ^ (z >> 31 & (1 << WORD_BITS - 31) - 1)


def _signed(number: int) -> int:
    """The int64 with the lowest 64 bits of a number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _check_num_voters(num_voters: int) -> None:
    if not 1 <= num_voters <= MAX_VOTERS:
        raise ValueError(f"a count over {num_voters} workers; 1 to {MAX_VOTERS} can be counted")


def _count(level: list[Words], *, whole: bool) -> list[list[Words]]:
    """The bit planes of the count, one each; where not whole, the lowest may be two, whose sum is left to be taken."""
    planes: list[list[Words]] = []
    while level:
        carries: list[Words] = []
        total = level.pop()
        while len(level) >= 2:
            a, b = level.pop(), level.pop()
            either = total ^ a
            carry = total & a
            total = either ^ b
            either &= b
            carry |= either
            carries.append(carry)
        if level and (whole or planes):
            last = level.pop()
            carries.append(total & last)
            total = total ^ last
        level.append(total)
        planes.append(level)
        level = carries
    return planes


def _at_least(planes: Sequence[Sequence[Words]], threshold: int) -> Words:
    """Where the count reaches the threshold, `1 <= threshold <= 2 ** len(planes)`.

    Adds what the threshold lacks to the next power of two and returns the last carry. A constant bit is no operand:
    the carry of `a + b + 1` is `a | b`, of `a + b + 0` it is `a & b`. So it is one operation for a plane.
    """
    lacking = (1 << len(planes)) - threshold
    carry: Words | None = None
    for k in range(len(planes)):
        operands: list[Words] = list(planes[k])
        if carry is not None:
            operands.append(carry)
        has_one = bool(lacking >> k & 1)
        if len(operands) == 2:
            a, b = operands
            carry = a | b if has_one else a & b
        else:
            carry = operands[0] if has_one else None
    return planes[0][0] ^ planes[0][0] if carry is None else carry


def _pieces(words: Tensor, *results: Tensor) -> Iterator[tuple[Any, ...]]:
    """Matching ranges of the last dimension, views to count at a time: on the CPU numpy's, in the cache, else all."""
    if words.device.type != "cpu":
        yield (words, *results)
        return
    arrays = [tensor.numpy() for tensor in (words, *results)]
    for start in range(0, words.size(-1), _CACHED_WORDS):
        yield tuple(array[..., start : start + _CACHED_WORDS] for array in arrays)


def _pack_side(x: Tensor, *, negative: bool) -> Tensor:
    """Pack `x < 0` or `x > 0`; on the CPU in numpy, piece by piece, in half the time of torch's comparison alone."""
    if x.device.type != "cpu" or x.dtype == torch.bool:
        return pack_mask(x < 0 if negative else x > 0)
    flat = x.detach().flatten()
    words_W = torch.zeros(num_words(flat.numel()), dtype=torch.int64)
    octets = words_W.view(torch.uint8).numpy()
    infinity = _INFINITY_16.get(x.dtype)
    values = flat.numpy() if infinity is None else flat.view(torch.uint16 if negative else torch.int16).numpy()
    mask = np.empty(min(_CACHED_BITS, values.size), dtype=np.bool_)
    for start in range(0, values.size, _CACHED_BITS):
        piece = values[start : start + _CACHED_BITS]
        found = mask[: piece.size]
        if infinity is None:
            (np.less if negative else np.greater)(piece, 0, out=found)
        else:
            floor = 0x8000 if negative else 0
            _find_codes(piece, floor, floor + infinity, found)
        packed = np.packbits(found, bitorder="little")
        octets[start // 8 : start // 8 + packed.size] = packed
    return words_W


def _find_codes(codes: npt.NDArray[Any], zero: int, infinity: int, out: npt.NDArray[np.bool_]) -> None:
    """Numbers of one sign in half precision are the codes above zero up to infinity; NaN lie above, and are rare.

    Negative ones are read as unsigned codes, positive ones as signed, so that the other sign lies below zero.
    """
    np.greater(codes, zero, out=out)
    if codes.max() > infinity:
        out &= codes <= infinity


def _pack_anywhere(mask: Tensor, words_W: Tensor) -> Tensor:
    """Pack with torch alone: eight booleans are eight bytes, and one product gathers their lowest bits."""
    padded = torch.zeros(words_W.numel() * WORD_BITS, dtype=torch.bool, device=mask.device)
    padded[: mask.numel()] = mask
    gathered = padded.view(torch.int64) * _GATHER >> WORD_BITS - 8
    return (gathered & 0xFF).to(torch.uint8).view(torch.int64)


def _unpack_anywhere(octets: Tensor) -> Tensor:
    """Unpack with torch alone."""
    shifts = torch.arange(8, dtype=torch.uint8, device=octets.device)
    return (octets.unsqueeze(-1) >> shifts & 1).to(torch.bool).flatten()
