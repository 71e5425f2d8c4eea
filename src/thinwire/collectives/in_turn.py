"""An all-to-all that serves one partner after another, for gloo.

gloo's own starts all flows at once. On a slow link they get in each other's way, and it idles while the last one
finishes: four ranks at 100 Mbit/s reach 71 % of the rate that way and 94 % in turn
(benchmarks/2026-11-30_slow-link_2-cores).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

import torch.distributed as dist
from torch import Tensor


class Job:
    """Something done by the thread of a `Courier`, with the interface of torch.distributed's works."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action, self._done = action, threading.Event()
        self._error: RuntimeError | None = None

    def run(self) -> None:
        try:
            self._action()
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raises RuntimeError: what went wrong, or that the time is over."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("not yet")
        if self._error is not None:
            raise self._error


class Courier:
    """One thread that carries all-to-alls one by one, in the order in which they were started, on all ranks alike."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        threading.Thread(target=self._carry, daemon=True, name="thinwire courier").start()

    def all_to_all(self, sent: Tensor, received: Tensor) -> Job:
        """Start to send row j of `(M, *)` to rank j, and to receive row j from it."""
        job = Job(lambda: self._pass(sent, received))
        self._jobs.put(job)
        return job

    def _carry(self) -> None:
        while True:
            self._jobs.get().run()

    def _pass(self, sent: Tensor, received: Tensor) -> None:
        received[self._rank] = sent[self._rank]
        for distance in range(1, self._size):
            target, source = (self._rank + distance) % self._size, (self._rank - distance) % self._size
            arriving = dist.irecv(received[source], group=self.group, group_src=source)
            leaving = dist.isend(sent[target], group=self.group, group_dst=target)
            assert arriving is not None and leaving is not None
            arriving.wait()
            leaving.wait()


_couriers: dict[str, Courier] = {}


def courier(group: dist.ProcessGroup) -> Courier:
    """The one courier of a group; its thread ends with the process."""
    known = _couriers.get(group.group_name)
    if known is None or known.group is not group:
        known = _couriers[group.group_name] = Courier(group)
    return known
