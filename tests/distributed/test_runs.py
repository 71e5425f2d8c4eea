"""Whole runs through the command, in real processes: files, resume, faults, launchers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

SMALL = [
    "--model.dim", "32", "--model.num-layers", "4", "--model.num-heads", "2", "--model.seq-len", "16",
    "--model.vocab-size", "300", "--train.batch-size", "4", "--pipeline.microbatches", "4", "--data.val-tokens", "128",
    "--optim.warmup-steps", "2",
]  # fmt: skip
METRICS = {
    "step", "tokens", "loss", "lr", "step_s", "tokens_per_s", "wire_bytes_fwd", "wire_bytes_bwd", "wire_bytes_dp",
    "wire_bytes_sync", "orthogonality_error", "forward_s", "backward_s", "link_wait_s", "optimizer_s", "sync_s",
}  # fmt: skip
SUMMARY = {
    "val_loss", "val_bits_per_byte", "params", "bytes_per_token_fwd", "bytes_per_token_bwd", "compression_factor_fwd",
    "compression_factor_bwd", "compression_factor_dp", "median_step_s", "predicted_step_s", "link", "versions",
    "commit", "command", "seed",
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = [f"word{i % 97} and {i * i % 89};" for i in range(6000)]
    (folder / "a.txt").write_text("\n".join(words))
    return folder / "a.txt"


def command(folder: Path, text: Path, *words: str) -> list[str]:
    place = ["--folder", str(folder), "--data.source", str(text)]
    return [sys.executable, "-m", "thinwire", "train", *words[:1], *SMALL, *place, *words[1:]]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "THINWIRE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}


def train(folder: Path, text: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, text, *words), env=environment(folder), capture_output=True, text=True, timeout=120, check=False
    )


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(str(path), "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Two stages, six steps with MAPL over an emulated link; checkpoints after three and six."""
    folder = tmp_path_factory.mktemp("runs")
    done = train(
        folder, text, "tiny-mapl", "--name", "whole", "--pipeline.stages", "2", "--train.steps", "6",
        "--train.checkpoint-every", "3", "--train.eval-every", "3", "--pipeline.link", "100mbit,1ms",
        "--codec.factor", "0", "--codec.rank", "4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "whole"


def test_a_run_writes_what_the_contract_says(finished: Path) -> None:
    steps = lines(finished / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(set(step) >= METRICS for step in steps)
    summary = json.loads((finished / "summary.json").read_text())
    assert set(summary) >= SUMMARY
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert 0 < summary["orthogonality_error"] < 1e-5
    assert summary["bytes_per_token_fwd"] == summary["bytes_per_token_bwd"]
    assert [stage["stage"] for stage in summary["stages"]] == [0, 1]
    assert [line["step"] for line in lines(finished / "evals.jsonl")] == [3, 6]
    assert list(finished.glob("events.out.tfevents*"))
    assert json.loads((finished / "config.json").read_text())["codec"]["rank"] == 4


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(finished: Path, text: Path, tmp_path: Path) -> None:
    again = tmp_path / "whole"
    shutil.copytree(finished, again)
    shutil.rmtree(again / "checkpoints" / "step-00000006")
    with (again / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # killed while writing
    done = train(
        tmp_path, text, "tiny-mapl", "--name", "whole", "--resume",  # the rest as in its config.json
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    old, new = (tensors(run / "checkpoints" / "step-00000006") for run in (finished, again))
    assert old.keys() == new.keys()
    assert any(name.startswith("optim/outbound.0.frame_DK") for name in old)
    assert all(torch.equal(old[name], new[name]) for name in old)
    before, after = lines(finished / "metrics.jsonl"), lines(again / "metrics.jsonl")
    assert [s["step"] for s in after] == [1, 2, 3, 4, 5, 6]
    assert [s["loss"] for s in before] == [s["loss"] for s in after]


def test_the_twin_computes_the_same_run(finished: Path, text: Path, tmp_path: Path) -> None:
    done = train(
        tmp_path, text, "tiny-mapl", "--name", "twin", "--pipeline.stages", "2", "--train.steps", "6",
        "--pipeline.emulate", "--codec.factor", "0", "--codec.rank", "4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for real, twin in zip(lines(finished / "metrics.jsonl"), lines(tmp_path / "twin" / "metrics.jsonl"), strict=True):
        assert twin["loss"] == pytest.approx(real["loss"], rel=1e-5)
        for key in ("wire_bytes_fwd", "wire_bytes_bwd", "wire_bytes_sync"):
            assert twin[key] == real[key]


def test_a_checkpoint_of_another_configuration_is_refused(finished: Path, text: Path) -> None:
    before = sorted(finished.rglob("*"))
    done = train(
        finished.parent,
        text,
        "tiny-mapl",
        "--name",
        "whole",
        "--pipeline.stages",
        "4",
        "--train.steps",
        "9",
        "--codec.factor",
        "0",
        "--codec.rank",
        "4",
        "--resume",
    )
    assert done.returncode == 2
    assert "another configuration" in done.stderr and "pipeline.stages 2 (now 4)" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(finished.rglob("*")) == before


def test_torchrun_joins_the_same_run(text: Path, tmp_path: Path) -> None:
    words = command(
        tmp_path, text, "tiny", "--name", "joined", "--pipeline.stages", "2", "--train.steps", "2",
    )  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words[1:]]
    done = subprocess.run(torchrun, env=environment(tmp_path), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(lines(tmp_path / "joined" / "metrics.jsonl")) == 2


def test_a_launcher_with_the_wrong_number_of_processes_is_told(text: Path, tmp_path: Path) -> None:
    environ = {**environment(tmp_path), "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    words = command(tmp_path, text, "tiny", "--name", "wrong", "--pipeline.stages", "2")
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "3 processes for 2 stages" in done.stderr
    assert not (tmp_path / "wrong").exists()


def start_ranks(folder: Path, commands: list[list[str]]) -> list[subprocess.Popen[str]]:
    """Start one process per command as a launcher on several machines would."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            words, env={**environment(folder), **place, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank, words in enumerate(commands)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout_s: float) -> list[str]:
    """Standard errors of all processes; none is left behind."""
    try:
        return [process.communicate(timeout=timeout_s)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_ranks_that_disagree_are_told_before_anything_is_exchanged(text: Path, tmp_path: Path) -> None:
    base = ["tiny-mapl", "--name", "apart", "--pipeline.stages", "2", "--codec.factor", "0"]
    processes = start_ranks(tmp_path, [command(tmp_path, text, *base, "--codec.rank", rank) for rank in ("4", "5")])
    errors = finish(processes, 60)
    assert [process.returncode for process in processes] == [2, 2]
    assert all("configuration of rank 1" in error for error in errors)
    assert not (tmp_path / "apart").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killing_the_launcher_ends_its_processes(text: Path, tmp_path: Path) -> None:
    words = command(
        tmp_path, text, "tiny", "--name", "orphans", "--pipeline.stages", "2", "--train.steps", "100000",
        "--train.checkpoint-every", "5", "--train.eval-every", "0",
    )  # fmt: skip
    process = subprocess.Popen(words, env=environment(tmp_path), stderr=subprocess.DEVNULL)
    _worker_of(tmp_path / "orphans", rank=0)
    workers = [row["pid"] for row in json.loads((tmp_path / "orphans" / "processes.json").read_text())]
    process.kill()
    process.wait()
    until = time.monotonic() + 10
    while any(_alive(pid) for pid in workers):
        assert time.monotonic() < until, "processes went on without their launcher"
        time.sleep(0.1)


def test_a_fault_inside_a_process_is_one_line(text: Path, tmp_path: Path) -> None:
    done = train(
        tmp_path, text, "tiny", "--name", "huge", "--pipeline.stages", "2", "--train.steps", "30",
        "--optim.lr", "1e30",
    )  # fmt: skip
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "10 steps in a row" in last and "lower optim.lr" in last
    assert sum("steps in a row" in line for line in done.stderr.splitlines()) == 1


def test_a_rank_whose_peer_dies_names_stage_peer_and_microbatch(text: Path, tmp_path: Path) -> None:
    words = command(
        tmp_path, text, "tiny", "--name", "lost", "--pipeline.stages", "2", "--train.steps", "100000",
        "--train.checkpoint-every", "5", "--train.eval-every", "0",
    )  # fmt: skip
    processes = start_ranks(tmp_path, [words, words])
    os.kill(_worker_of(tmp_path / "lost", rank=1), signal.SIGKILL)
    began = time.monotonic()
    errors = finish(processes, 30)
    assert time.monotonic() - began < 10
    assert processes[0].returncode == 3
    last = errors[0].strip().splitlines()[-1]
    assert "rank 0 (stages [0]) lost a peer at step" in last, last


def test_the_schedule_keeps_no_more_microbatches_than_it_must(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert [stage["max_in_flight"] for stage in summary["stages"]] == [2, 1]  # 1F1B: stages left to come
    model = 4 * (300 * 32 + 2 * (2 * 32 + 4 * 32 * 32 + 3 * 32 * 96))  # embedding and two layers
    ends = 4 * (32 * 4 + 300 * 16 + 16 * 32)  # frame, anchors, their basis
    assert summary["stages"][0]["held_bytes"] == model + ends


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killing_a_rank_ends_the_run_within_seconds_and_names_it(text: Path, tmp_path: Path) -> None:
    words = command(
        tmp_path, text, "tiny", "--name", "killed", "--pipeline.stages", "4", "--train.steps", "100000",
        "--train.checkpoint-every", "5", "--train.eval-every", "0",
    )  # fmt: skip
    process = subprocess.Popen(words, env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    try:
        victim = _worker_of(tmp_path / "killed", rank=2)
        workers = [row["pid"] for row in json.loads((tmp_path / "killed" / "processes.json").read_text())]
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
        took = time.monotonic() - began
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 3
    last = errors.strip().splitlines()[-1]
    assert "rank 2 (stages [2])" in last and "SIGKILL" in last and "--resume" in last
    assert took < 10
    assert (tmp_path / "killed" / "checkpoints").is_dir()
    time.sleep(1.5)
    assert not [pid for pid in workers if _alive(pid)]


def _worker_of(run: Path, rank: int) -> int:
    """The process of a rank, once the run has saved its first checkpoint."""
    until = time.monotonic() + 60
    while not list(run.glob("checkpoints/step-*")):
        assert time.monotonic() < until, "the run did not start"
        time.sleep(0.1)
    return next(row["pid"] for row in json.loads((run / "processes.json").read_text()) if row["rank"] == rank)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
