"""Sign-Muon against Muon and the other methods: a small GPT on prose, a narrow ResNet-18 on CIFAR-10.

python benchmarks/learning.py gpt --data FOLDER        run what is missing, one JSON per run, and write the table
python benchmarks/learning.py gpt --table              only write table.json and the tables in README.md

FOLDER holds peps/*.parquet and cifar10/*.parquet. A second call resumes. `--jobs N` runs up to N processes of one
thread each; beyond the first they start only while the load average is below 2.5.

One word changes between methods. What is no hidden matrix is trained by the same AdamW at the same rate, tuned once
with Muon. The rate of the hidden matrices is tuned per method at M = 1 on one grid (factor 10^0.5), at least five
points, extended until the best lies inside; the tuning seed is not among the seeds reported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from thinwire.data import ImageBatches, Images, evaluation_batches, load_cifar10, prepare, validation_windows
from thinwire.models.gpt import gpt
from thinwire.models.resnet import resnet18
from thinwire.optim import METHODS, lr_factor, param_groups, set_lr

HERE = Path(__file__).parent
FOLDERS = {task: HERE / f"2026-12-01_signmuon-{task}_2-cores" for task in ("gpt", "cifar10")}
SEEDS = (0, 1, 2)
FRESH_SEEDS = (3, 4, 5)  # for what the runs of SEEDS suggested
TUNING_SEED = 100
MAX_LOAD = 2.5

# name -> class, options, the exponent in the middle of the first grid: lr = 10^(k / 2)
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "muon": ("muon", {}, -3),
    "signmuon": ("signmuon", {}, -6),
    "signmuon, local polar": ("signmuon", {"local_polar": True}, -3),
    "signmuon, feedback": ("signmuon", {"feedback": True}, -6),
    "signum": ("signum", {}, -6),
    "signsgd": ("signsgd", {}, -6),
    "lion": ("lion", {}, -6),
    "adamw": ("adamw", {}, -5),
    "sgd": ("sgd", {}, -1),
}
FIRST_POINTS = (-2, -1, 0, 1, 2)


@dataclass(frozen=True)
class Task:
    """Sizes of one benchmark."""

    steps: int
    tuning_steps: int
    batch_size: int
    seq_len: int = 0
    vocab_size: int = 0
    width: int = 0
    aux_exponents: tuple[int, ...] = (-6, -5, -4)

    @property
    def fixed(self) -> dict[str, int]:
        return {k: v for k, v in asdict(self).items() if k in ("batch_size", "seq_len", "vocab_size", "width") and v}


TASKS = {
    "gpt": Task(steps=300, tuning_steps=120, batch_size=16, seq_len=128, vocab_size=512),
    "cifar10": Task(steps=400, tuning_steps=400, batch_size=64, width=8),
}


@dataclass(frozen=True)
class Run:
    """One run; `lr` and `adamw_lr` as exponents of the square root of 10."""

    stage: str
    variant: str
    lr: int
    adamw_lr: int
    steps: int
    workers: int = 1
    seed: int = TUNING_SEED
    options: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 0  # 0: the task's

    @property
    def name(self) -> str:
        options = "".join(f"_{key}-{value}" for key, value in self.options.items())
        word = self.variant.replace(", ", "-").replace(" ", "-")
        batch = f"_b{self.batch_size}" if self.batch_size else ""
        return f"{self.stage}_{word}{options}_m{self.workers}{batch}_lr{self.lr}_aux{self.adamw_lr}_seed{self.seed}"


def rate(exponent: int) -> float:
    return float(f"{10 ** (exponent / 2):.3g}")


# --- a run ---------------------------------------------------------------------------------------------------------


@cache
def text(data: str, vocab_size: int) -> Any:
    return prepare(f"{data}/peps", vocab_size)


@cache
def images(data: str) -> tuple[Images, Images]:
    """CIFAR-10, decoded once into the folder for temporary files."""
    path = Path(tempfile.gettempdir(), "thinwire-cifar10.npz")
    if not path.exists():
        parts = dict(zip(("train", "test"), load_cifar10(f"{data}/cifar10"), strict=True))
        arrays = {f"{k}_{a}": getattr(part, a).numpy() for k, part in parts.items() for a in ("pixels", "labels")}
        partial = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(partial, **arrays)
        partial.replace(path)
    held = np.load(path)
    train, test = (
        Images(torch.from_numpy(held[f"{k}_pixels"]), torch.from_numpy(held[f"{k}_labels"]), 10)
        for k in ("train", "test")
    )
    return train, test


class Prose:
    """Next-token prediction."""

    def __init__(self, task: Task, data: str, seed: int) -> None:
        tokens = text(data, task.vocab_size)
        self.model = gpt("tiny", vocab_size=task.vocab_size, max_seq_len=task.seq_len)
        self.batches = tokens.batches(task.seq_len, task.batch_size, seed)
        self.validation = validation_windows(tokens.validation, task.seq_len, 1 << 15)

    def next(self, workers: int) -> list[torch.Tensor]:
        return list(self.batches.next().chunk(workers))

    def loss(self, part: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        return {"val_loss": statistics.fmean(float(self.loss(part)) for part in self.validation.split(16))}


class Pictures:
    """Classification; every worker normalises its own share of the batch."""

    def __init__(self, task: Task, data: str, seed: int) -> None:
        train, self.test = images(data)
        self.model = resnet18(width=task.width)
        self.batches = ImageBatches(train, task.batch_size, seed)

    def next(self, workers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(*(tensor.chunk(workers) for tensor in self.batches.next()), strict=True))

    def loss(self, part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(self.model(part[0]), part[1])

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        logits = torch.cat([self.model(x) for x, _ in evaluation_batches(self.test, 500)])
        self.model.train()
        labels = self.test.labels
        accuracy = 100 * float((logits.argmax(1) == labels).float().mean())
        return {"val_loss": float(F.cross_entropy(logits, labels)), "accuracy": accuracy}


def train(task_name: str, run: Run, data: str) -> dict[str, Any]:
    """One run; a loss that is not finite ends it."""
    torch.set_num_threads(1)
    task = TASKS[task_name]
    task = replace(task, batch_size=run.batch_size or task.batch_size)
    work = (Prose if task_name == "gpt" else Pictures)(task, data, run.seed)
    work.model.init_weights(run.seed)
    method, options, _ = VARIANTS[run.variant]
    groups = param_groups(work.model, lr=rate(run.lr), adamw_lr=rate(run.adamw_lr))
    optimizer = METHODS[method](groups, virtual_workers=run.workers, seed=run.seed, **{**options, **run.options})
    losses: list[float] = []
    start, cpu = time.perf_counter(), time.process_time()
    for step in range(run.steps):
        set_lr([optimizer], lr_factor(step, run.steps, warmup=run.steps // 15, decay="cosine"))
        parts = work.next(run.workers)
        total = 0.0
        for i, part in enumerate(parts):
            loss = work.loss(part)
            loss.backward()
            total += loss.item() / len(parts)
            if i + 1 < len(parts):
                optimizer.next_worker()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        if not math.isfinite(total):
            break
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    is_finite = math.isfinite(losses[-1])
    found = work.evaluate() if is_finite else {}
    found = {key: value if math.isfinite(value) else None for key, value in found.items()}
    return {
        "task": task_name, **asdict(run), "lr": rate(run.lr), "adamw_lr": rate(run.adamw_lr), "lr_exponent": run.lr,
        "adamw_lr_exponent": run.adamw_lr, "method": method, "options": {**options, **run.options}, **task.fixed,
        "val_loss": None, **found, "train_loss_last_20": statistics.fmean(losses[-20:]) if is_finite else None,
        "train_losses": [round(loss, 4) if math.isfinite(loss) else None for loss in losses[::10]],
        "diverged_at": None if is_finite else len(losses), "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2),
    }  # fmt: skip


# --- which runs ----------------------------------------------------------------------------------------------------


def path_of(task: str, run: Run) -> Path:
    return FOLDERS[task] / "results" / f"{run.name}.json"


def result(task: str, run: Run) -> dict[str, Any] | None:
    path = path_of(task, run)
    return json.loads(path.read_text()) if path.exists() else None


def search(task: str, at: dict[int, Run], around: Any, first: list[int]) -> tuple[list[Run], int | None]:
    """The points still wanted, and the best exponent once it lies inside the grid."""
    wanted = list(first)
    while True:
        runs = {k: at.setdefault(k, around(k)) for k in wanted}
        found = {k: result(task, run) for k, run in runs.items()}
        missing = [runs[k] for k in wanted if found[k] is None]
        if missing:
            return missing, None
        loss = {k: found[k]["val_loss"] or math.inf for k in wanted}  # type: ignore[index]
        best = min(wanted, key=loss.__getitem__)
        if best == min(wanted):
            wanted.append(best - 1)
        elif best == max(wanted):
            wanted.append(best + 1)
        else:
            return [], best


def auxiliary_rate(task: str) -> tuple[list[Run], int | None]:
    """AdamW's rate for all runs, with Muon at the middle of its grid."""
    sizes = TASKS[task]

    def around(k: int) -> Run:
        return Run("aux-lr", "muon", VARIANTS["muon"][2], k, sizes.tuning_steps)

    return search(task, {}, around, list(sizes.aux_exponents))


def tuned(
    task: str, variant: str, options: dict[str, Any] | None = None, middle: int | None = None
) -> tuple[list[Run], int | None]:
    """A method's rate, at M = 1."""
    chosen = auxiliary_rate(task)[1]
    if chosen is None:
        return [], None
    middle = VARIANTS[variant][2] if middle is None else middle

    def around(k: int) -> Run:
        return Run("tune", variant, k, chosen, TASKS[task].tuning_steps, options=options or {})

    return search(task, {}, around, [middle + k for k in FIRST_POINTS])


def wanted(task: str, stages: list[str]) -> Iterator[Run]:
    """All runs whose rates are known, in the order of their weight."""
    sizes = TASKS[task]
    missing, aux = auxiliary_rate(task)
    yield from missing
    if aux is None:
        return
    best: dict[str, int] = {}
    for variant in VARIANTS:
        missing, k = tuned(task, variant)
        yield from missing
        if k is not None:
            best[variant] = k

    def runs(stage: str, variant: str, workers: int, seeds: Any = SEEDS, **options: Any) -> Iterator[Run]:
        if variant in best:
            for seed in seeds:
                yield Run(stage, variant, best[variant], aux, sizes.steps, workers, seed, options)

    if "cause" in stages and "signmuon" in best:
        for variant, offset, options in (
            ("signmuon", -1, {}), ("signmuon", -1, {"nesterov": True}), ("muon", 0, {"nesterov": False}),
            ("signmuon", -1, {"momentum": 0.9}), ("signmuon", 0, {"nesterov": True}), ("muon", -1, {}),
            ("signmuon", -2, {}), ("signmuon", -1, {"ties": "zero", "coefficients": "muon"}),
        ):  # fmt: skip
            yield Run("cause", variant, best[variant] + offset, aux, sizes.steps, 1, 0, options)
    if "main" in stages:
        for seeds in ((0,), (1, 2)):
            for workers in (1, 4):
                for variant in VARIANTS:
                    yield from runs("main", variant, workers, seeds)
    if "ties" in stages:
        for seeds in ((0,), (1, 2)):
            for workers in (4, 2):
                for ties in ("random", "owner", "zero"):
                    if workers != 4 or ties != "zero":
                        yield from runs("ties", "signmuon", workers, seeds, ties=ties)
    if "rule" in stages:
        for options in ({"nesterov": True}, {"momentum": 0.9}, {"momentum": 0.98}, {"scale": "fan_in"}):
            middle = best.get("signmuon", 0) + (2 if "scale" in options else 0)
            if "signmuon" in best:
                if "scale" in options:
                    missing, k = tuned(task, "signmuon", options, middle)
                    yield from missing
                else:
                    k = best["signmuon"]
                if k is not None:
                    yield Run("rule", "signmuon", k, aux, sizes.steps, 1, 0, options)
    if "aux" in stages and "signmuon" in best:
        for momentum in (0.95, 0.9, 0.99):
            options = {"aux": "vote", "aux_momentum": momentum}

            def around(k: int, options: Any = options) -> Run:
                return Run("tune-aux", "signmuon", best["signmuon"], k, sizes.tuning_steps, options=options)

            missing, k = search(task, {}, around, [aux - 1, aux, aux + 1])
            yield from missing
            if k is not None:
                for workers in (1, 4):
                    yield Run("aux", "signmuon", best["signmuon"], k, sizes.steps, workers, 0, options)
    if "check" in stages:
        for variant in ("signmuon", "muon", "signum", "adamw"):
            if variant in best:
                for k in (-1, 0, 1):
                    yield Run("check", variant, best[variant] + k, aux, sizes.steps)
    if "nesterov" in stages:  # suggested by the seeds of the GPT's main table, so not judged on them
        seeds = FRESH_SEEDS if task == "gpt" else SEEDS
        scales: list[dict[str, Any]] = [{}] if task == "gpt" else [{}, {"scale": "fan_in"}]
        for scale in scales:
            options = {"nesterov": True, **scale}
            missing, k = tuned(task, "signmuon", options, best.get("signmuon", 0) + 2 if scale else None)
            yield from missing
            if k is not None:
                for workers in (1, 4):
                    for seed in seeds:
                        yield Run("nesterov", "signmuon", k, aux, sizes.steps, workers, seed, options)
        for seed in FRESH_SEEDS if task == "gpt" else ():
            for workers in (1, 4):
                for variant in ("muon", "signmuon", "signum"):
                    yield from runs("nesterov", variant, workers, (seed,))
    if "weak" in stages:  # a worker's share of the batch stays what it is at M = 4
        for seed in SEEDS:
            for workers in (16, 1):
                for variant in ("signmuon", "muon", "signum")[: 3 if seed == 0 else 2]:
                    if variant in best:
                        size = sizes.batch_size // 4 * workers
                        yield Run("weak", variant, best[variant], aux, sizes.steps, workers, seed, batch_size=size)


def sweep(task: str, stages: list[str], data: str, jobs: int, seconds: float) -> None:
    """Run what is missing until nothing is, or no new run shall start."""
    FOLDERS[task].joinpath("results").mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    running: dict[Future[dict[str, Any]], Run] = {}
    with ProcessPoolExecutor(jobs) as pool:
        while True:
            names = {run.name for run in running.values()}
            todo = [r for r in wanted(task, stages) if r.name not in names and not path_of(task, r).exists()]
            is_free = not running or (len(running) < jobs and os.getloadavg()[0] < MAX_LOAD)
            if todo and is_free and time.monotonic() < end:
                run = todo[0]
                running[pool.submit(train, task, run, data)] = run
                continue
            if not running:
                return
            done, _ = wait(running, timeout=5, return_when=FIRST_COMPLETED)
            for future in done:
                run, found = running.pop(future), future.result()
                path_of(task, run).write_text(json.dumps(found, indent=1) + "\n")
                print(run.name, found["val_loss"], found.get("accuracy", ""), found["seconds"], flush=True)


# --- tables --------------------------------------------------------------------------------------------------------


def table(task: str) -> None:
    """Write table.json, and the tables between the marks in README.md."""
    folder = FOLDERS[task]
    records = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    metrics = ["val_loss", "accuracy"] if task == "cifar10" else ["val_loss"]
    order = {variant: i for i, variant in enumerate(VARIANTS)}
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in records:
        given = tuple(sorted((k, v) for k, v in r["options"].items() if k not in VARIANTS[r["variant"]][1]))
        key = (r["stage"], r["variant"], given, r["workers"], r["batch_size"], r["lr"], r["adamw_lr"], r["steps"])
        cells.setdefault(key, []).append(r)
    muon = {
        (r["steps"], r["workers"], r["batch_size"], r["seed"]): r
        for r in records
        if r["variant"] == "muon" and r["stage"] in ("main", "weak", "nesterov") and not r["options"]
    }
    rows = []
    for key in sorted(cells, key=lambda key: (key[0], order[key[1]], str(key[2]), *key[3:])):
        stage, variant, given, workers, batch_size, lr, adamw_lr, steps = key
        row = {
            "stage": stage, "method": variant, "options": ", ".join(f"{k}={v}" for k, v in given), "workers": workers,
            "batch_size": batch_size, "lr": lr, "adamw_lr": adamw_lr, "steps": steps, "seeds": len(cells[key]),
        }  # fmt: skip
        for metric in metrics:
            row |= summary(metric, cells[key], muon)
        row["cpu_seconds_median"] = round(statistics.median(r["cpu_seconds"] for r in cells[key]), 1)
        rows.append(row)
    (folder / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
    readme = folder / "README.md"
    before, rest = readme.read_text().split("<!-- table -->")
    after = rest.split("<!-- end -->")[1]
    readme.write_text(f"{before}<!-- table -->\n{markdown(rows, metrics)}<!-- end -->{after}")


def summary(metric: str, runs: list[dict[str, Any]], muon: dict[tuple[int, ...], dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread over seeds, and those of the paired differences to Muon; a run that diverged leaves no number."""
    values = [r[metric] for r in runs if r.get(metric) is not None]
    keys = [(r["steps"], r["workers"], r["batch_size"], r["seed"]) for r in runs]
    pairs = [(r[metric], muon[key].get(metric)) for r, key in zip(runs, keys, strict=True)
             if r.get(metric) is not None and key in muon]  # fmt: skip
    differences = [mine - theirs for mine, theirs in pairs if theirs is not None]
    row: dict[str, Any] = {}
    for name, numbers in ((metric, values if len(values) == len(runs) else []), (f"{metric}_minus_muon", differences)):
        row[f"{name}_mean"] = round(statistics.fmean(numbers), 4) if numbers else None
        row[f"{name}_sd"] = round(statistics.stdev(numbers), 4) if len(numbers) > 1 else None
    if metric == "val_loss":
        relative = [100 * (mine / theirs - 1) for mine, theirs in pairs if theirs is not None]
        row["percent_over_muon"] = round(statistics.fmean(relative), 2) if relative else None
    return row


def plus_minus(row: dict[str, Any], name: str, digits: int, *, sign: bool = False) -> str:
    mean, sd = row.get(f"{name}_mean"), row.get(f"{name}_sd")
    if mean is None:
        return "diverged" if not sign else ""
    return f"{mean:{'+' if sign else ''}.{digits}f}" + (f" ± {sd:.{digits}f}" if sd is not None else "")


def markdown(rows: list[dict[str, Any]], metrics: list[str]) -> str:
    """All tables: the methods side by side, everything else one row per setting, and the search for rates."""
    names = {"val_loss": "loss", "accuracy": "accuracy, %"}
    text = ""
    titles = {
        "main": "Methods", "cause": "Why Sign-Muon is behind: probes, one seed", "ties": "Ties",
        "rule": "Details of Sign-Muon's rule", "aux": "A vote on all other parameters",
        "nesterov": "With Nesterov, its rate tuned", "weak": "Weak scaling: a worker's share stays",
        "check": "Rates again at full length",
    }  # fmt: skip
    for stage, title in titles.items():
        chosen = [row for row in rows if row["stage"] == stage]
        if not chosen:
            continue
        head = ["method", "M", "lr", "seeds"]
        for metric in metrics:
            head += [names[metric], "against Muon, paired"] + (["%"] if metric == "val_loss" else [])
        text += f"\n{title}:\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
        for row in sorted(chosen, key=lambda row: row["workers"]):
            label = row["method"] + (f", {row['options']}" if row["options"] else "")
            label += f", AdamW's lr {row['adamw_lr']:g}" if stage == "aux" else ""
            label += f", batch {row['batch_size']}" if stage == "weak" else ""
            line = [label, str(row["workers"]), f"{row['lr']:g}", str(row["seeds"])]
            for metric in metrics:
                digits = 3 if metric == "val_loss" else 1
                line += [plus_minus(row, metric, digits), plus_minus(row, f"{metric}_minus_muon", digits, sign=True)]
                if metric == "val_loss":
                    percent = row["percent_over_muon"]
                    line.append("" if percent is None else f"{percent:+.1f}")
            text += f"| {' | '.join(line)} |\n"
    for stage, column in (("aux-lr", "adamw_lr"), ("tune", "lr"), ("tune-aux", "adamw_lr")):
        chosen = [row for row in rows if row["stage"] == stage]
        if not chosen:
            continue
        rates = sorted({row[column] for row in chosen})
        title = {"aux-lr": "AdamW's rate, with Muon", "tune": "Each method's rate", "tune-aux": "Rate of the vote"}[
            stage
        ]
        text += f"\n{title} (loss of one run, the best in bold):\n\n| | {' | '.join(f'{r:g}' for r in rates)} |\n"
        text += f"|{'---|' * (len(rates) + 1)}\n"
        labels = dict.fromkeys((row["method"], row["options"]) for row in chosen)
        for label in labels:
            losses = {row[column]: row["val_loss_mean"] for row in chosen if (row["method"], row["options"]) == label}
            best = min((loss for loss in losses.values() if loss is not None), default=None)
            line = [_cell(losses, r, best) for r in rates]
            text += f"| {', '.join(filter(None, label))} | {' | '.join(line)} |\n"
    return text


def _cell(losses: dict[float, float | None], at: float, best: float | None) -> str:
    if at not in losses:
        return ""
    loss = losses[at]
    shown = "diverged" if loss is None else f"{loss:.3f}"
    return f"**{shown}**" if loss is not None and loss == best else shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data", default="shared/data", help="folder of peps and cifar10")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--stages", default="main,cause,ties,nesterov,rule,aux,check,weak")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run later than this")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if not given.table:
        sweep(given.task, given.stages.split(","), given.data, given.jobs, given.seconds)
    table(given.task)


if __name__ == "__main__":
    main()
