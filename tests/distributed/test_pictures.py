"""Classification of pictures through the command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.test_runs import environment, lines, tensors
from tests.reference.cifar_files import encoded, pictures, write_parquet

SMALL = [
    "tiny-resnet", "--model.width", "4", "--train.batch-size", "8", "--train.steps", "4", "--data.val-tokens", "12",
    "--train.checkpoint-every", "2", "--train.eval-every", "2", "--optim.warmup-steps", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cifar")
    for part, number in (("train", 20), ("test", 12)):
        made = pictures(number, seed=number)
        write_parquet(folder / f"{part}.parquet", [encoded(one) for one in made], [i % 10 for i in range(number)])
    return folder


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "thinwire", *words], env=environment(folder), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return command(folder, "train", *SMALL, "--folder", str(folder), *words)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cifar: Path) -> Path:
    """Two replicas in processes of their own."""
    folder = tmp_path_factory.mktemp("pictures")
    done = train(folder, "--name", "run", "--data.source", str(cifar))
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_accuracy_is_measured(run: Path) -> None:
    (first, last) = lines(run / "evals.jsonl")
    assert 0 <= last["val_accuracy"] <= 100 and first["step"] == 2
    done = command(run.parent, "eval", str(run))
    assert done.returncode == 0 and f"val_accuracy {last['val_accuracy']:.4f}" in done.stdout, done.stdout + done.stderr
    assert f"val_loss {last['val_loss']:.4f}" in done.stdout, "evaluated with other running statistics than were saved"


def test_emulated_replicas_are_the_same_run(run: Path, cifar: Path, tmp_path: Path) -> None:
    done = train(tmp_path, "--name", "twin", "--data.source", str(cifar), "--dp.emulate")
    assert done.returncode == 0, done.stderr
    assert "pictures/s" in done.stderr and "token" not in done.stderr
    old, new = (tensors(one / "checkpoints" / "step-00000004") for one in (run, tmp_path / "twin"))
    names = [name for name in old if name.startswith("model/")]
    assert any("running_mean" in name for name in names)
    assert [name for name in names if not torch.equal(old[name], new[name])] == []
    losses = [[line["val_loss"] for line in lines(one / "evals.jsonl")] for one in (run, tmp_path / "twin")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6), "replicas evaluate with the first one's statistics"


def test_a_resumed_run_sees_the_same_pictures(run: Path, cifar: Path, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "step-00000004")
    done = train(tmp_path, "--name", "run", "--data.source", str(cifar), "--resume")
    assert done.returncode == 0, done.stderr
    old, new = (tensors(one / "checkpoints" / "step-00000004") for one in (run, again))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "data.source=stdlib for a resnet18"),
        (["--pipeline.stages", "2", "--pipeline.microbatches", "2"], "2 stages of a resnet18"),
        (["--model.width", "0"], "width=0"),
        (["--model.seq-len", "64"], "model.seq_len, which has no effect with resnet18"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, words: list[str], said: str) -> None:
    done = train(tmp_path, "--name", "bad", *words)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_pictures_are_not_generated(run: Path) -> None:
    done = command(run.parent, "generate", str(run), "once")
    assert done.returncode == 2 and "a resnet18" in done.stderr
