"""A configuration as JSON, and what of it must agree: between ranks, and between a checkpoint and who resumes it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from thinwire.errors import ConfigError
from thinwire.train.config import (
    CodecConfig,
    Config,
    DataConfig,
    DataParallelConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    TrainConfig,
)


def to_dict(config: Config) -> dict[str, Any]:
    """As JSON has it."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_dict(plain: dict[str, Any]) -> Config:
    """The inverse of `to_dict`.

    Raises:
        ConfigError: fields that this version does not know.
    """
    parts: dict[str, Any] = {}
    kinds: dict[str, Any] = {
        "model": ModelConfig, "data": DataConfig, "pipeline": PipelineConfig, "dp": DataParallelConfig,
        "codec": CodecConfig, "optim": OptimConfig, "train": TrainConfig,
    }  # fmt: skip
    try:
        for name, value in plain.items():
            if name in kinds:
                value = kinds[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
            parts[name] = value
        return Config(**parts)
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"configuration with unknown fields ({error})", remedy="use the version that wrote it"
        ) from None


def flat(plain: dict[str, Any]) -> dict[str, Any]:
    """Fields by their dotted names."""
    result: dict[str, Any] = {}
    for name, value in plain.items():
        result |= {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
    return result


def run_digest(config: Config) -> str:
    """What all ranks of a run must agree on: everything but the port."""
    plain = to_dict(config)
    plain["pipeline"].pop("port")
    return _digest(plain)


def layout_digest(config: Config) -> str:
    """What must agree for an exact resume: all but names, intervals, links, ports, replicas, the number of steps."""
    plain = to_dict(config)
    for name in ("name", "folder", "resume", "overwrite"):
        plain.pop(name)
    for name in ("link", "timeout_s", "port"):
        plain["pipeline"].pop(name)
    for name in ("replicas", "emulate", "transport", "link"):
        plain["dp"].pop(name)
    for name in ("steps", "eval_every", "checkpoint_every", "keep_checkpoints", "threads"):
        plain["train"].pop(name)
    return _digest(plain)


def _digest(plain: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8).hexdigest()
