"""A slow network link: what a message costs on it, and waiting as if it were there.

A link has a bandwidth (bits per second) and a latency (seconds). Messages queue first in, first out:

    start   = max(send time, link free)
    free    = start + 8 bytes / bandwidth
    arrival = free + latency
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field

from thinwire.errors import ConfigError

_BANDWIDTH_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LATENCY_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_FORMS = 'forms: "none", "20mbit", "20mbit,20ms", "inf,50ms" (units bit kbit mbit gbit; us ms s)'
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)")
_MAX_LATENCY_S = 3_600
_SPIN_S = 2e-4  # the kernel wakes a sleeper late by about this much; the rest is spent spinning


@dataclass(frozen=True)
class Link:
    """One direction of a connection. `bandwidth_bps` in bits per second, `latency_s` in seconds."""

    bandwidth_bps: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth_bps > 0:
            raise ConfigError(f"link bandwidth {self.bandwidth_bps} bit/s", "a rate above 0", "give one, as in 20mbit")
        if not 0 <= self.latency_s <= _MAX_LATENCY_S:
            raise ConfigError(f"link latency {self.latency_s:g} s", f"0 to {_MAX_LATENCY_S} s", "give one, as in 20ms")

    @classmethod
    def parse(cls, text: str) -> Link | None:
        """Read `"200mbit,50ms"`; `"none"` or an empty text gives None (no emulation).

        Raises:
            ConfigError: the text has another form, or a rate that is not above zero.
        """
        words = text.strip().lower()
        if words in ("", "none"):
            return None
        bandwidth, _, latency = (word.strip() for word in words.partition(","))
        rate = math.inf if bandwidth == "inf" else _quantity(bandwidth, _BANDWIDTH_UNITS, text)
        delay = _quantity(latency, _LATENCY_UNITS, text) if latency else 0.0
        return cls(rate, delay)

    def occupancy_s(self, num_bytes: int) -> float:
        """Seconds for which a message of `num_bytes` keeps the link busy."""
        return 8 * num_bytes / self.bandwidth_bps

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds from sending to arrival over an idle link."""
        return self.occupancy_s(num_bytes) + self.latency_s

    def __str__(self) -> str:
        rate = "inf" if math.isinf(self.bandwidth_bps) else f"{_plain(self.bandwidth_bps / 1e6)}mbit"
        return f"{rate},{_plain(self.latency_s * 1e3)}ms"


def rate(bandwidth_bps: float) -> str:
    """A measured bandwidth for people, to three digits."""
    if math.isinf(bandwidth_bps):
        return "more than can be measured"
    megabits = bandwidth_bps / 1e6
    return f"{megabits:,.0f} Mbit/s" if megabits >= 100 else f"{megabits:.3g} Mbit/s"


def _plain(number: float) -> str:
    """Without an exponent, which `parse` does not read."""
    return f"{number:.9f}".rstrip("0").rstrip(".")


def _quantity(word: str, units: dict[str, float], whole: str) -> float:
    match = _QUANTITY.fullmatch(word)
    if match is None or match[2] not in units:
        raise ConfigError(f"link {whole!r}", _FORMS, f"write {word!r} in one of these forms")
    return float(match[1]) * units[match[2]]


@dataclass
class LinkQueue:
    """The receiver's account of one direction of a link: messages queue, and the queue remembers.

    Times are seconds of the monotonic clock, which on one machine all processes share.
    """

    link: Link
    free_at_s: float = field(default=-math.inf)

    def arrival(self, sent_at_s: float, num_bytes: int) -> float:
        """The time at which a message arrives; it takes its place in the queue."""
        start = max(sent_at_s, self.free_at_s)
        self.free_at_s = start + self.link.occupancy_s(num_bytes)
        return self.free_at_s + self.link.latency_s


def wait_until(moment_s: float) -> float:
    """Sleep until the monotonic clock shows `moment_s`; returns the seconds waited (0 when already past)."""
    began = time.monotonic()
    remaining = moment_s - began
    if remaining <= 0:
        return 0.0
    if remaining > _SPIN_S:
        time.sleep(remaining - _SPIN_S)
    while time.monotonic() < moment_s:
        pass
    return time.monotonic() - began
