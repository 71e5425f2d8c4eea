"""What data-parallel traffic costs: bytes per worker and seconds by the alpha-beta model, for every transport.

With n numbers, M workers, a latency alpha per message round and beta seconds per byte,

    packed   2 (M - 1) alpha + 2 (M - 1)/M n/8 beta      half as much again where results can be 0 (ties="zero", even M)
    gather     (M - 1) alpha +   (M - 1)   n/8 beta
    sum      2 (M - 1) alpha + 2 (M - 1)/M n w beta      w = 1 up to 127 workers (63 under ties="owner"), then 4
    fp32     2 (M - 1) alpha + 2 (M - 1)/M 4n  beta      the ring all-reduce that all are compared with; bf16: 2n

and (M - 1) alpha for the headers of a step. Exchanges of one step travel side by side: they share the link, and its
latency passes once for all. A process that both sends and receives uses both directions of its link.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from thinwire.collectives.ballots import Ties
from thinwire.collectives.flights import Pending
from thinwire.collectives.roll import HEADER_BYTES
from thinwire.collectives.votes import TRANSPORTS, Transport, sum_bytes
from thinwire.collectives.workers import Workers
from thinwire.errors import ConfigError

_PROBE_BYTES = (1 << 18, 1 << 22)  # the second where the first takes no longer than a few bytes
_PROBE_ROUNDS = 5


@dataclass(frozen=True)
class AlphaBeta:
    """A network: seconds per message round, and per byte that a worker sends (0: too fast to be measured)."""

    alpha_s: float
    beta_s: float

    @classmethod
    def of(cls, bandwidth_bps: float, latency_s: float = 0.0) -> AlphaBeta:
        """From a link's rate in bits per second and its latency."""
        return cls(latency_s, 8 / bandwidth_bps)

    @property
    def bandwidth_bps(self) -> float:
        """Bits per second; infinite where it is too fast to be measured."""
        return 8 / self.beta_s if self.beta_s > 0 else math.inf


def payload_bytes(method: str, num_elements: float, size: int, ties: Ties = "zero") -> float:
    """Bytes that a worker sends per step, without headers, for a method of the table above.

    Raises:
        ConfigError: unknown method.
    """
    n, m = num_elements, size
    ring = 2 * (m - 1) / m
    sizes = {
        "packed": ring * n / 8 * (1.5 if ties == "zero" and m % 2 == 0 else 1.0),
        "gather": (m - 1) * n / 8,
        "sum": ring * n * sum_bytes(m, ties),
        "bf16": ring * 2 * n,
        "fp32": ring * 4 * n,
    }
    if method not in sizes:
        raise ConfigError(f"transport {method!r}", ", ".join(sizes))
    return sizes[method]


def seconds(method: str, num_elements: float, size: int, network: AlphaBeta, ties: Ties = "zero") -> float:
    """Seconds of one exchange, of a vote with its headers; 0 for one worker."""
    if method in TRANSPORTS:
        return step_s({method: num_elements}, size, network, ties)
    return _rounds(method, size) * network.alpha_s + payload_bytes(method, num_elements, size) * network.beta_s


def step_s(numbers: Mapping[str, float], size: int, network: AlphaBeta, ties: Ties = "zero") -> float:
    """Seconds of all exchanges of one optimizer step: headers, then `numbers[method]` numbers by each method."""
    if size == 1:
        return 0.0
    rounds = size - 1 + max((_rounds(method, size) for method, n in numbers.items() if n), default=0)
    return rounds * network.alpha_s + step_bytes(numbers, size, ties) * network.beta_s


def step_bytes(numbers: Mapping[str, float], size: int, ties: Ties = "zero") -> float:
    """Bytes that a worker sends in the exchanges of one optimizer step, headers included."""
    return (size - 1) * HEADER_BYTES + sum(payload_bytes(method, n, size, ties) for method, n in numbers.items())


def _rounds(method: str, size: int) -> int:
    return (size - 1) * (1 if method == "gather" else 2)


def cheapest(num_elements: float, size: int, network: AlphaBeta, ties: Ties = "zero") -> Transport:
    """The transport that the model finds fastest; at a draw the first of packed, gather, sum."""
    return min(TRANSPORTS, key=lambda name: seconds(name, num_elements, size, network, ties))


def break_even_bps(saved_bytes: float, extra_compute_s: float) -> float:
    """The bandwidth, in bits per second, above which sending less costs more time than it saves.

    `saved_bytes` per worker and step; `extra_compute_s` is what compressing takes more than not compressing.
    """
    if saved_bytes <= 0:
        return 0.0
    return math.inf if extra_compute_s <= 0 else 8 * saved_bytes / extra_compute_s


def probe(workers: Workers, device: torch.device) -> AlphaBeta:
    """Measure the network between the workers: a few all-gathers of 8 bytes, and of a quarter of a MiB or four.

    All workers return the same: the slowest one's values.
    """
    if not workers.is_networked:
        return AlphaBeta(0.0, 0.0)
    others = workers.size - 1
    few_s = _timed(workers, 8, device)
    beta_s = 0.0
    for num_bytes in _PROBE_BYTES:
        many_s = _timed(workers, num_bytes, device)
        beta_s = max(many_s - few_s, 0.0) / (others * (num_bytes - 8))
        if many_s > 2 * few_s:
            break
    return AlphaBeta(few_s / others, beta_s)


def _timed(workers: Workers, num_bytes: int, device: torch.device) -> float:
    """Seconds of an all-gather, of the slowest worker; of several the fastest, which nothing else has disturbed."""
    row = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    samples = []
    for _ in range(_PROBE_ROUNDS + 1):
        began = time.perf_counter()
        Pending(workers, workers.all_gather(row, "probe")).result()
        samples.append(time.perf_counter() - began)
    mine = torch.tensor([min(samples[1:])], dtype=torch.float64, device=device)  # the first one opens connections
    return float(Pending(workers, workers.all_gather(mine, "probe")).result().max())


def table(
    voted: float, averaged: Mapping[str, float], size: int, network: AlphaBeta, ties: Ties = "zero"
) -> list[tuple[str, float, float]]:
    """Rows `(name, bytes per worker, seconds)` of one optimizer step: every transport of the votes, means beside them.

    The first row is what all are compared with, fp32 ring all-reduces; where nothing is voted on, the other is `means`.
    """
    whole = voted + sum(averaged.values())
    rows = [("fp32", payload_bytes("fp32", whole, size), seconds("fp32", whole, size, network))]
    ways: dict[str, Mapping[str, float]] = {name: {name: voted, **averaged} for name in TRANSPORTS}
    ways = ways if voted else {"means": averaged}
    return rows + [(name, step_bytes(n, size, ties), step_s(n, size, network, ties)) for name, n in ways.items()]
