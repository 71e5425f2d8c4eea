"""More workers than this machine has processes for: their exchanges in lock-step, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import votes as reference
from thinwire.collectives import TIES, Moment, Ties, Transport, Workers
from thinwire.collectives.flights import Exchange
from thinwire.collectives.roll import Roll, Subject
from thinwire.collectives.votes import _mean, _vote

SIZES: list[tuple[Transport, int]] = [
    *(("sum", size) for size in (63, 64, 127, 128, 300)),  # where it changes from int8 to int32
    ("packed", 70),
    ("gather", 40),
]  # fmt: skip


class Member(Workers):
    """One of many workers. A collective leaves what it sends, and finds what `meet` has brought."""

    def __init__(self, here: int, size: int) -> None:
        self.size, self.here = size, (here,)
        self.sent = self.received = torch.empty(0)
        self.reduced_dtype: torch.dtype | None = None

    @property
    def is_networked(self) -> bool:
        return True

    def all_gather(self, row: Tensor, kind: str) -> Exchange[Tensor]:
        self.sent = row
        yield  # type: ignore[misc]
        return self.received

    def all_to_all(self, rows: Tensor, kind: str) -> Exchange[Tensor]:
        self.sent = rows
        yield  # type: ignore[misc]
        return self.received[:, self.here[0]]

    def all_reduce(self, values: Tensor, kind: str) -> Exchange[Tensor]:
        self.sent, self.reduced_dtype = values, values.dtype
        yield  # type: ignore[misc]
        return self.received.sum(0, dtype=values.dtype)


def meet(members: Sequence[Member], exchanges: Sequence[Exchange[list[Tensor]]]) -> list[Tensor]:
    """Drive all exchanges to their ends; returns every member's first tensor."""
    results: list[Tensor] = []
    while not results:
        for exchange in exchanges:
            try:
                next(exchange)
            except StopIteration as stop:
                results.append(stop.value[0])
        if not results:
            everything = torch.stack([member.sent for member in members])
            for member in members:
                member.received = everything
    return results


def roll_of(size: int, abstaining: Sequence[int] = ()) -> Roll:
    voters = tuple(worker for worker in range(size) if worker not in abstaining)
    return Roll(Subject((), 0), voters, ((True,),) * size)


def numbers(size: int, zeros: float) -> Tensor:
    """Signs of all workers; the first words agree, so that sums are as large as they can be."""
    x = torch.randn(size, 150)
    x[:, :20], x[:, 20:40] = 1, -1
    x[torch.rand(size, 150) < zeros] = 0
    return x


@pytest.mark.parametrize("zeros", [0.0, 0.3])
@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize(("transport", "size"), SIZES)
def test_a_vote_of_many(transport: Transport, size: int, ties: Ties, zeros: float) -> None:
    x = numbers(size, zeros)
    members = [Member(here, size) for here in range(size)]
    roll, moment = roll_of(size, [5]), Moment(1, 2)
    results = meet(members, [_vote(m, roll, [[x[m.here[0]]]], transport, ties, moment) for m in members])
    signs = [reference.signs(x[worker].numpy()) for worker in roll.voters]
    wanted = reference.vote(signs, ties, moment.seed, moment.step).tolist()
    for result in (results[0], results[5], results[-1]):
        assert result.tolist() == wanted
    if transport == "sum":  # int8 as far as it holds: under `owner` a sum reaches 2 M + 1
        holds = size <= (63 if ties == "owner" else 127)
        assert {m.reduced_dtype for m in members} == {torch.int8 if holds else torch.int32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mean_of_many_is_that_of_virtual_workers(dtype: torch.dtype) -> None:
    size = 20
    x = torch.randn(size, 33)
    members = [Member(here, size) for here in range(size)]
    roll = roll_of(size, [0, 7])
    results = meet(members, [_mean(m, roll, [[x[m.here[0]]]], dtype) for m in members])
    virtual = Workers(virtual=size)
    with pytest.raises(StopIteration) as stop:
        next(_mean(virtual, roll, [[row] for row in x], dtype))
    wanted: Any = stop.value.value[0]
    assert all(torch.equal(result, wanted) for result in results)
    close = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    exact = x[list(roll.voters)].double().mean(0).float()
    torch.testing.assert_close(wanted, exact, rtol=close, atol=close)
