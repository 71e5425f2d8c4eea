"""What a process is doing right now, so that an error can say where a run stood; and where its time went."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from thinwire.codecs.port import Port

_RECENT = 2_000  # pieces of compute remembered per stage and kind, for medians


def _recent() -> deque[float]:
    return deque(maxlen=_RECENT)


@dataclass
class Activity:
    """The latest thing that happened here. `peer_stage` is set while data of another stage is awaited."""

    step: int = 0
    doing: str = "starting"
    stage: int | None = None
    peer_stage: int | None = None
    microbatch: int | None = None
    durations_s: dict[tuple[int, str], deque[float]] = field(default_factory=lambda: defaultdict(_recent))
    spent_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    max_in_flight: dict[int, int] = field(default_factory=dict)

    def in_flight(self, stage: int, num_microbatches: int) -> None:
        """Note how many microbatches a stage holds between their forward and backward passes."""
        self.max_in_flight[stage] = max(num_microbatches, self.max_in_flight.get(stage, 0))

    def set(self, doing: str, stage: int | None, microbatch: int | None, peer_stage: int | None = None) -> None:
        self.doing, self.stage, self.microbatch, self.peer_stage = doing, stage, microbatch, peer_stage

    @contextmanager
    def timed(self, kind: str, stage: int, microbatch: int, ports: Sequence[Port] = ()) -> Iterator[None]:
        """Time a piece of compute; what `ports` meanwhile wait for an emulated link is not compute."""
        self.set({"F": "forward", "W": "weight gradients"}.get(kind, "backward"), stage, microbatch)
        waited_s = -sum(port.waited_s for port in ports)
        began_s = time.perf_counter()
        yield
        waited_s += sum(port.waited_s for port in ports)
        compute_s = time.perf_counter() - began_s - waited_s
        self.durations_s[stage, kind].append(compute_s)
        self.spent_s[kind] += compute_s

    def take(self, kinds: str) -> float:
        """Seconds of compute of these kinds (F, B, I, W) since the last call with them, over all stages here."""
        return sum(self.spent_s.pop(kind, 0.0) for kind in kinds)

    def __str__(self) -> str:
        where = "" if self.stage is None else f" of stage {self.stage}"
        which = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        peer = "" if self.peer_stage is None else f" (peer: stage {self.peer_stage})"
        return f"step {self.step}, {self.doing}{where}{which}{peer}"
