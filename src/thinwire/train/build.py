"""From a configuration to what trains: data, this process's stages, engine and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.bits import num_words
from thinwire.link import Link
from thinwire.models import ResNet
from thinwire.optim import DataParallel, Route, build_optimizers, groups, route_models
from thinwire.optim.methods import VOTING, WITH_MOMENTUM
from thinwire.pipeline import Engine, Stage, connect, split
from thinwire.pipeline.orders import stage_rank
from thinwire.train.config import Config
from thinwire.train.place import Place
from thinwire.train.work import Loss, Work, load


@dataclass
class Parts:
    """What a process of a run works with."""

    work: Work
    stages: list[Stage]
    engine: Engine
    routes: list[Route]
    optimizers: list[DataParallel]


def ranks_of_stages(config: Config) -> dict[int, int]:
    """The rank of every stage, also for the twin, which bills what a real pipeline would send."""
    if config.pipeline.stages == 1:
        return {0: 0}
    return stage_rank(config.pipeline.schedule, config.pipeline.ranks, config.pipeline.per_rank)


def vote_positions(stages: Sequence[Stage]) -> dict[str, int]:
    """The first word of every parameter in one vector of all signs of the model, however it is cut into stages."""
    routes = route_models(stages, 0.0, 0.0, 0.0)
    positions, word = {}, 0
    for rule in ("muon", "adamw"):
        for one in routes:
            if one.rule == rule:
                positions[one.name] = word
                word += num_words(one.parameter.numel())
    return positions


def build_stages(config: Config, place: Place) -> tuple[list[Stage], dict[str, int]]:
    """Return this process's stages, alive and initialised (no others ever take memory), and `vote_positions`."""
    with torch.device("meta"):
        model = config.make_model()
    pipe = config.pipeline
    if isinstance(model, ResNet):
        stages = [Stage(0, 1, model, config.make_codec(), config.dim, config.vocab_size)]
    else:
        stages = split(model, pipe.stages, config.make_codec(), balance=pipe.balance)
    placed, positions = ranks_of_stages(config), vote_positions(stages)
    mine = [stage for stage in stages if place.pipe_group is None or placed[stage.index] == place.pipe_rank]
    for stage in mine:
        stage.to_empty(device=place.device)
        stage.init_weights(config.train.seed)
    return mine, positions


def build(config: Config, place: Place) -> Parts:
    """Build everything for this process."""
    work = load(config)
    stages, positions = build_stages(config, place)
    engine = build_engine(config, place, stages)
    optim = config.optim
    routes = route_models(stages, optim.lr, optim.adamw_ratio * optim.lr, optim.frame_ratio * optim.lr)
    return Parts(work, stages, engine, routes, _optimizers(config, place, engine, routes, positions))


def _optimizers(
    config: Config, place: Place, engine: Engine, routes: list[Route], positions: dict[str, int]
) -> list[DataParallel]:
    optim, dp = config.optim, config.dp
    method: dict[str, Any] = {"weight_decay": optim.weight_decay}
    if optim.method in WITH_MOMENTUM:
        method["momentum"] = optim.momentum
    if optim.method in VOTING:
        method["feedback"] = optim.feedback
    if optim.method == "signmuon":
        method |= {"scale": optim.scale, "local_polar": optim.local_polar}
    made = groups(routes)
    for group in made:
        group["positions"] = [positions.get(name, 0) for name in group["names"]]
    return build_optimizers(
        made, optim.method, frame_momentum=optim.frame_momentum, aux=dp.aux, transport=dp.transport,
        ties=dp.ties, seed=config.train.seed, group=place.replica_group, link=Link.parse(dp.link),
        virtual_workers=dp.replicas if dp.emulate else 1, ledger=engine.ledger, **method,
    )  # fmt: skip


def build_engine(config: Config, place: Place, stages: list[Stage]) -> Engine:
    """Connect stages as the configuration says."""
    if config.model.dtype == "bf16":
        for stage in stages:
            _autocast(stage)
    pipe = config.pipeline
    return connect(
        stages, Loss(config.dp.replicas / config.tokens_per_step), num_microbatches=pipe.microbatches,
        shape=config.microbatch_shape, schedule=pipe.schedule, stages_per_rank=pipe.stages_per_rank,
        group=place.pipe_group, link=Link.parse(pipe.link),
    )  # fmt: skip


def _autocast(stage: Stage) -> None:
    """Let the layers (not the codec's ends) compute in bfloat16 and hand out float32."""
    forward = stage.model.forward

    def in_bf16(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            output: Tensor = forward(x)
        return output.float()

    stage.model.forward = in_bf16
