"""A link as a queue of bits, simulated message by message in exact fractions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def arrivals(messages: Sequence[tuple[Fraction, int]], bandwidth_bps: int, latency_s: Fraction) -> list[Fraction]:
    """Return when each `(sent_at_s, num_bytes)` arrives; a message starts when the one before it has left."""
    times, free = [], None
    for sent_at_s, num_bytes in messages:
        start = sent_at_s if free is None or free < sent_at_s else free
        free = start + Fraction(8 * num_bytes, bandwidth_bps)
        times.append(free + latency_s)
    return times
