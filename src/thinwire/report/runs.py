"""Run folders, as a training run writes them: finished, still growing, or cut off."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError

_REMEDY = "give the folder that `thinwire train` printed, as in runs/demo"


@dataclass(frozen=True)
class Run:
    """What a run folder holds.

    `metrics` has one object per optimizer step and `evaluations` one per evaluation, both by rising step.
    `summary` is empty until the run has ended.
    """

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name

    @property
    def finished(self) -> bool:
        """Whether the run wrote its summary."""
        return bool(self.summary)

    @property
    def codec(self) -> str:
        """The boundary codec, "-" where none is recorded."""
        return _recorded(self, "codec") or "-"

    @property
    def anchor_rank(self) -> int:
        """Columns of the anchor tables, 0 without anchors."""
        return int(self._part("codec").get("anchor_rank") or 0)

    @property
    def is_cut(self) -> bool:
        """Whether nothing of an activation crossed the boundaries."""
        return self._part("codec").get("name") == "cut"

    @property
    def link(self) -> str | None:
        """The link emulated between stages in its text form, None where the run used its real connections."""
        link = _recorded(self, "link")
        return None if link in (None, "", "none") else link

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, 1 where none are recorded."""
        return int(self._part("pipeline").get("stages") or 1)

    @property
    def num_replicas(self) -> int:
        """Replicas of the whole model, 1 where none are recorded."""
        return int(self._part("dp").get("replicas") or 1)

    @property
    def dp_link(self) -> str | None:
        """The link emulated between replicas in its text form, None for real connections, or for none at all."""
        dp = self._part("dp")
        link = dp.get("link")
        return None if self.num_replicas == 1 or dp.get("emulate") or link in (None, "", "none") else str(link)

    @property
    def links(self) -> str | None:
        """All emulated links in words, None where there is none."""
        between = {"stages": self.link, "replicas": self.dp_link}
        return " and ".join(f"{link} between {ends}" for ends, link in between.items() if link) or None

    @property
    def method(self) -> str:
        """The optimizer, "-" where none is recorded."""
        return str(self._part("optim").get("method") or "-")

    @property
    def unit(self) -> str:
        """What the run counts as `tokens`."""
        return "pictures" if str(self._part("model").get("family")).startswith("resnet") else "tokens"

    def _part(self, name: str) -> dict[str, Any]:
        part = self.config.get(name)
        return part if isinstance(part, dict) else {}

    def column(self, key: str) -> list[float]:
        """`key` of every step; not-a-number where a step lacks it."""
        return [number(step.get(key)) for step in self.metrics]


def load_run(path: str | Path) -> Run:
    """Read a run folder, leaving out a last line that is half there and what a run has not written yet.

    A step that appears twice (the run was resumed from an earlier checkpoint) counts as it was done last.

    Raises:
        ConfigError: no run folder, or a file in it that cannot be read; names the path.
    """
    folder = Path(path).resolve()
    if not folder.is_dir():
        raise ConfigError(f"{path} is no folder", "a run folder", _REMEDY)
    if not (folder / "config.json").is_file():
        content = "has no config.json" if any(folder.iterdir()) else "is empty"
        raise ConfigError(f"{path} {content}", "a run folder", _REMEDY)
    return Run(
        path=folder,
        config=_read_object(folder / "config.json"),
        metrics=_read_lines(folder / "metrics.jsonl"),
        evaluations=_read_lines(folder / "evals.jsonl"),
        summary=_read_object(folder / "summary.json") if (folder / "summary.json").exists() else {},
    )


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its folder's, with the parents that it takes to tell equal ones apart."""
    names = [run.name for run in runs]
    longest = max((len(run.path.parts) for run in runs), default=0)
    for depth in range(2, longest + 1):
        repeated = {name for name in names if names.count(name) > 1}
        names = [
            str(Path(*run.path.parts[-depth:])) if name in repeated else name
            for run, name in zip(runs, names, strict=True)
        ]
    return names


def _read_object(file: Path) -> dict[str, Any]:
    return _parsed(_text(file), str(file))


def _read_lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    *lines, unfinished = _text(file).split("\n")
    steps = [_parsed(line, f"{file}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    with contextlib.suppress(ConfigError):  # the run is writing this line, or died while it did
        steps += [_parsed(unfinished, str(file))] if unfinished.strip() else []
    by_step = {number(step.get("step")): step for step in steps}
    return [by_step[step] for step in sorted(by_step)]


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", remedy=_REMEDY) from error


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error})", remedy="remove this run or restore the file") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} holds a {type(value).__name__}", "a JSON object")
    return value


def number(value: object) -> float:
    """`value` as a float, not-a-number when it is none."""
    return float(value) if isinstance(value, int | float) else math.nan


def _recorded(run: Run, key: str) -> str | None:
    """A setting from the summary or, before there is one, from wherever the configuration has it."""
    for holder in (run.summary, run.config, *run.config.values()):
        if isinstance(holder, dict) and key in holder:
            value = holder[key]
            return str(value.get("name", "-")) if isinstance(value, dict) else None if value is None else str(value)
    return None
