"""Majority votes by integer sums in numpy, and the tie rules as they are written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Signs = npt.NDArray[np.int8]
_MASK = (1 << 64) - 1


def signs(x: npt.ArrayLike) -> Signs:
    """-1, 0, +1; zero, -0.0 and NaN are 0."""
    flat = np.asarray(x, dtype=np.float64).ravel()
    return ((flat > 0).astype(np.int8) - (flat < 0)).astype(np.int8)


def vote(rows: Sequence[Signs], ties: str = "zero", seed: int = 0, step: int = 0, first_word: int = 0) -> Signs:
    """The decision of the voters' signs, one row for each; nobody's vote is 0."""
    votes = np.stack(rows).astype(np.int64)
    decided = np.sign(votes.sum(0))
    for i in np.flatnonzero((decided == 0) & (votes != 0).any(0)):
        word = first_word + int(i) // 64
        own = votes[(word + step) % len(votes), i] if ties == "owner" else 0
        if ties != "zero":
            decided[i] = own or (-1 if _draw(seed, step, word) >> int(i) % 64 & 1 else 1)
    return decided.astype(np.int8)


def _draw(seed: int, step: int, word: int) -> int:
    """64 random bits of a word: SplitMix64 in Python's integers."""
    key = _mix((_mix(seed & _MASK) + _mix(step & _MASK)) & _MASK)
    return _mix((key + (word + 1) * 0x9E3779B97F4A7C15) & _MASK)


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31
