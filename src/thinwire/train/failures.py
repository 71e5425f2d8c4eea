"""From what went wrong to one line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, PeerError, ThinwireError, one_line
from thinwire.train import checkpoint
from thinwire.train.build import ranks_of_stages
from thinwire.train.config import Config
from thinwire.train.place import Place

_NETWORK_WORDS = ("connection", "gloo", "nccl", "timed out", "timeout", "socket", "peer", "broken pipe", "reset")


def explain(error: Exception, config: Config, place: Place | None, activity: object) -> Exception:
    """Turn what the engine or the network raised into an error that says where the run stood."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ThinwireError):
            return cause
        cause = cause.__cause__ or cause.__context__
    if place is None or place.group is None or not _is_network(error):
        return error
    return PeerError(
        f"rank {place.rank} ({_held(config, place.rank)}) lost a peer at {activity}: {one_line(root(error))}"
    )


def _held(config: Config, rank: int) -> str:
    """Which stages, and of which replica, a rank holds."""
    replica, within = divmod(rank, config.pipeline_ranks)
    stages = [stage for stage, place in ranks_of_stages(config).items() if place == within]
    if config.pipeline_ranks == 1:
        stages = list(range(config.pipeline.stages))
    return f"stages {stages}" + (f" of replica {replica}" if config.dp.replicas > 1 else "")


def _is_network(error: BaseException) -> bool:
    import torch.distributed as dist

    text = str(root(error)).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _NETWORK_WORDS)


def root(error: BaseException) -> BaseException:
    """The first cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def report_errors(action: Callable[[], object], say: Callable[[str], None] | None = None) -> int:
    """Run `action`; say its error in one line (default: on standard error). Returns the exit code.

    What is no error of ours is a fault of ours: exit code 1, and the traceback where THINWIRE_TRACEBACK is set.
    """
    say = say or (lambda line: print(f"thinwire: {line}", file=sys.stderr, flush=True))
    try:
        action()
    except ThinwireError as error:
        say(one_line(error, 1000))
        return error.exit_code
    except Exception as error:
        if os.environ.get("THINWIRE_TRACEBACK"):
            traceback.print_exc()
        first = root(error)
        hint = "set THINWIRE_TRACEBACK=1 to see where, and please report it"
        say(f"unexpected {type(first).__name__}: {one_line(first, 600)}; {hint}")
        return 1
    return 0


def first_failure(error: Any, config: Config, reports: Path) -> ThinwireError:
    """Name the process that failed first, what it held, and what it or a survivor said.

    Args:
        error: torch's `ChildFailedError`.
        reports: the folder in which each process left its line as `CODE LINE` in a file named by its rank.
    """
    said = {int(path.name): path.read_text().split(" ", 1) for path in sorted(reports.glob("[0-9]*"))}
    for wanted in (str(ConfigError.exit_code), "1"):
        for _, (code, line) in sorted(said.items()):
            if code == wanted:
                return SaidError(line, int(code))
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    died = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    heard = "; ".join(line for _, line in said.values())
    return PeerError(
        f"rank {rank} ({_held(config, rank)}) {died} after {progress(config)}" + (f"; {heard}" if heard else "")
    )


class SaidError(ThinwireError):
    """What a process said, passed on with its exit code."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


def progress(config: Config) -> str:
    """How far a run came, and how to go on."""
    run = Path(config.folder) / config.name
    path = run / "metrics.jsonl"
    written = sum(1 for _ in path.open("rb")) if path.is_file() else 0
    newest = checkpoint.latest(run)
    saved = f"continue from {newest.name} with --resume" if newest else "nothing was saved yet"
    return f"{written or 'no'} recorded steps; {saved}"
