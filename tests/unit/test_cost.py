"""The cost model against its docstring, the table of methods.md, and arithmetic by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from thinwire.collectives import TIES, TRANSPORTS, Ties, Workers, choose, cost
from thinwire.collectives.cost import (
    AlphaBeta,
    break_even_bps,
    cheapest,
    payload_bytes,
    probe,
    seconds,
    step_bytes,
    step_s,
    table,
)
from thinwire.collectives.roll import HEADER_BYTES
from thinwire.errors import ConfigError

METHODS = ["fp32", "bf16", "sum", "gather", "packed"]
PER_PARAMETER = {  # bytes that a worker sends, as methods.md has them, without zeros in the result
    2: (4.00, 2.00, 1.00, 0.125, 0.125),
    4: (6.00, 3.00, 1.50, 0.375, 0.188),
    8: (7.00, 3.50, 1.75, 0.875, 0.219),
    16: (7.50, 3.75, 1.88, 1.875, 0.234),
    64: (7.88, 3.94, 1.97, 7.88, 0.246),
}
SLOW = AlphaBeta(0.0, 1e-6)
FAR = AlphaBeta(0.1, 1e-12)


@pytest.mark.parametrize("size", PER_PARAMETER)
def test_bytes_per_parameter_are_those_of_the_table(size: int) -> None:
    for method, wanted in zip(METHODS, PER_PARAMETER[size], strict=True):
        assert payload_bytes(method, 8_000, size, "random") / 8_000 == pytest.approx(wanted, abs=0.005)


def test_zeros_in_the_result_cost_half_as_much_again() -> None:
    even, odd = (payload_bytes("packed", 64, size, "zero") for size in (4, 3))
    assert (even, odd) == (2 * 3 / 4 * 8 * 1.5, 2 * 2 / 3 * 8)


@pytest.mark.parametrize(
    ("size", "ties", "width"),
    [(127, "zero", 1), (128, "zero", 4), (127, "random", 1), (63, "owner", 1), (64, "owner", 4)],
)
def test_int8_as_far_as_it_holds(size: int, ties: Ties, width: int) -> None:
    assert payload_bytes("sum", 100, size, ties) == pytest.approx(2 * (size - 1) / size * 100 * width)


@pytest.mark.parametrize(
    ("method", "rounds"), [("fp32", 2), ("bf16", 2), ("sum", 2 + 1), ("packed", 2 + 1), ("gather", 1 + 1)]
)
def test_seconds_are_rounds_and_bytes(method: str, rounds: int) -> None:
    """The headers of a vote are a round of their own."""
    header_bytes = 4 * HEADER_BYTES if method in TRANSPORTS else 0
    assert seconds(method, 1000, 5, AlphaBeta(1.0, 0.0)) == 4 * rounds
    assert seconds(method, 1000, 5, AlphaBeta(0.0, 1.0)) == payload_bytes(method, 1000, 5) + header_bytes


@pytest.mark.parametrize("method", METHODS)
def test_one_worker_pays_nothing(method: str) -> None:
    assert seconds(method, 10**9, 1, AlphaBeta(1.0, 1.0)) == 0


def test_a_link_in_bits_is_a_network_in_bytes() -> None:
    assert AlphaBeta.of(8e6, 0.02) == AlphaBeta(0.02, 1e-6)


@pytest.mark.parametrize(
    ("size", "network", "ties", "best"),
    [
        (2, SLOW, "zero", "gather"),
        (2, FAR, "random", "gather"),
        (3, FAR, "zero", "gather"),
        (8, SLOW, "zero", "packed"),
        (64, SLOW, "random", "packed"),
        (8, FAR, "zero", "gather"),
    ],
)
def test_the_cheapest_transport(size: int, network: AlphaBeta, ties: Ties, best: str) -> None:
    assert cheapest(10**6, size, network, ties) == best


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("size", [2, 3, 4, 9, 200])
def test_the_cheapest_is_no_dearer_than_any_other(size: int, ties: Ties) -> None:
    for network in (SLOW, FAR, AlphaBeta(1e-3, 1e-9)):
        best = seconds(cheapest(10**6, size, network, ties), 10**6, size, network, ties)
        assert all(best <= seconds(name, 10**6, size, network, ties) for name in TRANSPORTS)


def test_where_compression_breaks_even() -> None:
    saved = payload_bytes("bf16", 10**6, 4) - payload_bytes("packed", 10**6, 4)
    bandwidth_bps = break_even_bps(saved, 0.05)
    slower, faster = (AlphaBeta.of(factor * bandwidth_bps) for factor in (0.99, 1.01))
    for network, pays in ((slower, True), (faster, False)):
        assert (saved * network.beta_s > 0.05) == pays


def test_what_saves_nothing_never_pays_and_what_costs_nothing_always_does() -> None:
    assert break_even_bps(0, 1) == break_even_bps(-5, 1) == 0
    assert break_even_bps(5, 0) == break_even_bps(5, -1) == math.inf


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'morse'.*packed, gather, sum, bf16, fp32"):
        payload_bytes("morse", 1, 2)


def test_exchanges_of_a_step_share_the_link_and_wait_for_its_latency_together() -> None:
    numbers = {"packed": 800, "bf16": 100, "fp32": 10}
    num_bytes = sum(payload_bytes(method, n, 2, "random") for method, n in numbers.items()) + HEADER_BYTES
    assert step_s(numbers, 2, AlphaBeta(1.0, 0.0), "random") == 3  # headers, there, and back
    assert step_s(numbers, 2, AlphaBeta(0.0, 1.0), "random") == step_bytes(numbers, 2, "random") == num_bytes
    assert step_s(numbers, 1, AlphaBeta(1.0, 1.0)) == 0


def test_the_table_has_all_transports_with_the_means_beside_them() -> None:
    averaged = {"bf16": 10.0}
    first, *rows = table(1000, averaged, 4, SLOW, "random")
    assert first == ("fp32", payload_bytes("fp32", 1010, 4), seconds("fp32", 1010, 4, SLOW))
    assert [row[0] for row in rows] == [*TRANSPORTS]
    for name, num_bytes, time_s in rows:
        assert num_bytes == step_bytes({name: 1000, **averaged}, 4, "random")
        assert time_s == step_s({name: 1000, **averaged}, 4, SLOW, "random")
    assert [row[0] for row in table(0, averaged, 4, SLOW)] == ["fp32", "means"]


def test_alone_nothing_is_measured() -> None:
    alone = Workers(virtual=3)
    assert probe(alone, torch.device("cpu")) == AlphaBeta(0, 0)
    assert choose(alone, "auto", 10, "zero", torch.ones(1)) == "packed"
    assert choose(alone, "sum", 10, "zero", torch.ones(1)) == "sum"


@pytest.mark.parametrize(
    ("times", "alpha_s", "bandwidth_bps"),
    [
        ({8: 0.02, 1 << 18: 0.12}, 0.01, 8 * 2 * ((1 << 18) - 8) / 0.10),
        ({8: 0.02, 1 << 18: 0.03, 1 << 22: 0.42}, 0.01, 8 * 2 * ((1 << 22) - 8) / 0.40),
        ({8: 0.02, 1 << 18: 0.01, 1 << 22: 0.01}, 0.01, math.inf),
    ],
    ids=["slow", "fast", "too fast"],
)
def test_a_bandwidth_is_measured_or_called_infinite(
    monkeypatch: pytest.MonkeyPatch, times: dict[int, float], alpha_s: float, bandwidth_bps: float
) -> None:
    monkeypatch.setattr(cost, "_timed", lambda workers, num_bytes, device: times[num_bytes])
    found = probe(SimpleNamespace(size=3, is_networked=True), torch.device("cpu"))  # type: ignore[arg-type]
    assert found.alpha_s == pytest.approx(alpha_s) and found.bandwidth_bps == pytest.approx(bandwidth_bps)
