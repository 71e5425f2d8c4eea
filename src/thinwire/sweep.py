"""Many short runs for one table: recipes x codecs x factors x seeds, each in one process (the twin).

A sweep is a folder:

    results/NAME.json     one finished run: its flags, configuration and summary; a second call leaves it alone
    runs/NAME/            its run folder without the checkpoints
    table.json            one object per method, means and spreads over seeds
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ConfigError, ThinwireError
from thinwire.report.runs import Run
from thinwire.report.table import Row, is_uncompressed, wire_value_kept
from thinwire.train.metrics import to_json, write_atomically

_WITHOUT_FACTOR = ("identity", "cut")


@dataclass(frozen=True)
class Job:
    """One run of a sweep. `codec` is a name and options, as in `mapl,wire_format=int4-clip,anchor_rank=16`."""

    recipe: str
    codec: str
    factor: float
    seed: int
    flags: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """What is the same over seeds."""
        return f"{self.recipe} {self.codec}" + (f" {self.factor:g}x" if self.factor else "")

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.method} seed{self.seed}".replace(" ", "_").replace(",", "-").replace("/", "-")

    @property
    def words(self) -> list[str]:
        """What follows `thinwire train`, but for the folder."""
        codec, *options = self.codec.split(",")
        words = [self.recipe, "--name", self.name, "--pipeline.emulate", "--train.seed", str(self.seed)]
        words += ["--codec.name", codec, *self.flags]
        if codec not in _WITHOUT_FACTOR:
            rank = next((option[5:] for option in options if option.startswith("rank=")), "0")
            words += ["--codec.rank", rank, "--codec.factor", f"{self.factor:g}"]
        for option in options:
            field, _, value = option.partition("=")
            if not field.startswith("rank") or codec in _WITHOUT_FACTOR:
                words += [f"--codec.{field.replace('_', '-')}", value]
        return words


def jobs(
    recipes: Sequence[str],
    codecs: Sequence[str],
    factors: Sequence[float],
    seeds: Sequence[int],
    flags: Sequence[str] = (),
) -> list[Job]:
    """All runs of a sweep, every method's first seed before any second one.

    `identity`, `cut` and codecs with a rank of their own run once for all factors.

    Raises:
        ConfigError: a codec needs a factor and there is none, or an option is not `field=value`.
    """
    made = [
        Job(recipe, codec, factor, seed, tuple(flags))
        for seed, recipe, codec in itertools.product(seeds, recipes, codecs)
        for factor in _factors_of(codec, factors)
    ]
    return list(dict.fromkeys(made))


def _factors_of(codec: str, factors: Sequence[float]) -> Sequence[float]:
    name, *options = codec.split(",")
    for option in options:
        if "=" not in option:
            raise ConfigError(f"option {option!r} of codec {codec!r}", "field=value, as in anchor_rank=16")
    if name in _WITHOUT_FACTOR or any(option.startswith("rank=") for option in options):
        return (0.0,)
    if not factors:
        raise ConfigError(f"codec {codec!r} without a factor", "--factors 4 8, or codec,rank=K")
    return factors


def sweep(todo: Sequence[Job], folder: Path, *, parallel: int = 1, say: Callable[[str], None] = print) -> list[Row]:
    """Run what has no result yet, up to `parallel` processes of one thread each; returns and writes the table's rows.

    Raises:
        ConfigError: a run's configuration is wrong, or a result of this name was made with other flags.
        ThinwireError: runs failed; names them. The others' results are kept, and a second call tries again.
    """
    for part in ("results", "runs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    missing = [job for job in todo if not _is_done(job, folder)]
    say(f"{len(todo)} runs, {len(todo) - len(missing)} of them done before")
    with ThreadPoolExecutor(max(1, parallel)) as pool:
        failures = list(filter(None, pool.map(lambda job: _run(job, folder, say), missing)))
    rows = table([job for job in todo if _is_done(job, folder)], folder)
    write_atomically(folder / "table.json", to_json(rows, indent=1) + "\n")
    if failures:
        raise failures[0] if len(failures) == 1 else ThinwireError("; ".join(str(failure) for failure in failures))
    return rows


def _result(job: Job, folder: Path) -> Path:
    return folder / "results" / f"{job.name}.json"


def _is_done(job: Job, folder: Path) -> bool:
    path = _result(job, folder)
    if not path.exists():
        return False
    before = json.loads(path.read_text())["words"]
    if before != job.words:
        remedy = "choose another --folder, or remove this result"
        raise ConfigError(f"{path} was made by `thinwire train {' '.join(before)}`", " ".join(job.words), remedy)
    return True


def _run(job: Job, folder: Path, say: Callable[[str], None]) -> ThinwireError | None:
    run, log = folder / "runs" / job.name, folder / "runs" / f"{job.name}.log"
    command = [sys.executable, "-m", "thinwire", "train", *job.words, "--folder", str(folder / "runs"), "--overwrite"]
    with log.open("w") as written:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, stdout=written, stderr=subprocess.STDOUT, env=environment, check=False)
    if ended.returncode != 0:
        last = (log.read_text().strip().splitlines() or ["it said nothing"])[-1].removeprefix("thinwire: ")
        say(f"{job.name}: failed, {last}")
        return (ConfigError if ended.returncode == 2 else ThinwireError)(f"{job.name}: {last} (all of it: {log})")
    parts = {part: json.loads((run / f"{part}.json").read_text()) for part in ("config", "summary")}
    write_atomically(_result(job, folder), to_json({"words": job.words, **parts}, indent=1) + "\n")
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    say(f"{job.name}: validation loss {parts['summary'].get('val_loss')}")
    return None


def table(done: Sequence[Job], folder: Path) -> list[Row]:
    """One flat object per method, in the order of `done`: means over seeds, spread as standard deviation.

    `degradation_percent` is the loss over that of the uncompressed run of the same recipe, seed and anchors, and
    `wire_value_kept` as `report` has it; both are means of what each seed gives, None without such runs.
    """
    runs = {job: _load(job, folder) for job in done}
    rows = []
    for method in dict.fromkeys(job.method for job in done):
        same = [job for job in done if job.method == method]
        peers = {job: [runs[o] for o in done if (o.recipe, o.seed) == (job.recipe, job.seed)] for job in same}
        losses = [runs[job].summary.get("val_loss") for job in same]
        summary = runs[same[0]].summary
        rows.append({
            "method": method, "pipeline_stages": runs[same[0]].num_stages,
            **{key: summary.get(key) for key in ("compression_factor_fwd", "compression_factor_bwd")},
            "bytes_per_token": sum(summary.get(f"bytes_per_token_{way}") or 0.0 for way in ("fwd", "bwd", "sync")),
            **_spread("val_loss", losses),
            **_spread("degradation_percent", [_degradation(runs[job], peers[job]) for job in same]),
            **_spread("wire_value_kept", [wire_value_kept(runs[job], peers[job]) for job in same]),
            "params": summary.get("params"), "tokens": summary.get("tokens"), "seeds": len(same),
        })  # fmt: skip
    return rows


def _load(job: Job, folder: Path) -> Run:
    result = json.loads(_result(job, folder).read_text())
    return Run(folder / "runs" / job.name, result["config"], [], [], result["summary"])


def _degradation(run: Run, peers: Sequence[Run]) -> float | None:
    whole = [one for one in peers if is_uncompressed(one) and one.anchor_rank == run.anchor_rank]
    loss = run.summary.get("val_loss")
    reference = whole[0].summary.get("val_loss") if len(whole) == 1 else None
    return 100 * (loss / reference - 1) if loss and reference else None


def _spread(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and standard deviation, the mean under the bare name but for the loss; None where a value is missing."""
    numbers = [value for value in values if value is not None]
    whole = bool(numbers) and len(numbers) == len(values)
    return {
        f"{name}_mean" if name == "val_loss" else name: statistics.fmean(numbers) if whole else None,
        f"{name}_sd": statistics.stdev(numbers) if whole and len(numbers) > 1 else None,
    }
