"""Whole runs of several replicas through the command: all layouts compute the same, and every worker is restored."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.test_runs import command, environment, lines, tensors, text, train

__all__ = ["text"]
TWO_STAGES = [
    "tiny-mapl", "--pipeline.stages", "2", "--pipeline.microbatches", "2", "--train.batch-size", "8",
    "--codec.factor", "0", "--codec.rank", "4", "--train.steps", "4", "--train.checkpoint-every", "2",
    "--train.eval-every", "2", "--optim.method", "signmuon", "--optim.lr", "0.002", "--optim.adamw-ratio", "5",
    "--optim.frame-ratio", "1", "--dp.ties", "random",
]  # fmt: skip
TWO_BY_TWO = [*TWO_STAGES, "--dp.replicas", "2"]


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Two stages x two replicas, four steps, checkpoints after two and four."""
    folder = tmp_path_factory.mktemp("replicas")
    done = train(folder, text, *TWO_BY_TWO, "--name", "square", "--dp.link", "100mbit,1ms", "--dp.transport", "auto")
    assert done.returncode == 0, done.stderr
    assert "<- this run" in done.stderr and "a step's exchange took" in done.stderr
    return folder / "square"


def test_replicas_are_accounted_for(square: Path) -> None:
    summary = json.loads((square / "summary.json").read_text())
    steps = lines(square / "metrics.jsonl")
    assert all(step["wire_bytes_dp"] > 0 and step["exchange_s"] > 0 for step in steps)
    assert summary["compression_factor_dp"] > 2 and summary["predicted_exchange_s"] > 0
    assert summary["bytes_per_step_worker_dp"] == summary["bytes_per_step_dp"] / 4 and summary["break_even_bps"] > 0
    assert [stage["stage"] for stage in summary["stages"]] == [0, 1]
    saved = tensors(square / "checkpoints" / "step-00000004")
    momenta = [
        [value for name, value in sorted(saved.items()) if name.startswith(f"worker/{worker}/")] for worker in (0, 1)
    ]
    assert momenta[0] and len(momenta[0]) == len(momenta[1])
    assert not all(torch.equal(a, b) for a, b in zip(*momenta, strict=True))


@pytest.mark.parametrize("layout", [["--dp.emulate"], ["--dp.emulate", "--pipeline.emulate"]], ids=["P=2", "twin"])
def test_fewer_processes_compute_the_same_run_bit_for_bit(
    square: Path, text: Path, tmp_path: Path, layout: list[str]
) -> None:
    done = train(tmp_path, text, *TWO_BY_TWO, "--name", "other", *layout)
    assert done.returncode == 0, done.stderr
    ours, theirs = (tensors(run / "checkpoints" / "step-00000004") for run in (square, tmp_path / "other"))
    assert {n for n in ours if not n.startswith("rng/")} == {n for n in theirs if not n.startswith("rng/")}
    assert [n for n in theirs if not n.startswith("rng/") and not torch.equal(ours[n], theirs[n])] == []


def test_a_resumed_run_continues_every_worker(square: Path, text: Path, tmp_path: Path) -> None:
    again = tmp_path / "square"
    shutil.copytree(square, again)
    shutil.rmtree(again / "checkpoints" / "step-00000004")
    done = train(tmp_path, text, *TWO_BY_TWO, "--name", "square", "--resume")
    assert done.returncode == 0, done.stderr
    old, new = (tensors(run / "checkpoints" / "step-00000004") for run in (square, again))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)


def test_another_number_of_replicas_starts_with_the_mean_and_says_so(square: Path, text: Path, tmp_path: Path) -> None:
    again = tmp_path / "square"
    shutil.copytree(square, again)
    shutil.rmtree(again / "checkpoints" / "step-00000004")
    done = train(tmp_path, text, *TWO_STAGES, "--name", "square", "--resume", "--dp.replicas", "1", "--dp.link", "none")
    assert done.returncode == 0, done.stderr
    assert "checkpoint of 2 replicas, now 1" in done.stderr and "mean" in done.stderr


def test_a_killed_replica_is_named(text: Path, tmp_path: Path) -> None:
    words = [*TWO_BY_TWO, "--name", "killed", "--train.steps", "4000", "--train.eval-every", "0"]
    run = subprocess.Popen(
        command(tmp_path, text, *words), env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    metrics = tmp_path / "killed" / "metrics.jsonl"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (metrics.is_file() and len(metrics.read_bytes()) > 1000):
        time.sleep(0.1)
    processes = json.loads((tmp_path / "killed" / "processes.json").read_text())
    victim = next(p for p in processes if p["rank"] == 3)
    began = time.monotonic()
    subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(victim["pid"])], check=True)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 3 and time.monotonic() - began < 20
    assert "rank 3 (stages [1] of replica 1) was killed by SIGKILL" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dp.replicas", "3"], "for 3 replicas"),
        (["--dp.transport", "pigeon"], "pigeon"),
        (["--optim.scale", "rms", "--optim.method", "muon"], "optim.scale, which has no effect"),
        (["--dp.replicas", "1", "--dp.link", "1mbit"], "dp.link, which has no effect"),
        (["--dp.link", "fast"], "fast"),
    ],
)
def test_bad_settings_end_before_anything_starts(text: Path, tmp_path: Path, words: list[str], said: str) -> None:
    done = train(tmp_path, text, *TWO_BY_TWO, "--name", "bad", *words)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not (tmp_path / "bad").exists()


def test_a_gpt_votes_too(text: Path, tmp_path: Path) -> None:
    words = ["tiny-gpt", "--name", "gpt", "--dp.emulate", "--train.steps", "3", "--pipeline.microbatches", "1"]
    done = train(tmp_path, text, *words)
    assert done.returncode == 0, done.stderr
    assert "wqkv.weight" in done.stderr and "| signmuon (3 matrices)" in done.stderr and "| muon" not in done.stderr
    wrong = train(tmp_path, text, *words, "--name", "wrong", "--model.ffn-dim", "64")
    assert wrong.returncode == 2 and "model.ffn_dim=64 of a GPT" in wrong.stderr


def test_replicas_that_were_emulated_go_on_as_processes(text: Path, tmp_path: Path) -> None:
    words = ["tiny-gpt", "--name", "gpt", "--pipeline.microbatches", "1"]
    assert train(tmp_path, text, *words, "--dp.emulate", "--train.steps", "2").returncode == 0
    done = train(tmp_path, text, *words, "--resume", "--dp.no-emulate", "--train.steps", "3")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "gpt" / "summary.json").read_text())
    assert summary["bytes_per_step_worker_dp"] * 2 == summary["bytes_per_step_dp"] > 0  # of the last step alone
