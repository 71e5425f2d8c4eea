"""Checkpoints through torch.distributed.checkpoint: safetensors shards, no pickle, a folder complete or absent.

    checkpoints/step-00000100/
        shard-*.safetensors     tensors by layout-free names: `model/...`, `optim/<parameter>/<state>`, `rng/<rank>`
        run.json                step, tokens, data position, ledger totals, configuration digest

A checkpoint is written beside and renamed when whole, so a crash while saving never harms the last good one.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.pipeline import Stage, Sync
from thinwire.train.place import Place

_STATE = "run.json"


def folder_of(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    complete = [path for path in folder_of(run).glob("step-*") if (path / _STATE).is_file()]
    return max(complete, default=None)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        ConfigError: unreadable.
    """
    try:
        state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint {checkpoint} is unreadable ({error})", remedy="use an earlier one") from None
    return state


def check_resumable(path: Path, state: dict[str, Any], digest: str, data_digest: str) -> None:
    """Refuse a checkpoint of another configuration or other text before anything is loaded.

    Raises:
        ConfigError: names what differs.
    """
    for what, saved, now in (("configuration", state["digest"], digest), ("text", state["data_digest"], data_digest)):
        if saved != now:
            raise ConfigError(
                f"checkpoint {path} is of another {what} ({saved}, this run has {now})",
                remedy=f"resume with the {what} of {path.parent.parent / 'config.json'}, or name another run",
            )


def tensors(
    stages: Sequence[Stage], sync: Sync, optimizers: Sequence[torch.optim.Optimizer], place: Place
) -> dict[str, Tensor]:
    """Everything that must come back, by name; values share memory with the live tensors. Mirrors are left out."""
    mirrors = sync.mirrors()
    result: dict[str, Tensor] = {}
    names: dict[Tensor, str] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if name not in mirrors:
                result[f"model/{name}"] = parameter.detach()
                names[parameter] = name
        for name, buffer in stage.named_buffers():
            result[f"model/{name}"] = buffer
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            for key, value in state.items():
                result[f"optim/{names[owner]}/{key}"] = value
    result[f"rng/{place.rank}"] = torch.get_rng_state()
    return result


def save(run: Path, step: int, state: dict[str, Any], values: dict[str, Tensor], place: Place, *, keep: int) -> Path:
    """Write a checkpoint, all ranks together, then forget all but the newest `keep`. Returns its folder."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

    final = folder_of(run) / f"step-{step:08d}"
    partial = final.with_name(f".{final.name}.partial")
    if place.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier(place)
    contiguous = {name: value.contiguous() for name, value in values.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process: torch warns that it saves without a group
        save_distributed(
            contiguous,
            storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
            process_group=place.group,
            no_dist=place.group is None,
        )
    _barrier(place)
    if place.is_main:
        (partial / _STATE).write_text(json.dumps(state))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in sorted(folder_of(run).glob("step-*"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    _barrier(place)
    return final


def load(checkpoint: Path, values: dict[str, Tensor], place: Place) -> None:
    """Fill `values` in place from a checkpoint.

    Raises:
        ConfigError: tensors are missing or have other shapes: the checkpoint is of another configuration.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_distributed(
                values,
                storage_reader=HuggingFaceStorageReader(str(checkpoint)),
                process_group=place.group,
                no_dist=place.group is None,
            )
    except (RuntimeError, ValueError, KeyError, OSError, CheckpointException) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"checkpoint {checkpoint} does not fit this run ({reason})",
            remedy="resume with the configuration it was saved with",
        ) from error


def _barrier(place: Place) -> None:
    if place.group is not None:
        dist.barrier(place.group)
