"""One worker's signs as a ballot, and the counting of ballots: words in, words out; nothing is sent here.

Tensors lie one behind another in a bucket, each from a whole word of 64 signs on. A zero (or -0.0, or NaN) is no
vote. Where nobody votes the result is 0, whatever the tie rule, so that a parameter without a gradient stays where it
is. Elsewhere the majority of the votes decides, and at a tie

    zero     0: the paper's integer sum
    random   a draw from seed, step and position, the same on all ranks (`bits.random_words`)
    owner    the sign of the word's owner, voter `(word + step) % V`; where the owner has none, the random draw

Signs travel as one bit each. What zeros need travels beside them only where there are zeros (`mask.py`).

Dimension letters: V voters, W words, P planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from thinwire import bits

Ties = Literal["zero", "random", "owner"]
TIES: tuple[Ties, ...] = ("zero", "random", "owner")
FEW_SHARE = 16  # a list of partly present words pays where they are at most every so-manieth


class Zeros(IntEnum):
    """Where a ballot has no sign."""

    NONE = 0
    FEW = 1  # in some words, never in a whole one, that are worth a list
    WORDS = 2  # in whole words, and few others
    ANY = 3


@dataclass(frozen=True)
class Moment:
    """What ties are drawn from: the run's seed, the step, and the bucket's first word in the whole vector."""

    seed: int = 0
    step: int = 0
    first_word: int = 0

    def behind(self, words: int) -> Moment:
        """The same moment, so many words further."""
        return Moment(self.seed, self.step, self.first_word + words)


@dataclass(frozen=True)
class Ballot:
    """Signs `(W,)`: bit 1 in `negative_W` is -1; bit 1 in `present_W` is a sign at all.

    `few` words at most have some but not all of their signs.
    """

    negative_W: Tensor
    present_W: Tensor
    zeros: Zeros = Zeros.ANY
    few: int = 0

    def part(self, start: int, stop: int) -> Ballot:
        """Some of the words."""
        return Ballot(self.negative_W[start:stop], self.present_W[start:stop], self.zeros, self.few)


@lru_cache(maxsize=64)
def all_present(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Words `(W,)` with a bit for every element of tensors of these lengths, none for padding."""
    words = [torch.full((bits.num_words(n),), -1, dtype=torch.int64) for n in lengths]
    for n, some in zip(lengths, words, strict=True):
        if n % bits.WORD_BITS:
            some[-1] = (1 << n % bits.WORD_BITS) - 1
    return torch.cat(words).to(device) if words else torch.zeros(0, dtype=torch.int64, device=device)


def cast(tensors: Sequence[Tensor]) -> Ballot:
    """Return the signs of real tensors of any shape, each packed from a whole word on."""
    device = tensors[0].device if tensors else torch.device("cpu")
    full_W = all_present(tuple(t.numel() for t in tensors), device)
    sides = [bits.pack_ternary(t) for t in tensors]
    negative_W, positive_W = torch.cat(sides, dim=1) if sides else full_W.new_zeros(2, 0)
    present_W = negative_W | positive_W
    missing_W = present_W ^ full_W
    if not bool(missing_W.any()):
        return Ballot(negative_W, present_W, Zeros.NONE)
    whole_W = missing_W == full_W
    few = int(((missing_W != 0) & ~whole_W).sum())
    if few > full_W.numel() // FEW_SHARE:
        return Ballot(negative_W, present_W, Zeros.ANY)
    return Ballot(negative_W, present_W, Zeros.WORDS if bool(whole_W.any()) else Zeros.FEW, few)


def read(result: Ballot, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return int8 tensors of -1, 0, +1."""
    tensors, start = [], 0
    for shape in shapes:
        stop = start + bits.num_words(shape.numel())
        signs = bits.unpack_signs(result.negative_W[start:stop], shape.numel())
        if result.zeros is not Zeros.NONE:
            signs.mul_(bits.unpack_mask(result.present_W[start:stop], shape.numel()))
        tensors.append(signs.view(shape))
        start = stop
    return tensors


def result_kind(ballots: Sequence[Ballot], ties: Ties) -> tuple[Zeros, int]:
    """Where the result can be 0, and in how many words partly: known to all who know this much of every ballot."""
    zeros, few = max(ballot.zeros for ballot in ballots), sum(ballot.few for ballot in ballots)
    if ties == "zero" and (len(ballots) % 2 == 0 or zeros > Zeros.FEW):
        return Zeros.ANY, 0
    return zeros, few


def count(ballots: Sequence[Ballot], ties: Ties, moment: Moment) -> Ballot:
    """Return the majority of V ballots under a tie rule."""
    zeros = max(ballot.zeros for ballot in ballots)
    negative_VW = torch.stack([ballot.negative_W for ballot in ballots])
    if zeros is Zeros.NONE:
        negative_W, tie_W = bits.majority(negative_VW)
        voted_W = ballots[0].present_W
    else:
        present_VW = torch.stack([ballot.present_W for ballot in ballots])
        negative_W, tie_W = bits.majority_ternary(torch.stack([negative_VW, present_VW & ~negative_VW], dim=1))
        voted_W = present_VW[0].clone()
        for present_W in present_VW[1:]:
            voted_W |= present_W
        tie_W &= voted_W
    kind = result_kind(ballots, ties)
    if ties == "zero":
        return Ballot(negative_W, voted_W & ~tie_W, *kind)
    if zeros is Zeros.NONE and len(ballots) % 2:
        return Ballot(negative_W, voted_W, *kind)
    return Ballot(bits.break_ties(negative_W, tie_W, draw(ballots, ties, moment)), voted_W, *kind)


def draw(ballots: Sequence[Ballot], ties: Ties, moment: Moment) -> Tensor:
    """Return the words `(W,)` that decide ties: 1 is negative."""
    words, device = ballots[0].negative_W.numel(), ballots[0].negative_W.device
    random_W = bits.random_words(moment.seed, moment.step, moment.first_word, words, device)
    if ties == "random":
        return random_W
    for voter, ballot in enumerate(ballots):
        own = owned(voter, len(ballots), moment)
        random_W[own] = ballot.negative_W[own] | (random_W[own] & ~ballot.present_W[own])
    return random_W


def owned(voter: int, num_voters: int, moment: Moment) -> slice:
    """The words whose ties a voter decides: every V-th, one further back at every step."""
    return slice((voter - moment.first_word - moment.step) % num_voters, None, num_voters)
