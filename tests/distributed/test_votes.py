"""Votes between processes: every transport gives the written rule on every rank, at the stated price, or an error."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.harness import run_ranks
from tests.reference import votes as reference
from thinwire import collectives
from thinwire.collectives import TIES, TRANSPORTS, in_turn, majority_vote, workers
from thinwire.errors import ConfigError, PeerError
from thinwire.link import Link
from thinwire.wire import DATA_PARALLEL, Ledger

WORLDS = [1, 2, 3, 4, 5]
LENGTHS = (0, 1, 7, 8, 9, 63, 64, 65, 500)
PATTERNS = ["full", "rows", "scattered", "mixed"]
WORDS = 60  # shards of whole words for every world
HEADER_BYTES = 64

Results = list[dict[str, Any]]


def numbers(rank: int, length: int, pattern: str) -> Tensor:
    """What a rank votes with: full of signs, with whole words of zeros, with some zeros, or each rank otherwise."""
    generator = torch.Generator().manual_seed(1000 * rank + length)
    x = torch.randn(length, generator=generator)
    zeros = PATTERNS[rank % 3] if pattern == "mixed" else pattern
    if zeros == "rows":
        x[: 64 * (1 + rank)] = 0
    if zeros == "scattered":
        x[torch.rand(length, generator=generator) < 0.4] = 0
        x[:1], x[1:2] = math.nan, -0.0
    return x


def expected(ranks: list[int], length: int, pattern: str, **options: Any) -> list[int]:
    if not ranks:
        return [0] * length
    decided: list[int] = reference.vote(
        [reference.signs(numbers(rank, length, pattern).numpy()) for rank in ranks], **options
    ).tolist()
    return decided


def wrong_votes(
    rank: int, ranks: list[int], group: Any, abstaining: list[int], lengths: tuple[int, ...] = LENGTHS
) -> list[Any]:
    """The settings under which this rank's result is not the reference's."""
    wrong = []
    for step, (ties, pattern, length) in enumerate(product(TIES, PATTERNS, lengths)):
        voters = [r for r in ranks if r not in abstaining]
        wanted = expected(voters, length, pattern, ties=ties, seed=3, step=step)
        for transport in TRANSPORTS:
            x = numbers(rank, length, pattern)
            signs = majority_vote(x, group, transport, ties, step=step, seed=3, abstain=rank in abstaining)
            if signs.dtype != torch.int8 or signs.tolist() != wanted:
                wrong.append((transport, ties, pattern, length))
    return wrong


def bills(rank: int) -> dict[Any, Any]:
    """What a vote of `64 WORDS` signs, none of them zero, is billed: payload, headers, and all."""
    billed = {}
    for transport, ties in product(TRANSPORTS, TIES):
        ledger = Ledger()
        majority_vote(torch.ones(64 * WORDS), None, transport, ties, ledger=ledger)
        parts = [ledger.total(kind=kind, boundary=DATA_PARALLEL) for kind in ("vote", "vote_header")]
        billed[transport, ties] = (*parts, ledger.total())
    return billed


def refusals(rank: int, world: int) -> dict[str, str]:
    """What this rank is told where the last one means something else."""
    other = rank == world - 1
    x = torch.ones(3)
    attempts: dict[str, Callable[[], Tensor]] = {
        "shape": lambda: majority_vote(torch.ones(1, 3) if other else x),
        "elements": lambda: majority_vote(torch.ones(4) if other else x),
        "step": lambda: majority_vote(x, step=7 * other),
        "seed": lambda: majority_vote(x, seed=7 * other),
        "transport": lambda: majority_vote(x, None, "gather" if other else "packed"),
        "tie rule": lambda: majority_vote(x, None, "packed", "owner" if other else "zero"),
    }
    told = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            told[name] = "nothing"
        except ConfigError as error:
            told[name] = str(error)
    return told


def in_subgroups(rank: int, world: int) -> list[Any]:
    """Even and odd ranks vote among themselves; afterwards a rank asks for the group it is not in."""
    members = [list(range(start, world, 2)) for start in range(min(2, world))]
    made = [dist.new_group(ranks) for ranks in members]
    wrong = wrong_votes(rank, members[rank % 2], made[rank % 2], [], (65,))
    if world > 1:
        with pytest.raises(ConfigError, match="does not contain this process"):
            majority_vote(torch.ones(3), made[1 - rank % 2])
    return wrong


def in_buckets(rank: int, ranks: list[int]) -> list[Any]:
    """Votes that are longer than a bucket, and sent in turn, without being long."""
    with mock.patch.object(collectives, "BUCKET", 128), mock.patch.object(workers, "IN_TURN_BYTES", 8):
        return wrong_votes(rank, ranks, None, [], (500, 1027))


def beside_messages(rank: int, world: int) -> list[Any]:
    """What is sent in turn, while a message of the user's own is awaited on the same group."""
    if world == 1:
        return []
    received = torch.zeros(64)
    waiting = dist.irecv(received, src=1) if rank == 0 else None
    wrong = in_buckets(rank, list(range(world)))
    if rank == 1:
        dist.send(torch.arange(64.0), dst=0)
    if waiting is not None:
        waiting.wait()
        wrong += [] if torch.equal(received, torch.arange(64.0)) else ["the message"]
    return wrong


def after_rest(rank: int, ranks: list[int]) -> list[Any]:
    """No courier is left once the interpreter ends (it could abort the process); the next one goes."""
    wrong = in_buckets(rank, ranks)
    in_turn._rest()
    wrong += [thread.name for thread in threading.enumerate() if thread.name == "thinwire courier"]
    return wrong + in_buckets(rank, ranks)


def emulated_s(rank: int) -> float:
    """Seconds of a vote whose payload takes 0.1 s and whose three or more rounds take 0.01 s each."""
    ledger = Ledger()
    majority_vote(torch.ones(80_000), None, "gather", ledger=ledger)
    link = Link(max(8.0, 10 * 8 * ledger.total()), 0.01)
    began = time.monotonic()
    majority_vote(torch.ones(80_000), None, "gather", link=link)
    return time.monotonic() - began


def everything(rank: int) -> dict[str, Any]:
    world = dist.get_world_size()
    everybody = list(range(world))
    return {
        "votes": wrong_votes(rank, everybody, None, []),
        "abstain": wrong_votes(rank, everybody, None, [world - 1], (9, 500)),
        "nobody": wrong_votes(rank, everybody, None, everybody, (65,)),
        "buckets": in_buckets(rank, everybody),
        "beside": beside_messages(rank, world),
        "rest": after_rest(rank, everybody),
        "bills": bills(rank),
        "refusals": refusals(rank, world),
        "subgroups": in_subgroups(rank, world),
        "auto": majority_vote(numbers(rank, 500, "scattered"), None, "auto").tolist(),
        "emulated_s": emulated_s(rank),
    }


@pytest.fixture(scope="module", params=WORLDS)
def results(request: pytest.FixtureRequest) -> Results:
    return run_ranks(request.param, everything)


@pytest.mark.parametrize("who", ["votes", "abstain", "nobody", "subgroups", "buckets", "beside", "rest"])
def test_every_transport_gives_the_reference_on_every_rank(results: Results, who: str) -> None:
    for rank, result in enumerate(results):
        assert result[who] == [], f"rank {rank}"


def test_the_ledger_counts_every_byte(results: Results) -> None:
    """methods.md's bytes per parameter, and a word with which each worker says whether it has zeros."""
    world, num_bytes = len(results), 8 * WORDS  # of the signs
    others = world - 1
    for result in results:
        for (transport, ties), (payload, headers, total) in result["bills"].items():
            has_zeros = ties == "zero" and world % 2 == 0  # in the result, where they travel beside the signs
            wanted = {
                "packed": others * (num_bytes // world * (3 if has_zeros else 2) + 8),
                "gather": others * (num_bytes + 8),
                "sum": 2 * others * 64 * WORDS // world + (8 * others if ties != "zero" else 0),
            }[transport]
            assert (payload, headers, total) == (wanted, HEADER_BYTES * others, wanted + headers), (transport, ties)


def test_a_disagreement_is_told_to_all_alike(results: Results) -> None:
    world = len(results)
    if world == 1:
        return
    last = f"worker {world - 1}"
    wanted = {
        "shape": f"tensors of {last} differ from those of worker 0: entry 0 is signs (1, 3), there signs (3,);",
        "elements": f"tensors of {last} differ from those of worker 0: entry 0 is signs (4,), there signs (3,);",
        "step": f"step of {last} is 7, of worker 0 0;",
        "seed": f"seed of {last} is 7, of worker 0 0;",
        "transport": f"transport of {last} is 1, of worker 0 0;",
        "tie rule": f"tie rule of {last} is 2, of worker 0 0;",
    }
    for result in results:
        for name, beginning in wanted.items():
            assert result["refusals"][name].startswith(beginning), result["refusals"][name]


def test_auto_is_one_of_the_transports(results: Results) -> None:
    for result in results:
        assert result["auto"] == expected(list(range(len(results))), 500, "scattered")


def test_a_link_takes_its_time(results: Results) -> None:
    for result in results:
        assert result["emulated_s"] < 1
        if len(results) > 1:
            assert result["emulated_s"] >= 0.12


def test_alone_without_torch_distributed() -> None:
    x = torch.tensor([[-2.0, 0.0], [math.nan, 3.0]])
    for transport, ties in product((*TRANSPORTS, "auto"), TIES):
        assert majority_vote(x, None, transport, ties).tolist() == [[-1, 0], [0, 1]]  # type: ignore[arg-type]
    assert not majority_vote(x, abstain=True).any()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"transport": "pigeon"}, "'pigeon'.*packed, gather, sum, auto"),
        ({"ties": "coin"}, "'coin'.*zero, random, owner"),
        ({"signs": torch.ones(2, dtype=torch.complex64)}, "complex64.*real"),
        ({"signs": torch.ones(2, device="meta")}, "on meta"),
        ({"signs": [1.0]}, "a vote on list"),
        ({"step": 1.5}, "step=1.5"),
        ({"seed": None}, "seed=None"),
        ({"link": "20mbit"}, "link='20mbit'.*a Link or None"),
        ({"ledger": 3}, "ledger=3"),
    ],
    ids=["transport", "ties", "complex", "meta", "list", "step", "seed", "link", "ledger"],
)
def test_what_is_no_vote_is_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        majority_vote(**{"signs": torch.ones(2), **arguments})


def killed_in_mid_vote(rank: int, dead: int, transport: str, kill: str) -> tuple[str, float]:
    workers._ANSWER_S = 1.5
    majority_vote(torch.ones(100_000))
    start = workers.Workers._start
    started = []

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        started.append(1)
        if len(started) == 2:  # the headers are through
            os._exit(1) if kill == "exit" else os.kill(os.getpid(), signal.SIGKILL)
        return start(self, *args, **kwargs)

    if rank == dead:
        workers.Workers._start = dying  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        majority_vote(torch.ones(100_000), None, transport)  # type: ignore[arg-type]
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("world", "dead", "transport", "kill"),
    [(2, 0, "packed", "exit"), (3, 1, "gather", "SIGKILL"), (4, 3, "sum", "exit"), (4, 1, "packed", "SIGKILL")],
)
def test_every_survivor_names_the_dead(world: int, dead: int, transport: str, kill: str) -> None:
    """In a ring of four, one waits for a survivor only, and gets no error from the network."""
    told = run_ranks(world, killed_in_mid_vote, dead, transport, kill, dying=[dead])
    for rank, outcome in enumerate(told):
        if rank != dead:
            message, seconds = outcome
            assert message.startswith(f"no answer from worker {dead}, noticed by worker {rank} of {world} in its vote")
            assert seconds < 10
