"""Starting a run: checks first, then processes of its own on this machine, or the ones a launcher has started."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, PeerError, ThinwireError
from thinwire.train import checkpoint
from thinwire.train.build import load_data, ranks_of_stages
from thinwire.train.config import Config, from_dict, layout_digest, to_dict
from thinwire.train.place import Place, join, leave, one_line, under_launcher
from thinwire.train.validate import validate

_WORKER_MODULE = "thinwire.train.loop"  # imported once, by the process from which workers are forked
_GRACE_S = 1.0  # a process that lost a peer leaves this much later, so that the launcher names the one that died


def preflight(config: Config) -> None:
    """Find out all that can be wrong before any process starts; nothing is written but the data cache.

    Raises:
        ConfigError: settings, text, an existing run in the way, or a checkpoint that does not fit.
    """
    validate(config)
    run = Path(config.folder) / config.name
    newest = checkpoint.latest(run)
    if config.resume and newest is None:
        raise ConfigError(f"resume of {run}, which has no checkpoint", remedy="drop --resume to start it")
    if not config.resume and not config.overwrite and run.is_dir() and any(run.iterdir()):
        raise ConfigError(
            f"run folder {run} exists", "a new name",
            "pass --resume to continue it, --overwrite to replace it, or --name for another",
        )  # fmt: skip
    data = load_data(config)
    data.batches(config.model.seq_len, config.train.batch_size, config.train.seed)
    if config.resume and newest is not None:
        checkpoint.check_resumable(newest, checkpoint.read_state(newest), layout_digest(config), data.digest)
    if config.pipeline.port:
        _check_port(config.pipeline.port)


def train(config: Config) -> None:
    """Run `config` to its end: in this process (twin, or under a launcher), or in processes started here.

    Raises:
        ConfigError: the configuration is wrong.
        PeerError: a process of the run failed.
    """
    preflight(config)
    if under_launcher() or config.pipeline.emulate or config.pipeline.stages == 1:
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
        raise _explain(error, config, place, trainer) from error
    finally:
        leave()


def _explain(error: Exception, config: Config, place: Place | None, trainer: Any) -> Exception:
    """Turn what the engine or the network raised into an error that says where the run stood."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ThinwireError):
            return cause if isinstance(cause, Exception) else error
        cause = cause.__cause__ or cause.__context__
    if place is None or place.group is None or not _is_network(error):
        return error
    held = [stage for stage, rank in ranks_of_stages(config).items() if rank == place.rank]
    stood = "at the start" if trainer is None else f"at {trainer.engine.activity}"
    return PeerError(f"rank {place.rank} (stages {held}) lost a peer {stood}: {one_line(_root(error))}")


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_network(error: BaseException) -> bool:
    import torch.distributed as dist

    text = str(_root(error)).lower()
    words = ("connection", "gloo", "nccl", "timed out", "timeout", "socket", "peer", "broken pipe", "reset")
    return isinstance(error, dist.DistError) or any(word in text for word in words)


def _worker(plain: dict[str, Any]) -> None:
    """The body of a process started by `_start_processes`."""
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    code = report_errors(lambda: run_here(from_dict(plain)))
    if code == PeerError.exit_code:
        time.sleep(_GRACE_S)
    sys.exit(code)


def _leave_with_parent(parent: int, every_s: float = 1.0) -> None:
    """Do not train on when the launcher was killed."""
    while os.getppid() == parent:
        time.sleep(every_s)
    os._exit(PeerError.exit_code)


def report_errors(action: Any) -> int:
    """Run `action`; print its error, if it is one of ours, as one line. Returns the exit code."""
    try:
        action()
    except ThinwireError as error:
        print(f"thinwire: {one_line(error, 1000)}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _start_processes(config: Config) -> None:
    """One process per rank on this machine, through torch's elastic launcher."""
    from multiprocessing import set_forkserver_preload

    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(config.train.threads))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    set_forkserver_preload([_WORKER_MODULE])
    try:
        with tempfile.TemporaryDirectory() as logs:
            launch = LaunchConfig(
                min_nodes=1, max_nodes=1, nproc_per_node=config.pipeline.ranks, run_id=config.name,
                rdzv_backend="c10d", rdzv_endpoint=f"localhost:{config.pipeline.port}", local_addr="localhost",
                start_method="forkserver", max_restarts=0, monitor_interval=0.1, logs_specs=DefaultLogsSpecs(logs),
            )  # fmt: skip
            elastic_launch(launch, _worker)(to_dict(config))
    except ChildFailedError as error:
        raise _first_failure(error, config) from None
    except SignalException as stop:
        raise PeerError(f"stopped by {stop.sigval.name} after {_last_step(config)}; continue with --resume") from None


def _first_failure(error: Any, config: Config) -> ThinwireError:
    """Name the process that failed first and what it held."""
    rank, failure = error.get_first_failure()
    stages = [stage for stage, place in ranks_of_stages(config).items() if place == rank]
    code = failure.exitcode
    if code == ConfigError.exit_code:
        return ConfigError(f"rank {rank} (stages {stages}) refused the configuration, as said above")
    died = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    newest = checkpoint.latest(Path(config.folder) / config.name)
    saved = f"continue from {newest.name} with --resume" if newest else "nothing was saved yet"
    return PeerError(f"rank {rank} (stages {stages}) {died} after {_last_step(config)}; {saved}")


def _last_step(config: Config) -> str:
    path = Path(config.folder) / config.name / "metrics.jsonl"
    finished = sum(1 for _ in path.open()) if path.is_file() else 0
    return f"{finished} finished steps" if finished else "no finished step"


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"pipeline.port={port} ({error})",
                "a free port of this machine",
                "choose another, or 0 for any free one",
            ) from None
