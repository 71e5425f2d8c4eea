"""Exchanges in flight start their collectives in one order, and wait as late as they can."""

from __future__ import annotations

import pytest

from thinwire.collectives.flights import Exchange, Flights, Pending, Sent


class Log:
    """A waiter that notes what it waits for."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def exchange(self, name: int, num_collectives: int) -> Exchange[int]:
        for k in range(num_collectives):
            self.said.append(f"start {name}.{k}")
            yield Sent(None, f"{name}.{k}")
        return name

    def finish(self, sent: Sent) -> None:
        self.said.append(f"wait {sent.what}")


def test_the_oldest_collective_is_waited_for_first_and_only_when_enough_are_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Flights, "AHEAD", 4)
    log, flights = Log(), Flights()
    started = []
    for name in range(7):
        started.append(Pending(log, log.exchange(name, 2)))
        flights.add(started[-1:])
    assert log.said == [
        "start 0.0", "start 1.0", "start 2.0", "start 3.0", "start 4.0",
        "wait 0.0", "start 0.1", "wait 1.0", "start 1.1", "wait 2.0", "start 2.1", "wait 3.0", "start 3.1",
        "wait 4.0", "start 4.1", "wait 0.1",
        "start 5.0", "wait 1.1", "start 6.0", "wait 2.1",
    ]  # fmt: skip
    flights.complete()
    assert log.said[-6:] == ["wait 5.0", "start 5.1", "wait 6.0", "start 6.1", "wait 5.1", "wait 6.1"]
    assert [pending.result() for pending in started] == list(range(7))


def test_what_is_done_at_once_is_not_waited_for() -> None:
    log, flights = Log(), Flights()
    pending = Pending(log, log.exchange(0, 0))
    flights.add([pending])
    flights.complete()
    assert pending.result() == 0 and not log.said
