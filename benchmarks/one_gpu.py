"""ResNet-50 on CIFAR-10 and a nanoGPT on text, with Sign-Muon and with Muon, in eight minutes on one GPU.

python benchmarks/one_gpu.py FOLDER --cifar10 PATH --text PATH [--minutes 8] [--workers 4]

Each of the four runs gets an equal share of the time: a few steps are timed, and the number of steps that fits decides
the cosine schedule. M virtual workers share the batch. Writes results.json, table.json, command.txt and
environment.json into FOLDER. `--small` shrinks both models, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thinwire
from thinwire.data import ImageBatches, evaluation_batches, load_cifar10, prepare, validation_windows
from thinwire.models.gpt import gpt
from thinwire.models.resnet import ResNet, ResNetConfig
from thinwire.optim import METHODS, DataParallel, lr_factor, set_lr

TIMED_STEPS, WARM_STEPS = 12, 4
# lr of hidden matrices and of AdamW on the rest; Sign-Muon's are those of its paper (1e-3), Muon's its authors'
RATES = {"signmuon": (1e-3, 3e-3), "muon": (2e-2, 3e-3)}


@dataclass
class Task:
    """A model with its batches: `next` gives one batch per worker, `loss` is of one of them."""

    name: str
    model: nn.Module
    next: Callable[[], Sequence[Any]]
    loss: Callable[[Any], Tensor]
    evaluate: Callable[[], dict[str, float]]


def text_task(arguments: argparse.Namespace, device: torch.device) -> Task:
    size, length, batch = ("tiny", 128, 16) if arguments.small else ("10m", 256, 64)
    data = prepare(arguments.text, 512 if arguments.small else 8192)
    model = gpt(size, vocab_size=512 if arguments.small else 8192, max_seq_len=length)
    batches = data.batches(length, batch, arguments.seed)
    windows = validation_windows(data.validation, length, 1 << (13 if arguments.small else 17))

    def loss(ids: Tensor) -> Tensor:
        ids = ids.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def evaluate() -> dict[str, float]:
        return {"val_loss": fmean(float(loss(part)) for part in windows.split(batch))}

    return Task("gpt", model, lambda: batches.next().chunk(arguments.workers), loss, evaluate)


def image_task(arguments: argparse.Namespace, device: torch.device) -> Task:
    depth, width, batch = (18, 8, 64) if arguments.small else (50, 64, 512)
    train, test = load_cifar10(arguments.cifar10)
    model = ResNet(ResNetConfig(depth=depth, width=width))
    batches = ImageBatches(train, batch, arguments.seed)

    def logits(pixels: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            found: Tensor = model(pixels.to(device, memory_format=torch.channels_last))
        return found.float()

    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(logits(part[0]), part[1].to(device))

    def evaluate() -> dict[str, float]:
        model.eval()
        hits = [(logits(x).argmax(1).cpu() == y).float().mean() for x, y in evaluation_batches(test, 500)]
        model.train()
        return {"accuracy": 100 * float(torch.stack(hits).mean())}

    def following() -> list[tuple[Tensor, Tensor]]:
        return list(zip(*(t.chunk(arguments.workers) for t in batches.next()), strict=True))

    return Task("resnet18" if arguments.small else "resnet50", model, following, loss, evaluate)


def take_step(task: Task, optimizer: DataParallel, parts: Sequence[Any]) -> float:
    total = 0.0
    for i, part in enumerate(parts):
        loss = task.loss(part)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item() / len(parts)
        if i + 1 < len(parts):
            optimizer.next_worker()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def run(
    task: Task, method: str, arguments: argparse.Namespace, device: torch.device, budget_s: float
) -> dict[str, Any]:
    """Train for `budget_s` seconds, evaluation not counted."""
    task.model.init_weights(arguments.seed)  # type: ignore[operator]
    task.model.to(device)
    lr, adamw_lr = RATES[method]
    groups = thinwire.param_groups(task.model, lr=lr, adamw_lr=adamw_lr)
    optimizer = METHODS[method](groups, virtual_workers=arguments.workers, ties="random", seed=arguments.seed)
    began = time.perf_counter()
    marks, losses, steps = [began], [], 10**9
    while len(losses) < steps:
        warmup = 200 if steps == 10**9 else max(1, steps // 20)
        set_lr([optimizer], lr_factor(len(losses), steps, warmup=warmup, decay="cosine"))
        losses.append(take_step(task, optimizer, task.next()))
        marks.append(time.perf_counter())
        if len(losses) == TIMED_STEPS:
            per_step = (marks[-1] - marks[WARM_STEPS]) / (TIMED_STEPS - WARM_STEPS)
            steps = TIMED_STEPS + max(1, int((budget_s - (marks[-1] - began)) / per_step))
    with torch.no_grad():
        found = task.evaluate()
    return {
        "task": task.name, "method": method, "workers": arguments.workers, "seed": arguments.seed, "lr": lr,
        "adamw_lr": adamw_lr, "params": sum(p.numel() for p in task.model.parameters()), "steps": steps,
        "step_s": (marks[-1] - marks[WARM_STEPS]) / (len(losses) - WARM_STEPS), "train_loss": fmean(losses[-20:]),
        **found, "losses": losses,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cifar10", required=True, help="folder or archive of CIFAR-10")
    parser.add_argument("--text", required=True, help="text as for thinwire train --data.source")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "command.txt").write_text(shlex.join(["python", *sys.argv]) + "\n")
    results = []
    for make in (text_task, image_task):
        for method in RATES:
            results.append(run(make(arguments, device), method, arguments, device, 60 * arguments.minutes / 4))
            (arguments.folder / "results.json").write_text(json.dumps(results))
            table = [{key: value for key, value in row.items() if key != "losses"} for row in results]
            (arguments.folder / "table.json").write_text(json.dumps(table, indent=2))
            print(table[-1], flush=True)
    subprocess.run([sys.executable, Path(__file__).with_name("environment.py"), arguments.folder], check=True)


if __name__ == "__main__":
    main()
