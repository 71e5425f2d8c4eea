"""Exchanges in flight.

An exchange is written as a generator that yields a collective's work where it needs the result. `Pending` drives one;
`Flights` drives many, and all ranks start their collectives in the same order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


@dataclass
class Sent:
    """A collective on its way. `arrives_s`: not before, on the emulated link (monotonic clock)."""

    work: Any
    what: str
    arrives_s: float = -math.inf


Exchange = Generator[Sent, None, T]


class Waiter(Protocol):
    """Waits for a collective, and says who is missing where it fails."""

    def finish(self, sent: Sent) -> None: ...


class Pending(Generic[T]):
    """An exchange in flight."""

    def __init__(self, waiter: Waiter, exchange: Exchange[T]) -> None:
        self._waiter, self._exchange = waiter, exchange
        self._sent: Sent | None = None
        self._value: T | None = None
        self._proceed()

    def _proceed(self) -> None:
        try:
            self._sent = next(self._exchange)
        except StopIteration as stop:
            self._sent, self._value = None, stop.value

    @property
    def is_done(self) -> bool:
        """Whether `result` would not wait."""
        return self._sent is None

    def advance(self) -> None:
        """Wait for the collective under way, if any, and start the one that follows."""
        if self._sent is not None:
            self._waiter.finish(self._sent)
            self._proceed()

    def result(self) -> T:
        """Complete the exchange."""
        while self._sent is not None:
            self.advance()
        return self._value  # type: ignore[return-value]


class Flights:
    """Exchanges one behind the other: while one is computed with, others' bytes travel.

    The one that waits longest goes on first, and only when `AHEAD` are under way. So all ranks start their
    collectives in the same order, whoever is fast or slow.
    """

    AHEAD = 6

    def __init__(self) -> None:
        self._flying: deque[Pending[Any]] = deque()

    def add(self, exchanges: Iterable[Pending[Any]]) -> None:
        """Take exchanges that have just been started."""
        for exchange in exchanges:
            self._board(exchange)
        while len(self._flying) > self.AHEAD:
            self._next()

    def complete(self) -> None:
        """Bring all to their end."""
        while self._flying:
            self._next()

    def _board(self, exchange: Pending[Any]) -> None:
        if not exchange.is_done:
            self._flying.append(exchange)

    def _next(self) -> None:
        exchange = self._flying.popleft()
        exchange.advance()
        self._board(exchange)
