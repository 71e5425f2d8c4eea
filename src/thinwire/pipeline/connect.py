"""From stages to something that runs: one call, in one process or in many."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist

from thinwire.errors import ConfigError
from thinwire.link import Link
from thinwire.pipeline.engine import Engine, LossFunction, Pipeline, Twin
from thinwire.pipeline.orders import stage_rank, stages_per_rank_of
from thinwire.pipeline.stage import Stage
from thinwire.pipeline.sync import Sync
from thinwire.wire import Ledger


def connect(
    stages: Sequence[Stage],
    loss: LossFunction,
    *,
    num_microbatches: int,
    shape: tuple[int, ...],
    schedule: str = "1F1B",
    stages_per_rank: int = 0,
    group: dist.ProcessGroup | None = None,
    link: Link | None = None,
) -> Engine:
    """Return the engine that runs `stages`: torch's schedule over `group`, or the one-process twin without one.

    Args:
        stages: as `split` gives them; with a group, those that live on this rank are taken (others may be missing).
        loss: of logits `(B, T, V)` and targets `(B, T)`, a sum over microbatches and steps that accumulate.
        shape: `(B, T)` of a microbatch; with one stage, of whatever the model takes.
        stages_per_rank: where the schedule leaves the choice; 0: its default.
        link: emulated between stages on different ranks; the twin has none.

    Raises:
        ConfigError: counts or stages that do not fit together, or that the schedule does not take.
    """
    if not stages or num_microbatches < 1 or (len(shape) != 2 and len(stages) > 1) or min(shape) < 1:
        given = f"{len(stages)} stages, {num_microbatches} microbatches of shape {tuple(shape)}"
        raise ConfigError(given, "a stage or more, a microbatch or more of shape (B, T), both at least 1")
    if group is None and int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        raise ConfigError(
            f"group=None in one of {os.environ['WORLD_SIZE']} processes", "a process group",
            "call torch.distributed.init_process_group() before you name its group",
        )  # fmt: skip
    num_stages = stages[0].num_stages
    per_rank = stages_per_rank_of(schedule, stages_per_rank) if num_stages > 1 else 1
    num_ranks = dist.get_world_size(group) if group is not None else num_stages // per_rank
    placed = stage_rank(schedule, num_ranks, per_rank) if num_stages > 1 else {0: 0}
    if len(placed) != num_stages:
        raise ConfigError(f"{num_stages} stages, {per_rank} per rank", f"a multiple of {per_rank}")
    ledger = Ledger()
    mine = [stage for stage in stages if group is None or placed.get(stage.index) == dist.get_rank(group)]
    held = [stage.index for stage in mine]
    wanted = [index for index in placed if group is None or placed[index] == dist.get_rank(group)]
    if held != wanted:
        raise ConfigError(f"stages {held}", f"stages {wanted}, in order", "pass all that split gives")
    emulated = link if group is not None else None  # the twin has no time
    for stage in mine:
        stage.connect(ledger, emulated, placed)
    sync = Sync(mine, placed, ledger, group, emulated)
    if group is None or num_stages == 1:
        return Twin(mine, sync, num_microbatches, shape, loss)
    return Pipeline(
        mine, sync, schedule=schedule, num_microbatches=num_microbatches, shape=(shape[0], shape[1]), loss=loss,
        group=group,
    )  # fmt: skip
