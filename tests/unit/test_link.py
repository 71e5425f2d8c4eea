"""The emulated link: how it is written, what it costs, and that nobody arrives early."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import pytest

from tests.reference.fifo_link import arrivals
from thinwire.errors import ConfigError
from thinwire.link import Link, LinkQueue, wait_until

FORMS = [
    ("20mbit", 20e6, 0.0),
    ("20mbit,20ms", 20e6, 0.02),
    (" 20 Mbit , 1.5 s ", 20e6, 1.5),
    ("56.6kbit,300us", 56.6e3, 3e-4),
    (".5gbit", 0.5e9, 0.0),
    ("9600bit", 9600.0, 0.0),
    ("inf,50ms", math.inf, 0.05),
    ("inf", math.inf, 0.0),
]
BAD = [
    "20", "mbit", "20ms", "20mbit,20", "20mbit,20mbit", "20mbit,20ms,1", "20mbit;20ms", "-20mbit", "20mbit,-1ms",
    "20mbyte", "1e3mbit", "nanmbit", ",20ms", "20mbit,inf", "20mbit 20ms", "fast", "none,20ms", "٣x",
]  # fmt: skip
LINKS = [
    Link(1e9),
    Link(20e6, 0.02),
    Link(math.inf, 0.05),
    Link(math.inf),
    Link(20.0, 1.0),
    Link(4e12),
    Link(123456789),
]


@pytest.mark.parametrize(("text", "bandwidth_bps", "latency_s"), FORMS)
def test_every_form_is_read(text: str, bandwidth_bps: float, latency_s: float) -> None:
    link = Link.parse(text)
    assert link is not None
    assert link.bandwidth_bps == pytest.approx(bandwidth_bps) and link.latency_s == pytest.approx(latency_s)


@pytest.mark.parametrize("text", ["", "  ", "none", " None "])
def test_none_means_no_emulation(text: str) -> None:
    assert Link.parse(text) is None


@pytest.mark.parametrize("text", BAD)
def test_bad_forms_say_what_was_given_what_is_allowed_and_what_to_do(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Link.parse(text)
    for words in (repr(text), "forms:", '"20mbit,20ms"', "mbit gbit", "write"):
        assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("bandwidth_bps", "latency_s", "says"),
    [(0.0, 0.0, "bandwidth 0.0"), (-1.0, 0.0, "above 0"), (math.nan, 0.0, "above 0"), (1.0, -1.0, "latency -1 s"),
     (1.0, math.inf, "0 to 3600 s"), (1.0, math.nan, "0 to 3600 s")],
)  # fmt: skip
def test_impossible_links_are_refused(bandwidth_bps: float, latency_s: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Link(bandwidth_bps, latency_s)
    with pytest.raises(ConfigError, match="rate above 0"):
        Link.parse("0mbit,20ms")


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_a_link_prints_a_form_that_reads_back(link: Link) -> None:
    again = Link.parse(str(link))
    assert again is not None
    assert again.bandwidth_bps == pytest.approx(link.bandwidth_bps, rel=1e-5)
    assert again.latency_s == pytest.approx(link.latency_s, rel=1e-5)


def test_bandwidth_counts_bits_and_latency_comes_on_top() -> None:
    link = Link(8e6, 0.02)
    assert link.occupancy_s(1_000_000) == 1.0
    assert link.transfer_s(1_000_000) == 1.02
    assert Link(math.inf, 0.5).transfer_s(10**12) == 0.5


@pytest.mark.parametrize("seed", range(5))
def test_messages_queue_first_in_first_out(seed: int) -> None:
    steps = [(seed * 7 + 3 * i * i) % 11 for i in range(20)]
    sent = [Fraction(sum(steps[: i + 1]), 1000) for i in range(20)]
    messages = [(moment, 1 + (i * 2917 + seed) % 5000) for i, moment in enumerate(sent)]
    queue = LinkQueue(Link(2_000_000, 0.005))
    measured = [queue.arrival(float(sent_at_s), num_bytes) for sent_at_s, num_bytes in messages]
    expected = arrivals(messages, 2_000_000, Fraction(5, 1000))
    assert measured == pytest.approx([float(moment) for moment in expected], abs=1e-12)


def test_latency_delays_a_burst_once() -> None:
    queue = LinkQueue(Link(8e3, 10.0))
    assert [queue.arrival(0.0, 1000) for _ in range(3)] == [11.0, 12.0, 13.0]


@pytest.mark.parametrize("delay_s", [1e-5, 1e-3, 2e-2])
def test_waiting_never_ends_early(delay_s: float) -> None:
    for _ in range(5):
        moment = time.monotonic() + delay_s
        waited = wait_until(moment)
        late_s = time.monotonic() - moment
        assert 0 <= late_s < 0.5
        assert 0 <= waited <= delay_s + late_s


def test_waiting_for_the_past_takes_no_time() -> None:
    assert wait_until(time.monotonic() - 1) == 0.0
