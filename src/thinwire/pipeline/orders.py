"""In which order each rank computes, asked of torch's own schedule classes: it is what really runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from thinwire.errors import ConfigError, one_line

_SINGLE = ("GPipe", "1F1B")  # one stage per rank
_LOOP = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")  # stage p on rank p mod R
_V = ("ZBVZeroBubble", "DualPipeV")  # down the ranks and up again, two stages per rank
SCHEDULES = _SINGLE + _LOOP + _V


@dataclass(frozen=True)
class Action:
    """One piece of compute.

    `kind` is F forward, B full backward, I backward for inputs, W backward for weights.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def check_schedule(schedule: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> None:
    """Say no, before any process starts, to counts that `schedule` does not take.

    Raises:
        ConfigError: unknown schedule, fewer microbatches than stages (torch would hang or idle), or counts that
            torch's schedule refuses.
    """
    _checked_name(schedule, num_ranks, stages_per_rank)
    num_stages = num_ranks * stages_per_rank
    if num_microbatches < num_stages:
        raise ConfigError(
            f"{num_microbatches} microbatches for {num_stages} stages",
            f"{num_stages} or more",
            "raise pipeline.microbatches or use fewer stages",
        )
    schedule_actions(schedule, num_ranks, stages_per_rank, num_microbatches)


def stages_per_rank_of(schedule: str, wished: int) -> int:
    """How many stages a rank holds: what the schedule demands, or `wished` where it leaves the choice (0: two)."""
    name = {known.lower(): known for known in SCHEDULES}.get(schedule.lower(), "")
    return 1 if name in _SINGLE else 2 if name in _V else wished or 2


def stage_rank(schedule: str, num_ranks: int, stages_per_rank: int) -> dict[int, int]:
    """The rank that holds each stage.

    Raises:
        ConfigError: unknown schedule, or a count that the schedule does not take.
    """
    name = _checked_name(schedule, num_ranks, stages_per_rank)
    stages = range(num_ranks * stages_per_rank)
    if name in _V:
        return {p: min(p, len(stages) - 1 - p) for p in stages}
    return {p: p % num_ranks for p in stages}


def schedule_actions(
    schedule: str, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> dict[int, list[Action]]:
    """Every rank's compute actions, in the order of torch's schedule of that name (case ignored).

    Raises:
        ConfigError: unknown schedule, or counts that the schedule does not take.
        RuntimeError: this torch describes its schedules in another way than the one this was written for.
    """
    name = _checked_name(schedule, num_ranks, stages_per_rank)
    if num_microbatches < 1:
        raise ConfigError(f"{num_microbatches} microbatches", "1 or more", "give more microbatches")
    orders = _torch_orders(name, num_ranks, stages_per_rank, num_microbatches)
    return {rank: _from_zero(order) for rank, order in sorted(orders.items())}


def _checked_name(schedule: str, num_ranks: int, stages_per_rank: int) -> str:
    names = {name.lower(): name for name in SCHEDULES}
    if schedule.lower() not in names:
        raise ConfigError(f"schedule {schedule!r}", ", ".join(SCHEDULES), "choose one of these")
    if num_ranks < 1 or stages_per_rank < 1:
        raise ConfigError(f"{num_ranks} ranks with {stages_per_rank} stages each", "1 or more of both")
    name = names[schedule.lower()]
    wanted = 1 if name in _SINGLE else 2 if name in _V else stages_per_rank
    if stages_per_rank != wanted:
        raise ConfigError(f"{name} with {stages_per_rank} stages per rank", f"{wanted} per rank")
    return name


def _torch_orders(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> dict[int, list[Action]]:
    """Every rank's compute actions as torch lists them. The only place that knows torch's undocumented names.

    The schedules compute the order of all ranks in their constructor, from counts alone: rank 0's stages, as
    stand-ins without modules, are enough, and no process group is needed.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    stages = [
        _stage_stand_in(p, num_ranks, num_ranks * stages_per_rank)
        for p, rank in stage_rank(name, num_ranks, stages_per_rank).items()
        if rank == 0
    ]
    schedule_class: Any = get_schedule_class(name)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    try:
        order = schedule_class(stages[0] if single else stages, num_microbatches).pipeline_order
        return {rank: list(_compute_actions(actions)) for rank, actions in order.items()}
    except ValueError as error:
        given = f"{name} on {num_ranks} x {stages_per_rank} stages with {num_microbatches} microbatches"
        raise ConfigError(given, remedy=one_line(error)) from error
    except (AttributeError, TypeError) as error:
        raise RuntimeError(
            f"torch changed how {name} describes its order of actions ({error}); thinwire.pipeline.orders "
            "reads `pipeline_order` of a schedule and `stage_index`, `computation_type`, `microbatch_index`, "
            "`sub_actions`, `is_compute_op` of its actions, and gives it stages made by `_stage_stand_in`"
        ) from error


def _stage_stand_in(stage: int, num_ranks: int, num_stages: int) -> SimpleNamespace:
    return SimpleNamespace(
        stage_index=stage,
        num_stages=num_stages,
        group_size=num_ranks,
        group_rank=0,
        is_first=stage == 0,
        is_last=stage == num_stages - 1,
        has_backward=True,
        submod=None,
    )


def _compute_actions(order: Iterable[Any]) -> Iterator[Action]:
    for action in order:
        if action is None or not action.is_compute_op:
            continue
        for part in action.sub_actions or (action,):
            yield Action(part.stage_index, part.computation_type.value, part.microbatch_index)


def _from_zero(order: Sequence[Action]) -> list[Action]:
    """Count the forwards of each stage from 0.

    In torch 2.13 the description of 1F1B counts the last rank's forwards from 1; what runs counts from 0.
    """
    first: dict[int, int] = {}
    for action in order:
        if action.kind == "F":
            first[action.stage] = min(first.get(action.stage, action.microbatch), action.microbatch)
    return [
        replace(action, microbatch=action.microbatch - first[action.stage]) if action.kind == "F" else action
        for action in order
    ]
