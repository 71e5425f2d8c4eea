"""The account of a run: one line per step in `metrics.jsonl`, evaluations in `evals.jsonl`, TensorBoard, progress."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.train.place import Place
from thinwire.wire import DATA_PARALLEL, Direction, Ledger

_SYNC_KINDS = ("frame", "frame_gradient", "anchors", "anchors_gradient", "tied", "tied_gradient")
SUMMED = ("wire_bytes_fwd", "wire_bytes_bwd", "wire_bytes_dp", "wire_bytes_sync", "sync_bytes_fwd", "sync_bytes_bwd")
MEANED = ("forward_s", "backward_s", "link_wait_s", "optimizer_s", "sync_s", "data_s", "exchange_s")
LARGEST = ("orthogonality_error", "step_s")
_LINE_EVERY_S = 10.0  # between progress lines where there is no terminal
KEYS = (*SUMMED, *MEANED, *LARGEST)


class TrafficMeter:
    """What a ledger grew by since the last reading."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.last = self._totals()

    def _totals(self) -> dict[str, int]:
        fwd, bwd = Direction.FORWARD, Direction.BACKWARD
        sync = {way: sum(self.ledger.total(kind=k, direction=way) for k in _SYNC_KINDS) for way in (fwd, bwd)}
        return {
            "wire_bytes_fwd": self.ledger.total(kind="activation"),
            "wire_bytes_bwd": self.ledger.total(kind="gradient"),
            "wire_bytes_dp": self.ledger.total(boundary=DATA_PARALLEL),
            "wire_bytes_sync": sync[fwd] + sync[bwd],
            "sync_bytes_fwd": sync[fwd],
            "sync_bytes_bwd": sync[bwd],
        }

    def read(self) -> dict[str, float]:
        """Bytes sent by this process since the last call, by key."""
        now = self._totals()
        grown = {key: float(now[key] - self.last[key]) for key in now}
        self.last = now
        return grown


class Gathering:
    """Every rank's numbers of one step on their way to every rank; `finish` waits for them.

    The exchange runs beside the next step, so that it costs no round trip on a slow link.
    """

    def __init__(self, local: dict[str, float], place: Place) -> None:
        row = torch.tensor([local[key] for key in KEYS], dtype=torch.float64)
        self.rows = [torch.empty_like(row) for _ in range(place.world)] if place.group is not None else [row]
        self.work = dist.all_gather(self.rows, row, group=place.group, async_op=True) if place.group else None

    def finish(self) -> dict[str, float]:
        """Return sums, means and maxima over the ranks."""
        if self.work is not None:
            self.work.wait()
        table: Tensor = torch.stack(self.rows)
        column = {key: table[:, i] for i, key in enumerate(KEYS)}
        return {
            **{key: float(column[key].sum()) for key in SUMMED},
            **{key: float(column[key].mean()) for key in MEANED},
            **{key: float(column[key].max()) for key in LARGEST},
        }


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON, which knows neither NaN nor infinity: they become null."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON object to a file of lines."""
    with path.open("a") as file:
        file.write(to_json(record) + "\n")


def cut_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the lines of later steps than `step` (a resume repeats them), atomically; returns what is kept."""
    if not path.is_file():
        return []
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed while writing
        if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= step:
            kept.append(record)
    write_atomically(path, "".join(to_json(record) + "\n" for record in kept))
    return kept


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see the old text or the new one."""
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(text)
    os.replace(beside, path)


class Progress:
    """A live line on a terminal, plain lines elsewhere: loss, tokens/s, bytes per token, time left.

    `unit`: what the run counts, tokens or pictures.
    """

    def __init__(
        self, title: str, total_steps: int, first_step: int, unit: str = "tokens", file: IO[str] | None = None
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(file=file or sys.stderr)
        self.total_steps = total_steps
        self.live = self.console.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[numbers]}"), TimeRemainingColumn(), console=self.console, disable=not self.live,
        )  # fmt: skip
        self.task = self.bar.add_task(title, total=total_steps, completed=first_step, numbers="")
        self.title, self.unit = title, unit
        self.last_line_s = -math.inf  # the first step is shown at once
        self.bar.start()

    def step(self, record: dict[str, Any]) -> None:
        """Show a step."""
        sent = sum(record[f"wire_bytes_{kind}"] for kind in ("fwd", "bwd", "sync", "dp"))
        per_token = sent * record["step"] / max(1, record["tokens"])
        speed = f"{record['tokens_per_s']:.0f} {self.unit}/s  {per_token:.0f} bytes/{self.unit.removesuffix('s')}"
        numbers = f"loss {record['loss']:.3f}  {speed} in all"
        self.bar.update(self.task, completed=record["step"], numbers=numbers)
        now = time.monotonic()
        if not self.live and (record["step"] == self.total_steps or now - self.last_line_s >= _LINE_EVERY_S):
            self.last_line_s = now
            left = (self.total_steps - record["step"]) * record["step_s"]
            self.say(f"{self.title}  step {record['step']}/{self.total_steps}  {numbers}  {left:.0f} s left")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()


class Journal:
    """What a run writes down. Only the main process writes; the others take part in gathering the numbers."""

    def __init__(self, run: Path, place: Place, title: str, total_steps: int, tokens_per_step: int, unit: str) -> None:
        self.run, self.place, self.title, self.unit = run, place, title, unit
        self.total_steps, self.tokens_per_step = total_steps, tokens_per_step
        self.records: list[dict[str, Any]] = []
        self.pending: tuple[Gathering, dict[str, Any]] | None = None
        self.progress: Progress | None = None
        self.board: Any = None

    def open(self, step: int, table: Sequence[str]) -> None:
        """Start writing after `step` finished steps; later lines of an earlier attempt are dropped."""
        if not self.place.is_main:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.records = cut_after(self.run / "metrics.jsonl", step)
        cut_after(self.run / "evals.jsonl", step)
        self.board = SummaryWriter(str(self.run), purge_step=step + 1 if step else None)
        self.progress = Progress(self.title, self.total_steps, step, self.unit)
        self.say(table)

    def say(self, lines: Sequence[str]) -> None:
        """Print lines, on the main process."""
        if self.progress is not None:
            for line in lines:
                self.progress.say(line)

    def step(self, local: dict[str, float], record: dict[str, Any]) -> None:
        """Take a step's numbers of this rank; the step before is written now, its exchange had a step's time."""
        previous, self.pending = self.pending, (Gathering(local, self.place), record)
        if previous is not None:
            self._write(*previous)

    def flush(self) -> None:
        """Write the newest step too."""
        previous, self.pending = self.pending, None
        if previous is not None:
            self._write(*previous)

    def evaluation(self, record: dict[str, Any]) -> None:
        """Write an evaluation."""
        if self.progress is None:
            return
        append_line(self.run / "evals.jsonl", record)
        units = {"val_bits_per_byte": "bits/byte", "val_accuracy": "% right"}
        shown = [key for key in units if key in record]
        self._plot(record, ("val_loss", *shown))
        measures = "  ".join(f"{record[key]:.4f} {units[key]}" for key in shown)
        self.progress.say(f"{self.title}  step {record['step']}  validation loss {record['val_loss']:.4f}  {measures}")

    def close(self) -> None:
        """Stop the progress line and the TensorBoard file."""
        if self.progress is not None:
            self.progress.close()
            self.board.close()

    def _write(self, gathering: Gathering, record: dict[str, Any]) -> None:
        record |= gathering.finish()
        record["tokens_per_s"] = self.tokens_per_step / record["step_s"]
        if self.progress is None:
            return
        self.records.append(record)
        append_line(self.run / "metrics.jsonl", record)
        self._plot(record, ("loss", "lr", "tokens_per_s", "step_s", "orthogonality_error", "grad_norm"))
        self.progress.step(record)

    def _plot(self, record: dict[str, Any], keys: Sequence[str]) -> None:
        for key in keys:
            self.board.add_scalar(key, record[key], record["step"])
