"""Majority votes and means over workers, by the transports of the paper and better ones.

packed   all-to-all of bits, counting in bit planes at the owner of each shard, all-gather of the result: the bytes
         per parameter stay below 1/4 however many workers there are
gather   every worker sends all its bits to all others and everybody counts: fewest messages, good for two or three
sum      the integer all-reduce of the Sign-Muon paper (arXiv 2605.16311): int8 as far as it holds, then int32

All give the same result for the same ballots, tie rule and moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire import bits
from thinwire.collectives.ballots import (
    Ballot,
    Moment,
    Ties,
    Zeros,
    all_present,
    cast,
    count,
    owned,
    read,
)
from thinwire.collectives.flights import Exchange, Pending
from thinwire.collectives.mask import read_mask, write_mask
from thinwire.collectives.roll import Roll
from thinwire.collectives.workers import Workers

Transport = Literal["packed", "gather", "sum"]
TRANSPORTS: tuple[Transport, ...] = ("packed", "gather", "sum")


def vote(
    workers: Workers,
    roll: Roll,
    tensors: Sequence[Sequence[Tensor]],
    *,
    transport: Transport = "packed",
    ties: Ties = "zero",
    moment: Moment,
) -> Pending[list[Tensor]]:
    """Start a vote on the signs of `tensors[worker here][i]`; the result is int8 -1, 0, +1 in their shapes."""
    return Pending(workers, _vote(workers, roll, tensors, transport, ties, moment))


def _vote(
    workers: Workers, roll: Roll, tensors: Sequence[Sequence[Tensor]], transport: Transport, ties: Ties, moment: Moment
) -> Exchange[list[Tensor]]:
    shapes = [t.shape for t in tensors[0]]
    voters = roll.voters
    if not workers.is_networked:
        ballots = [cast(own) for worker, own in enumerate(tensors) if worker in voters]
        return read(count(ballots, ties, moment), shapes) if ballots else [_zeros(t) for t in tensors[0]]
    ballot = cast(tensors[0])
    full_W = all_present(tuple(shape.numel() for shape in shapes), ballot.negative_W.device)
    if not voters or not full_W.numel():
        return [_zeros(t) for t in tensors[0]]
    if workers.here[0] not in voters:  # it takes part with anything; nobody counts it
        ballot = Ballot(torch.zeros_like(full_W), full_W, Zeros.NONE)
    if transport == "packed":
        result = yield from _packed(workers, voters, ballot, full_W, ties, moment)
    elif transport == "gather":
        result = yield from _gathered(workers, voters, ballot, full_W, ties, moment)
    else:
        result = yield from _summed(workers, voters, ballot, full_W, ties, moment)
    return read(result, shapes)


def _packed(
    workers: Workers, voters: Sequence[int], ballot: Ballot, full_W: Tensor, ties: Ties, moment: Moment
) -> Exchange[Ballot]:
    size, words, mine = workers.size, full_W.numel(), workers.here[0]
    shard = -(-words // size)
    rest = (0, size * shard - words)
    full_MS = pad(full_W, rest).view(size, shard)
    whole = Ballot(pad(ballot.negative_W, rest), pad(ballot.present_W, rest), ballot.zeros, ballot.few)
    rows = torch.cat([_flag(ballot).expand(size, -1), whole.negative_W.view(size, shard)], dim=1)
    received = yield from workers.all_to_all(rows, "vote")
    zeros, few, fews = _kinds(received, voters)
    masks = received[:, :0]
    if zeros is not Zeros.NONE:
        parts = [whole.part(j * shard, (j + 1) * shard) for j in range(size)]
        written = [write_mask(part, full, zeros, few) for part, full in zip(parts, full_MS, strict=True)]
        masks = yield from workers.all_to_all(torch.stack(written), "vote")
    ballots = [replace(read_mask(received[j, 1:], masks[j], full_MS[mine], zeros, few), few=fews[j]) for j in voters]
    result = count(ballots, ties, moment.behind(mine * shard))
    beside = write_mask(result, full_MS[mine], result.zeros, result.few)
    gathered = yield from workers.all_gather(torch.cat([result.negative_W, beside]), "vote")
    shards = [
        read_mask(row[:shard], row[shard:], full, result.zeros, result.few)
        for row, full in zip(gathered, full_MS, strict=True)
    ]
    negative_W = torch.cat([part.negative_W for part in shards])[:words]
    return Ballot(negative_W, torch.cat([part.present_W for part in shards])[:words], result.zeros)


def _gathered(
    workers: Workers, voters: Sequence[int], ballot: Ballot, full_W: Tensor, ties: Ties, moment: Moment
) -> Exchange[Ballot]:
    received = yield from workers.all_gather(torch.cat([_flag(ballot), ballot.negative_W]), "vote")
    zeros, few, _ = _kinds(received, voters)
    masks = received[:, :0]
    if zeros is not Zeros.NONE:
        masks = yield from workers.all_gather(write_mask(ballot, full_W, zeros, few), "vote")
    ballots = [read_mask(received[j, 1:], masks[j], full_W, zeros, few) for j in voters]
    return count(ballots, ties, moment)


def _flag(ballot: Ballot) -> Tensor:
    """The word before the signs: where there are zeros (2 bits), and in how many words partly."""
    return torch.tensor([ballot.zeros | ballot.few << 2], device=ballot.negative_W.device)


def _kinds(received: Tensor, voters: Sequence[int]) -> tuple[Zeros, int, dict[int, int]]:
    """What masks the voters need together: the kind, the longest list, and each one's."""
    flags = dict(enumerate(received[:, 0].tolist()))
    fews = {j: flags[j] >> 2 for j in voters}
    return Zeros(max(flags[j] & 3 for j in voters)), max(fews.values()), fews


def sum_bytes(num_workers: int, ties: Ties) -> int:
    """Bytes of a number in which a sum of votes fits: int8 up to 127 workers (63 under ties="owner"), then int32."""
    largest = 2 * num_workers + 1 if ties == "owner" else num_workers
    return 1 if largest <= 127 else 4


def _summed(
    workers: Workers, voters: Sequence[int], ballot: Ballot, full_W: Tensor, ties: Ties, moment: Moment
) -> Exchange[Ballot]:
    """A voter adds -1, 0 or +1. Under `owner` it adds twice that, and thrice in its own words: then no tie is left."""
    mine = workers.here[0]
    num_signs = full_W.numel() * bits.WORD_BITS
    present = bits.unpack_mask(ballot.present_W, num_signs).view(torch.int8)
    signs = bits.unpack_signs(ballot.negative_W, num_signs).mul_(present)
    if sum_bytes(workers.size, ties) > 1:
        signs, present = signs.to(torch.int32), present.to(torch.int32)
    zeros = Zeros.NONE
    if ties != "zero":  # whether a sum of zero is a tie or nobody's vote: only then must it be known
        flags = yield from workers.all_gather(full_W.new_full((1,), ballot.zeros), "vote")
        zeros = Zeros(int(flags[list(voters)].max()))
    if mine not in voters:
        signs, present = torch.zeros_like(signs), torch.zeros_like(present)
    elif ties == "owner":
        by_word = signs.view(-1, bits.WORD_BITS)
        own = owned(voters.index(mine), len(voters), moment)
        thrice = 3 * by_word[own]
        by_word *= 2
        by_word[own] = thrice
    counts_voters = ties != "zero" and zeros is not Zeros.NONE
    total = yield from workers.all_reduce(torch.cat([signs, present]) if counts_voters else signs, "vote")
    negative_W, decided_W = bits.pack_mask(total[:num_signs] < 0), bits.pack_mask(total[:num_signs] != 0)
    if ties == "zero":
        return Ballot(negative_W, decided_W)
    voted_W = bits.pack_mask(total[num_signs:] != 0) if counts_voters else full_W
    draw_W = bits.random_words(moment.seed, moment.step, moment.first_word, full_W.numel(), full_W.device)
    return Ballot(bits.break_ties(negative_W, voted_W & ~decided_W, draw_W), voted_W, zeros)


def mean(
    workers: Workers, roll: Roll, tensors: Sequence[Sequence[Tensor]], dtype: torch.dtype = torch.bfloat16
) -> Pending[list[Tensor]]:
    """Start the mean over the voters of `tensors[worker here][i]`; the result is float32, in their shapes.

    Every number travels twice as `dtype`; the owner of a shard adds in float32, worker by worker, so that any number
    of processes or virtual workers give the same bits. One worker alone is not rounded.
    """
    return Pending(workers, _mean(workers, roll, tensors, dtype))


def _mean(
    workers: Workers, roll: Roll, tensors: Sequence[Sequence[Tensor]], dtype: torch.dtype
) -> Exchange[list[Tensor]]:
    if workers.size == 1:
        return [t if t.dtype == torch.float64 else t.float() for t in tensors[0]]
    voters = roll.voters
    if not voters or not any(t.numel() for t in tensors[0]):
        return [torch.zeros_like(t, dtype=torch.float32) for t in tensors[0]]
    flats = [torch.cat([t.flatten().to(dtype) for t in own]) for own in tensors]
    if workers.is_networked:
        numbers = flats[0].numel()
        shard = -(-numbers // workers.size)
        rows = pad(flats[0], (0, workers.size * shard - numbers)).view(workers.size, shard)
        received = yield from workers.all_to_all(rows, "mean")
        average = _average([received[j] for j in voters], dtype)
        flat = (yield from workers.all_gather(average, "mean")).flatten()[:numbers]
    else:
        flat = _average([flats[j] for j in voters], dtype)
    parts = flat.float().split([t.numel() for t in tensors[0]])
    return [part.view(t.shape) for part, t in zip(parts, tensors[0], strict=True)]


def _average(rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return (total / len(rows)).to(dtype)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.int8, memory_format=torch.contiguous_format)
