"""One pipeline step, simulated: torch's own order of actions, stage costs, and a link model.

Every rank runs its actions in torch's order. An action starts when its rank is free and its input is there:

    forward of stage p       needs the activation of its microbatch from stage p - 1
    backward of stage p      needs the gradient from stage p + 1 (and its own forward)
    weight backward          needs the input backward of the same stage and microbatch

A message leaves when the action that makes it ends, and queues first in, first out, per boundary and
direction (`thinwire.link`). Boundaries between two stages of one rank cost nothing. Left out: an
overlapped pair of DualPipeV sends both results at the end of the pair, here each leaves at its own end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.link import Link, LinkQueue
from thinwire.pipeline.orders import Action, schedule_actions, stage_rank

__all__ = ["Action", "Span", "StepTimeline", "schedule_actions", "simulate", "stage_rank"]


class Span(NamedTuple):
    """An action with the seconds, counted from the beginning of the step, at which it starts and ends."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepTimeline:
    """A simulated step.

    Per rank, `busy_s` is compute and `wait_s` is time blocked on an input; what remains up to `step_s` is
    idleness after the rank's last action. `spans` holds each rank's actions in the order in which they run.
    """

    step_s: float
    busy_s: dict[int, float]
    wait_s: dict[int, float]
    spans: list[Span]


@dataclass(frozen=True)
class _Costs:
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    overhead_s: float

    def of(self, action: Action) -> float:
        if action.kind == "F":
            return self.forward_s[action.stage] + self.overhead_s
        if action.kind == "B":
            return self.backward_s[action.stage] + self.overhead_s
        # torch's first stage has no input that needs a gradient: it does the whole backward in W
        share = 0.5 if action.stage > 0 else {"I": 0.0, "W": 1.0}[action.kind]
        return share * self.backward_s[action.stage] + (self.overhead_s if share else 0.0)


class _Inbox:
    """When the input of each action is there. A message is known by the action that consumes it."""

    def __init__(self, stage_rank: dict[int, int], message_bytes: Sequence[int], link: Link | None) -> None:
        self._rank = stage_rank
        self._bytes = message_bytes
        self._link = link
        self._queues: dict[tuple[int, str], LinkQueue] = {}
        self._ready_s: dict[tuple[int, str, int], float] = {}

    def ready_s(self, action: Action) -> float | None:
        """The time from which `action` may run, None while that is not known."""
        times = [self._ready_s.get(need) for need in self._needs(action)]
        known = [time for time in times if time is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    def deliver(self, action: Action, end_s: float) -> None:
        """Note that `action` ended, and send what it made."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            self._ready_s[stage, "forward done", microbatch] = end_s
            self._send("activation", stage, stage + 1, microbatch, end_s)
        elif action.kind in ("B", "I"):
            self._ready_s[stage, f"{action.kind} done", microbatch] = end_s
            self._send("gradient", stage, stage - 1, microbatch, end_s)

    def _needs(self, action: Action) -> list[tuple[int, str, int]]:
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            return [(stage, "activation", microbatch)] if stage > 0 else []
        if action.kind == "W":
            return [(stage, "I done", microbatch)]
        gradient = [(stage, "gradient", microbatch)] if stage + 1 < len(self._rank) else []
        return [(stage, "forward done", microbatch), *gradient]

    def _send(self, what: str, sender: int, receiver: int, microbatch: int, sent_s: float) -> None:
        if receiver not in self._rank:
            return
        arrival_s = sent_s
        if self._link is not None and self._rank[sender] != self._rank[receiver]:
            boundary = min(sender, receiver)
            queue = self._queues.setdefault((boundary, what), LinkQueue(self._link))
            arrival_s = queue.arrival(sent_s, self._bytes[boundary])
        self._ready_s[receiver, what, microbatch] = arrival_s


class _Rank:
    """One rank's clock and what is left for it to do."""

    def __init__(self, rank: int, actions: Sequence[Action]) -> None:
        self.rank = rank
        self.left = deque(actions)
        self.free_s = 0.0
        self.busy_s = 0.0
        self.wait_s = 0.0

    def advance(self, inbox: _Inbox, costs: _Costs) -> Iterator[Span]:
        """Run actions until one lacks an input nobody has sent yet."""
        while self.left and (ready_s := inbox.ready_s(self.left[0])) is not None:
            action = self.left.popleft()
            start_s = max(self.free_s, ready_s)
            cost_s = costs.of(action)
            self.wait_s += start_s - self.free_s
            self.busy_s += cost_s
            self.free_s = start_s + cost_s
            inbox.deliver(action, self.free_s)
            yield Span(self.rank, action, start_s, self.free_s)


def simulate(
    actions: dict[int, list[Action]],
    stage_rank: dict[int, int],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    message_bytes: Sequence[int],
    link: Link | None = None,
    overhead_s: float = 0.0,
) -> StepTimeline:
    """The timeline of one step.

    `forward_s` and `backward_s` are seconds per microbatch, one for each stage; a split backward costs half
    in each part, except on stage 0, where torch leaves all of it to the part for weights.
    `message_bytes[p]` is what a microbatch sends over the boundary between stages p and p + 1, the same in
    both directions. `link` is every boundary's connection (full duplex; None carries everything at once),
    and `overhead_s` is added to every action that does something.

    Raises:
        ValueError: a list does not fit the number of stages, or the order can never finish (names what is
            stuck).
    """
    _check_sizes(actions, stage_rank, forward_s, backward_s, message_bytes)
    costs = _Costs(forward_s, backward_s, overhead_s)
    inbox = _Inbox(stage_rank, message_bytes, link)
    ranks = [_Rank(rank, order) for rank, order in sorted(actions.items())]
    spans: list[Span] = []
    while any(rank.left for rank in ranks):
        done = [span for rank in ranks for span in rank.advance(inbox, costs)]
        if not done:
            raise ValueError(_stuck(ranks))
        spans += done
    return StepTimeline(
        step_s=max((rank.free_s for rank in ranks), default=0.0),
        busy_s={rank.rank: rank.busy_s for rank in ranks},
        wait_s={rank.rank: rank.wait_s for rank in ranks},
        spans=spans,
    )


def _check_sizes(
    actions: dict[int, list[Action]],
    stage_rank: dict[int, int],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    message_bytes: Sequence[int],
) -> None:
    num_stages = len(stage_rank)
    given = (len(forward_s), len(backward_s), len(message_bytes))
    if given != (num_stages, num_stages, num_stages - 1):
        raise ValueError(
            f"{given[0]} forward costs, {given[1]} backward costs and {given[2]} message sizes were given "
            f"for {num_stages} stages, which take {num_stages}, {num_stages} and {num_stages - 1}"
        )
    for rank, order in actions.items():
        for action in order:
            if stage_rank.get(action.stage) != rank or action.kind not in ("F", "B", "I", "W"):
                raise ValueError(f"rank {rank} is to run {action}, which is no action of a stage of that rank")


def _stuck(ranks: Sequence[_Rank]) -> str:
    waiting = ", ".join(f"rank {rank.rank} at {rank.left[0]}" for rank in ranks if rank.left)
    return f"the order of actions can never finish; stuck (stage, kind, microbatch): {waiting}"
