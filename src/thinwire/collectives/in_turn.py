"""All-to-alls and all-gathers that serve one partner after another, for gloo.

gloo's own start all flows at once. On a slow link they get in each other's way, and it idles while the last one
finishes: four ranks at 100 Mbit/s reach 71 % of the rate that way and 94 % in turn
(benchmarks/2026-11-30_slow-link_2-cores).
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor

IN_TURN_BYTES = 1 << 14  # what is smaller is over before it could get in another's way
_TAG = 0x74770000  # of its messages: those of a user on the same group have others
_IDLE_S = 5.0  # after which a courier's thread ends, until there is something to carry
_REST_S = 1.0  # that the end of the interpreter waits for a courier
_AHEAD = 2  # messages on their way when the next one is sent: a partner may be a little late and nobody idles


class Job:
    """An exchange that a `Courier` carries, with the interface of torch.distributed's works.

    `sent[d]` goes to the rank d + 1 further; `arriving[d]` waits for what comes from the rank d + 1 before.
    """

    def __init__(self, group: dist.ProcessGroup, sent: Sequence[Tensor], arriving: Sequence[Any]) -> None:
        self.group, self.sent, self.arriving = group, sent, arriving
        self._to_land, self._done = len(sent), threading.Event()
        self._error: RuntimeError | None = None

    def land(self, works: Sequence[Any]) -> None:
        """Wait for one message out and one in."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._to_land -= 1
        if self._to_land == 0 or self._error is not None:
            self._done.set()

    def fail(self, error: RuntimeError) -> None:
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
    """One thread that sends messages one by one, in the order in which exchanges were started, on all ranks alike."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def all_to_all(self, group: dist.ProcessGroup, sent: Tensor, received: Tensor) -> Job:
        """Start to send row j of `(M, *)` to rank j, and to receive row j from it."""
        received[self._rank] = sent[self._rank]
        targets = [(self._rank + distance) % self._size for distance in range(1, self._size)]
        sources = [(self._rank - distance) % self._size for distance in range(1, self._size)]
        # Receives are posted first: a sender need not ask whether it may.
        arriving = [dist.irecv(received[source], group=group, group_src=source, tag=_TAG) for source in sources]
        job = Job(group, [sent[target] for target in targets], arriving)
        with self._lock:
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._carry, daemon=True, name="thinwire courier")
                self._thread.start()
        return job

    def rest(self) -> None:
        """End the thread once everything is carried; a second at most, where a partner does not answer."""
        with self._lock:
            thread = self._thread
            if thread is not None:
                self._jobs.put(None)
        if thread is not None:
            thread.join(_REST_S)

    def _carry(self) -> None:
        flying: deque[tuple[Job, list[Any]]] = deque()
        while True:
            try:
                job = self._jobs.get_nowait() if flying else self._jobs.get(timeout=_IDLE_S)
            except Empty:
                if flying:
                    _land(flying)
                    continue
                job = None
            if job is not None:
                self._send(job, flying)
                del job  # its works and its group shall not live as long as this thread idles
                continue
            while flying:
                _land(flying)
            if self._ends():
                return

    def _send(self, job: Job, flying: deque[tuple[Job, list[Any]]]) -> None:
        for distance, (row, arriving) in enumerate(zip(job.sent, job.arriving, strict=True), start=1):
            try:
                target = (self._rank + distance) % self._size
                leaving = dist.isend(row, group=job.group, group_dst=target, tag=_TAG)
            except RuntimeError as error:
                job.fail(error)
                return
            flying.append((job, [arriving, leaving]))
            if len(flying) > _AHEAD:
                _land(flying)

    def _ends(self) -> bool:
        """Whether the thread ends, decided together with whoever brings a job: there is never a second one."""
        with self._lock:
            if self._jobs.empty():
                self._thread = None
            return self._thread is None


def _land(flying: deque[tuple[Job, list[Any]]]) -> None:
    job, works = flying.popleft()
    job.land(works)


_couriers: weakref.WeakKeyDictionary[dist.ProcessGroup, Courier] = weakref.WeakKeyDictionary()


def courier(group: dist.ProcessGroup) -> Courier:
    """The one courier of a group."""
    if group not in _couriers:
        _couriers[group] = Courier(dist.get_rank(group), dist.get_world_size(group))
    return _couriers[group]


@atexit.register
def _rest() -> None:
    """No thread outlives the interpreter: one that frees a torch.distributed work while it ends aborts the process."""
    for each in list(_couriers.values()):
        each.rest()
