"""Starting a run: checks first, then processes of its own on this machine, or the ones a launcher has started."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from thinwire.errors import ConfigError, PeerError
from thinwire.train import checkpoint
from thinwire.train.config import Config
from thinwire.train.failures import explain, first_failure, progress, report_errors
from thinwire.train.place import Place, join, leave, under_launcher
from thinwire.train.stored import from_dict, to_dict
from thinwire.train.validate import validate
from thinwire.train.work import load

_WORKER_MODULE = "thinwire.train.loop"  # imported once, by the process from which workers are forked
_GRACE_S = 1.0  # a process that lost a peer leaves this much later, so that the launcher names the one that died


def preflight(config: Config) -> None:
    """Find out all that can be wrong before any process starts; nothing is written but the data cache.

    Raises:
        ConfigError: settings, text, an existing run in the way, or a checkpoint that does not fit.
    """
    validate(config)
    run = Path(config.folder) / config.name
    newest = _check_folder(config, run)
    data = load(config)
    data.batches(config)
    data.held_out(config)
    if newest is not None:
        state = checkpoint.read_state(newest)
        checkpoint.check_resumable(newest, state, config, data.digest)
        if state["step"] >= config.train.steps:
            raise ConfigError(
                f"run {run} is at step {state['step']} of {config.train.steps}", "more steps than that",
                "raise train.steps, or start a run of another name",
            )  # fmt: skip
    if config.pipeline.port:
        _check_port(config.pipeline.port)


def train(config: Config) -> None:
    """Run `config` to its end: in this process (twin, or under a launcher), or in processes started here.

    Raises:
        ConfigError: the configuration is wrong, or the run is in progress already.
        PeerError: a process of the run failed.
    """
    preflight(config)
    with _run_lock(config):
        if under_launcher() or config.num_processes == 1:
            run_here(config)
        else:
            _start_processes(config)


def run_here(config: Config) -> dict[str, Any]:
    """Take this process's part in the run; returns the summary on the main process.

    Raises:
        ThinwireError: with the stage, peer and microbatch where the network or another process failed.
    """
    from thinwire.train.loop import Trainer

    place: Place | None = None
    trainer: Trainer | None = None
    try:
        place = join(config)
        trainer = Trainer(config, place)
        return trainer.fit()
    except Exception as error:
        activity = "the start" if trainer is None else trainer.engine.activity
        raise explain(error, config, place, activity) from error
    finally:
        leave()


def _check_folder(config: Config, run: Path) -> Path | None:
    """Return the checkpoint to continue from, if any.

    Raises:
        ConfigError: a folder that cannot be written, is no run, holds a run in the way, or no checkpoint to continue.
    """
    try:
        entries = list(run.iterdir()) if run.exists() else []
        newest = checkpoint.latest(run)
        parent = next(path for path in (run, *run.parents) if path.exists())
        if not os.access(parent, os.W_OK) or not parent.is_dir():
            raise ConfigError(f"run folder {run}: {parent} cannot be written", "a folder of your own", "set --folder")
    except OSError as error:
        raise ConfigError(f"run folder {run} ({error.strerror})", "a folder of your own", "set --folder") from None
    if config.resume and newest is None:
        raise ConfigError(
            f"resume of {run}, which has no checkpoint", remedy="start it with --overwrite instead of --resume"
        )
    if config.overwrite and entries and not (run / "config.json").is_file():
        raise ConfigError(
            f"overwrite of {run}, which is no run folder", "one that thinwire wrote", "choose another name"
        )
    if entries and not config.resume and not config.overwrite:
        raise ConfigError(
            f"run folder {run} exists", "a new name",
            "pass --resume to continue it, --overwrite to replace it, or --name for another",
        )  # fmt: skip
    return newest if config.resume else None


@contextmanager
def _run_lock(config: Config) -> Iterator[None]:
    """Keep other starts of the same run out until this one is over. Only one process of a run holds it."""
    if int(os.environ.get("RANK", "0") or 0):
        yield
        return
    folder = Path(config.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f".{config.name}.lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"run {folder / config.name} is in progress", "one at a time", "choose another name"
        ) from None
    except OSError as error:
        raise ConfigError(f"folder {folder} ({error.strerror})", "a folder of your own", "set --folder") from None
    with lock:
        yield


def _worker(plain: dict[str, Any], reports: str) -> None:
    """The body of a process started by `_start_processes`. What it has to say goes into its report."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    lines: list[str] = []
    code = report_errors(lambda: run_here(from_dict(plain)), lines.append)
    if lines:
        Path(reports, os.environ["RANK"]).write_text(f"{code} {lines[0]}")
    if code == PeerError.exit_code:
        time.sleep(_GRACE_S)
    sys.exit(code)


def _leave_with_parent() -> None:
    """Do not train on when the launcher was killed. (The operating system's parent is the fork server.)"""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os._exit(PeerError.exit_code)


def _start_processes(config: Config) -> None:
    """One process per rank on this machine, through torch's elastic launcher."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(config.train.threads))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    multiprocessing.set_forkserver_preload([_WORKER_MODULE])
    with tempfile.TemporaryDirectory() as logs, tempfile.TemporaryDirectory() as reports:
        launch = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=config.num_processes, run_id=config.name,
            rdzv_backend="c10d", rdzv_endpoint=f"localhost:{config.pipeline.port}", local_addr="localhost",
            start_method="forkserver", max_restarts=0, monitor_interval=0.1, logs_specs=DefaultLogsSpecs(logs),
        )  # fmt: skip
        try:
            elastic_launch(launch, _worker)(to_dict(config), reports)
        except ChildFailedError as error:
            raise first_failure(error, config, Path(reports)) from None
        except SignalException as stop:
            raise PeerError(f"stopped by {stop.sigval.name} after {progress(config)}") from None


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"pipeline.port={port} ({error})", "a free port", "choose another, or 0 for any"
            ) from None
