"""Checkpoints through torch.distributed.checkpoint: safetensors shards, no pickle, a folder complete or absent.

    checkpoints/step-00000100/
        shard-*.safetensors     tensors by layout-free names: `model/...`, `optim/<parameter>/<state>`, `rng/<rank>`,
                                and what is each worker's own: `worker/<replica>/<parameter>/<state>`
        run.json                step, tokens, data position, ledger totals, configuration digest

A checkpoint is written beside and renamed when whole, so a crash while saving never harms the last good one.
"""

from __future__ import annotations

import hashlib
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

from thinwire.errors import ConfigError, StorageError, one_line
from thinwire.optim import DataParallel
from thinwire.pipeline import Stage, Sync
from thinwire.train.config import Config
from thinwire.train.place import Place
from thinwire.train.stored import flat, from_dict, layout_digest, to_dict

_STATE = "run.json"


def folder_of(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    complete = [path for path in folder_of(run).glob("step-*") if (path / _STATE).is_file()]
    return max(complete, default=None)


_STATE_TYPES = {
    "step": int, "tokens": int, "elapsed_s": float, "data": dict, "data_digest": str, "digest": str, "config": dict,
    "shards": dict, "replicas": int, "optimizer_steps": int,
}  # fmt: skip


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        ConfigError: unreadable, incomplete, or renamed.
    """
    try:
        state: Any = json.loads((checkpoint / _STATE).read_text())
        wrong = [name for name, kind in _STATE_TYPES.items() if not isinstance(state[name], kind)]
        if wrong or f"step-{state['step']:08d}" != checkpoint.name:
            raise ValueError(f"unexpected {', '.join(wrong) or 'step'}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"checkpoint {checkpoint} is damaged ({reason})", remedy=_OTHER) from None
    return dict(state)


_OTHER = "delete it to continue from an earlier one"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _check_shards(checkpoint: Path, shards: dict[str, str], place: Place) -> None:
    """Compare shards with the digests taken when they were saved; each rank checks its share."""
    for number, (name, digest) in enumerate(sorted(shards.items())):
        if number % place.world == place.rank:
            try:
                damaged = _digest(checkpoint / name) != digest
            except OSError as error:
                raise ConfigError(f"{checkpoint / name} cannot be read ({error.strerror})", remedy=_OTHER) from None
            if damaged:
                raise ConfigError(f"{checkpoint / name} is damaged: its digest is another", remedy=_OTHER)


def check_resumable(path: Path, state: dict[str, Any], config: Config, data_digest: str) -> None:
    """Refuse a checkpoint of another configuration or other data before anything is loaded.

    Raises:
        ConfigError: names the fields that differ.
    """
    if state["digest"] != layout_digest(config):
        saved, now = flat(to_dict(from_dict(state["config"]))), flat(to_dict(config))
        different = [f"{name} {saved[name]} (now {now[name]})" for name in now if saved[name] != now[name]]
        raise ConfigError(
            f"checkpoint {path} is of another configuration: {', '.join(different) or 'another version'}",
            remedy="leave these as they were, or name another run",
        )
    if state["data_digest"] != data_digest:
        raise ConfigError(f"checkpoint {path} is of other data", remedy="resume with the data it was trained on")


def tensors(stages: Sequence[Stage], sync: Sync, optimizers: Sequence[DataParallel], place: Place) -> dict[str, Tensor]:
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
                if not optimizer.is_worker_state(owner):
                    result[f"optim/{names[owner]}/{key}"] = value
                    continue
                for here, own in enumerate([value] if len(optimizer.workers.here) == 1 else value):
                    result[f"worker/{optimizer.workers.here[here]}/{names[owner]}/{key}"] = own
    result[f"rng/{place.rank}"] = torch.get_rng_state()
    return result


def save(run: Path, step: int, state: dict[str, Any], values: dict[str, Tensor], place: Place, *, keep: int) -> Path:
    """Write a checkpoint, all ranks together, then forget all but the newest `keep`. Returns its folder.

    Raises:
        StorageError: the disk is full or cannot be written; nothing half-written is left.
    """
    final = folder_of(run) / f"step-{step:08d}"
    partial = final.with_name(f".{final.name}.partial")
    try:
        if place.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _barrier(place)
        _write_shards(partial, values, place)
        if place.is_main:
            shards = {path.name: _digest(path) for path in partial.glob("*.safetensors")}
            (partial / _STATE).write_text(json.dumps({**state, "shards": shards}))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            for old in sorted(folder_of(run).glob("step-*"))[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        first = _first_cause(error)
        if isinstance(first, OSError) or "write" in str(first).lower():
            raise StorageError(f"checkpoint {final} cannot be written ({one_line(first)})") from error
        raise
    _barrier(place)
    return final


def without_workers(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is not bound to the number of workers."""
    return {name: value for name, value in values.items() if not _is_own(name)}


def load_mean_of_workers(checkpoint: Path, values: dict[str, Tensor], saved: int, place: Place) -> None:
    """Fill the workers' own tensors among `values` with the means over those of the `saved` workers.

    For a checkpoint from which `load` has taken the rest: its shards are not checked again.
    """
    mine = {name: value for name, value in values.items() if name.startswith("worker/")}
    sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in mine.items()}
    for worker in range(saved):
        names = {name: "/".join(["worker", str(worker), *name.split("/")[2:]]) for name in mine}
        loaded = {theirs: torch.empty_like(mine[name]) for name, theirs in names.items()}
        _read(checkpoint, loaded, place)
        for name, theirs in names.items():
            sums[name] += loaded[theirs]
    for name, value in mine.items():
        value.copy_(sums[name] / saved)


def _write_shards(folder: Path, values: dict[str, Tensor], place: Place) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process: torch warns that it saves without a group
        save_distributed(
            {name: value.contiguous() for name, value in values.items() if place.replica == 0 or _is_own(name)},
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=place.group,
            no_dist=place.group is None,
        )
    _barrier(place)


def _is_own(name: str) -> bool:
    """Whether a tensor belongs to one worker or process. Replicas hold the same of everything else."""
    return name.startswith(("worker/", "rng/"))


def load(checkpoint: Path, values: dict[str, Tensor], place: Place) -> None:
    """Fill `values` in place from a checkpoint whose shards are as they were saved.

    A process beyond those that saved it, whose replica was emulated then, keeps its own random state.

    Raises:
        ConfigError: a shard is damaged, or tensors are missing or have other shapes.
    """
    state = read_state(checkpoint)
    _check_shards(checkpoint, state["shards"], place)
    saved_processes = from_dict(state["config"]).num_processes
    _read(
        checkpoint, {k: v for k, v in values.items() if place.rank < saved_processes or not k.startswith("rng/")}, place
    )


def _read(checkpoint: Path, values: dict[str, Tensor], place: Place) -> None:
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
    except Exception as error:
        reason = one_line(_first_cause(error))
        raise ConfigError(
            f"checkpoint {checkpoint} does not fit this run ({reason})",
            remedy="resume with the configuration it was saved with",
        ) from error


def _first_cause(error: BaseException) -> BaseException:
    """What went wrong on the first rank where something did."""
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException):
        return next((wrapped[0] for wrapped in error.failures.values()), error)
    return error


def _barrier(place: Place) -> None:
    if place.group is not None:
        dist.barrier(place.group)
