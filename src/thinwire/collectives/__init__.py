"""Gradient traffic between replicas: one-bit majority votes and means, over an explicit group."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.bits import num_words
from thinwire.collectives import cost
from thinwire.collectives.ballots import TIES, Moment, Ties
from thinwire.collectives.flights import Flights, Pending
from thinwire.collectives.roll import Roll, Subject
from thinwire.collectives.votes import TRANSPORTS, Transport, mean, vote
from thinwire.collectives.workers import Workers
from thinwire.errors import ConfigError
from thinwire.link import Link
from thinwire.wire import Ledger

BUCKET = 1 << 21  # signs that travel together while the next ones are packed, and the ones before counted
_VOTED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
AnyTransport = Literal["packed", "gather", "sum", "auto"]

__all__ = [
    "TIES",
    "TRANSPORTS",
    "AnyTransport",
    "Flights",
    "Moment",
    "Pending",
    "Roll",
    "Subject",
    "Ties",
    "Transport",
    "Workers",
    "choose",
    "cost",
    "majority_vote",
    "mean",
    "number",
    "vote",
]


def majority_vote(
    signs: Tensor,
    group: dist.ProcessGroup | None = None,
    transport: AnyTransport = "packed",
    ties: Ties = "zero",
    *,
    step: int = 0,
    seed: int = 0,
    abstain: bool = False,
    ledger: Ledger | None = None,
    link: Link | None = None,
) -> Tensor:
    """Return, on every rank of `group`, the sign of the sum of the ranks' signs: int8 in the shape of `signs`.

    Args:
        signs: any real tensor; its signs count. Zero, -0.0 and NaN are no vote.
        group: of torch.distributed; None: all processes, or this one where torch.distributed was not started.
        transport: `packed` (two-phase), `gather`, `sum` (the integer all-reduce of arXiv 2605.16311), or `auto`, the
            cheapest by a model of the network that is measured first.
        ties: `zero`, `random` (from seed, step and position), or `owner` (a voter's own sign, in turn). Where nobody
            votes the result is 0 under every rule.
        step, seed: what random ties and the turn of owners depend on; equal on all ranks.
        abstain: this rank takes part in the exchange but does not vote.
        ledger: billed for what this rank sends.
        link: a network to emulate between the ranks.

    Raises:
        ConfigError: an unknown transport or rule, complex numbers, or ranks that disagree about shape, step, seed,
            transport or rule (all ranks raise it).
        PeerError: a rank or the network failed.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    workers = Workers(group)
    try:
        for what, given, kind in (("ledger", ledger, Ledger), ("link", link, Link)):
            if given is not None and not isinstance(given, kind):
                raise ConfigError(f"{what}={given!r}", f"a {kind.__name__} or None")
        workers = Workers(group, ledger=ledger, link=link)
        number(transport, ties)
        _check_vote(signs, step, seed)
    except ConfigError:
        is_somewhere = isinstance(signs, Tensor) and signs.device.type != "meta"
        workers.refuse(signs.device if is_somewhere else torch.device("cpu"))
        raise
    subject = Subject(
        layout=(f"signs {tuple(signs.shape)}",), num_elements=signs.numel(), step=step, seed=seed,
        transport=number(transport, ties), ties=TIES.index(ties),
    )  # fmt: skip
    roll = workers.call(subject, [abstain], [[True]], signs.device)
    chosen = choose(workers, transport, signs.numel(), ties, signs)
    moment = Moment(seed, step)
    votes: list[Pending[list[Tensor]]] = []
    flights = Flights()
    for part in signs.detach().flatten().split(BUCKET) if signs.numel() else [signs]:
        votes.append(vote(workers, roll, [[part]], transport=chosen, ties=ties, moment=moment))
        flights.add(votes[-1:])
        moment = moment.behind(num_words(part.numel()))
    flights.complete()
    return torch.cat([pending.result()[0] for pending in votes]).view(signs.shape)


def _check_vote(signs: object, step: object, seed: object) -> None:
    """Raises ConfigError for what cannot be voted on."""
    if not isinstance(signs, Tensor):
        raise ConfigError(f"a vote on {type(signs).__name__}", "dense tensors of real numbers")
    is_known = signs.dtype in _VOTED and signs.layout == torch.strided and signs.device.type != "meta"
    if not is_known:
        what = f"{signs.layout} {signs.dtype} on {signs.device}"
        raise ConfigError(f"a vote on {what}", "dense tensors of real numbers of 8 (whole ones), 16, 32 or 64 bits")
    for name, value in (("step", step), ("seed", seed)):
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ConfigError(f"{name}={value!r}", "a whole number from 0 to 2^63 - 1")


def number(transport: str, ties: str) -> int:
    """The number by which a transport travels in headers.

    Raises:
        ConfigError: unknown transport or tie rule.
    """
    if ties not in TIES:
        raise ConfigError(f"tie rule {ties!r}", ", ".join(TIES))
    if transport not in get_args(AnyTransport):
        raise ConfigError(f"transport {transport!r}", ", ".join(get_args(AnyTransport)))
    return get_args(AnyTransport).index(transport)


def choose(workers: Workers, transport: AnyTransport, num_elements: int, ties: Ties, like: Tensor) -> Transport:
    """What `auto` stands for between these workers; other transports stand for themselves."""
    if transport != "auto":
        return transport
    if not workers.is_networked:
        return "packed"
    return cost.cheapest(num_elements, workers.size, cost.probe(workers, like.device), ties)
