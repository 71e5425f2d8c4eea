"""What can be wrong with a configuration, found before any process starts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

import torch

from thinwire import codecs
from thinwire.codecs.format_names import get_format
from thinwire.collectives import number
from thinwire.errors import ConfigError
from thinwire.link import Link
from thinwire.models import ResNet
from thinwire.optim.build import DECAYS
from thinwire.optim.methods import METHODS, VOTING, WITH_MOMENTUM
from thinwire.optim.spel import MAX_FRAME_LR
from thinwire.pipeline.orders import SCHEDULES, check_schedule
from thinwire.pipeline.split import layer_counts
from thinwire.train.config import Config


def validate(config: Config) -> None:
    """Check everything that can be known before a process starts.

    Raises:
        ConfigError: what is wrong, what is allowed, what to do.
    """
    train, pipe = config.train, config.pipeline
    for name, value, least in (
        ("train.steps", train.steps, 1), ("train.batch_size", train.batch_size, 1),
        ("train.accumulation", train.accumulation, 1), ("train.threads", train.threads, 1),
        ("train.keep_checkpoints", train.keep_checkpoints, 1), ("train.eval_every", train.eval_every, 0),
        ("train.checkpoint_every", train.checkpoint_every, 0), ("model.seq_len", config.model.seq_len, 1),
        ("pipeline.stages", pipe.stages, 1), ("pipeline.microbatches", pipe.microbatches, 1),
        ("data.val_tokens", config.data.val_tokens, 1), ("optim.warmup_steps", config.optim.warmup_steps, 0),
        ("train.seed", train.seed, 0), ("dp.replicas", config.dp.replicas, 1),
        ("pipeline.stages_per_rank", pipe.stages_per_rank, 0),
        ("codec.rank", config.codec.rank, 0), ("codec.anchor_rank", config.codec.anchor_rank, 0),
    ):  # fmt: skip
        if value < least:
            raise ConfigError(f"{name}={value}", f"{least} or more")
    _validate_rates(config)
    chunks = train.accumulation * pipe.microbatches * config.dp.replicas
    if train.batch_size % chunks:
        raise ConfigError(
            f"train.batch_size={train.batch_size} in {train.accumulation} accumulation steps of "
            f"{pipe.microbatches} microbatches" + f" for {config.dp.replicas} replicas" * (config.dp.replicas > 1),
            f"a multiple of {chunks}",
        )
    _validate_names(config)
    _refuse_settings_without_effect(config)
    _validate_pipeline(config)


_MAX_TIMEOUT_S = 1_000_000


def _validate_rates(config: Config) -> None:
    optim = config.optim
    for name, value, allowed in (
        ("optim.lr", optim.lr, math.inf), ("optim.adamw_ratio", optim.adamw_ratio, math.inf),
        ("optim.frame_ratio", optim.frame_ratio, math.inf), ("optim.weight_decay", optim.weight_decay, math.inf),
        ("optim.grad_clip", optim.grad_clip, math.inf), ("codec.factor", config.codec.factor, math.inf),
        ("optim.momentum", optim.momentum, 1.0), ("optim.frame_momentum", optim.frame_momentum, 1.0),
    ):  # fmt: skip
        if not 0 <= value < allowed:
            raise ConfigError(f"{name}={value}", "0 or more" if math.isinf(allowed) else "0 or more, below 1")
    if config.codec.name == "mapl" and optim.lr * optim.frame_ratio > MAX_FRAME_LR:
        raise ConfigError(
            f"frames' rate {optim.lr * optim.frame_ratio:g} (optim.lr x optim.frame_ratio)", f"up to {MAX_FRAME_LR}",
            "lower optim.frame_ratio",
        )  # fmt: skip
    if not 1 <= config.pipeline.timeout_s <= _MAX_TIMEOUT_S:
        raise ConfigError(f"pipeline.timeout_s={config.pipeline.timeout_s}", f"1 to {_MAX_TIMEOUT_S} seconds")
    if not 0 <= config.pipeline.port < 65_536:
        raise ConfigError(f"pipeline.port={config.pipeline.port}", "0 (any free one) to 65535")


_MAX_NAME_BYTES = 200


def _validate_names(config: Config) -> None:
    if config.codec.name not in codecs.names():
        raise ConfigError(f"codec.name={config.codec.name!r}", ", ".join(codecs.names()))
    for name in (config.codec.wire_format, config.codec.gradient_format):
        get_format(name or config.codec.wire_format)
    if config.optim.method not in METHODS:
        raise ConfigError(f"optim.method={config.optim.method!r}", ", ".join(METHODS))
    number(config.dp.transport, config.dp.ties)
    if config.optim.decay not in DECAYS:
        raise ConfigError(f"optim.decay={config.optim.decay!r}", ", ".join(DECAYS))
    printable = config.name.isprintable() and len(config.name.encode()) <= _MAX_NAME_BYTES
    if not config.name or "/" in config.name or config.name.startswith(".") or not printable:
        raise ConfigError(
            f"name={config.name[:40]!r}", f"a folder name without slashes, up to {_MAX_NAME_BYTES} bytes",
            "set `folder` for another place",
        )  # fmt: skip
    if config.pipeline.schedule.lower() not in [name.lower() for name in SCHEDULES]:
        raise ConfigError(f"schedule {config.pipeline.schedule!r}", ", ".join(SCHEDULES), "choose one of these")
    if config.resume and config.overwrite:
        raise ConfigError("resume and overwrite together", "one of them")


def settle(config: Config, given: Collection[str]) -> tuple[Config, list[str]]:
    """Return `config` without those of a recipe's values that do not apply to what was asked for, and their names.

    `given` are the fields that the user named (`section.field`): they stay, and `validate` speaks of them.
    """
    left_out: list[str] = []
    while names := [name for name in _without_effect(config) if name not in given]:
        for name in names:
            config = _with_default(config, name)
        left_out += names
    if config.codec.rank and config.codec.factor:  # one of them sets the other
        name = "codec.factor" if "codec.rank" in given else "codec.rank"
        config = config if name in given else _with_default(config, name)
    return config, left_out


def _with_default(config: Config, name: str) -> Config:
    section, _, field = name.partition(".")
    default = getattr(getattr(Config(), section), field)
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{field: default})})


def _refuse_settings_without_effect(config: Config) -> None:
    """A setting that would be accepted and ignored is an error."""
    for name in _without_effect(config):
        raise ConfigError(
            f"{name}, which has no effect with {config.model.family}, {config.optim.method}, {config.codec.name}, "
            f"{config.pipeline.schedule}, {config.pipeline.stages} stages and {config.dp.replicas} replicas",
            remedy="leave it out",
        )


def _without_effect(config: Config) -> list[str]:
    """Fields that say something and would be ignored."""
    pipe, codec, default = config.pipeline, config.codec, Config()
    frames_learn = codec.name in ("mapl", "free")
    ignored = {
        "pipeline.stages_per_rank": pipe.stages_per_rank not in (0, pipe.per_rank),
        **_ignored_by_method(config),
        **_ignored_by_family(config),
        **_ignored_by_codec(config),
        "pipeline.link": pipe.stages == 1 and pipe.link != default.pipeline.link,
        "pipeline.port": (pipe.stages == 1 or pipe.emulate) and pipe.port != 0,
        "optim.frame_ratio": not frames_learn and config.optim.frame_ratio != default.optim.frame_ratio,
        "optim.frame_momentum": codec.name != "mapl" and config.optim.frame_momentum != default.optim.frame_momentum,
        "data.text_column": config.data.text_column != default.data.text_column
        and (config.is_pictures or config.data.source == "stdlib"),
    }
    return [name for name, is_ignored in ignored.items() if is_ignored]


def _ignored_by_method(config: Config) -> dict[str, bool]:
    optim, dp, default = config.optim, config.dp, Config()
    votes = optim.method in VOTING
    return {
        "optim.momentum": optim.method not in WITH_MOMENTUM and optim.momentum != default.optim.momentum,
        "optim.scale": optim.method != "signmuon" and optim.scale != default.optim.scale,
        "optim.local_polar": optim.method != "signmuon" and optim.local_polar,
        "optim.feedback": not votes and optim.feedback,
        "dp.ties": not votes and dp.aux != "vote" and dp.ties != default.dp.ties,
        "dp.transport": not votes and dp.aux != "vote" and dp.transport != default.dp.transport,
        "dp.emulate": dp.replicas == 1 and dp.emulate and not config.pipeline.emulate,
        "dp.link": dp.replicas == 1 and dp.link != default.dp.link,
    }


def _ignored_by_codec(config: Config) -> dict[str, bool]:
    codec, default = config.codec, Config().codec
    one_stage = config.pipeline.stages == 1
    unused = {"name", "wire_format", "gradient_format"} if one_stage else set()
    if codec.name == "identity":
        unused |= {"rank", "factor", "anchor_rank", "frame_gradient", "init"}
    elif codec.name == "cut":
        unused |= {"wire_format", "gradient_format", "rank", "factor", "frame_gradient", "init"}
    elif codec.name == "fixed":
        unused |= {"frame_gradient"}
    return {f"codec.{name}": getattr(codec, name) != getattr(default, name) for name in sorted(unused)}


def _ignored_by_family(config: Config) -> dict[str, bool]:
    default = Config()
    if not config.is_pictures:
        return {"model.width": config.model.width != default.model.width}
    used = ("family", "width", "dtype")
    sizes = [one.name for one in dataclasses.fields(config.model) if one.name not in used]
    return {
        **{f"model.{name}": getattr(config.model, name) != getattr(default.model, name) for name in sizes},
        "pipeline.balance": config.pipeline.stages == 1 and config.pipeline.balance != default.pipeline.balance,
    }


def _validate_pipeline(config: Config) -> None:
    pipe = config.pipeline
    with torch.device("meta"):
        try:
            model = config.make_model()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if not isinstance(model, ResNet):
            layer_counts(model, pipe.stages, pipe.balance)
        elif pipe.stages > 1:
            raise ConfigError(
                f"{pipe.stages} stages of a {config.model.family}", "1",
                "set pipeline.stages=1; replicas (dp.replicas) share the work instead",
            )  # fmt: skip
    if pipe.stages % pipe.per_rank:
        raise ConfigError(
            f"{pipe.stages} stages with {pipe.per_rank} per rank ({pipe.schedule})",
            f"a multiple of {pipe.per_rank}",
        )
    if pipe.stages > 1:
        check_schedule(pipe.schedule, pipe.ranks, pipe.per_rank, pipe.microbatches)
        config.make_codec().num_coordinates(config.dim)
    Link.parse(pipe.link)
    Link.parse(config.dp.link)
