"""What docs/replicas.md shows runs, in several processes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from tests.distributed.harness import run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "replicas.md").read_text()
SINGLE, SCRIPT, VOTE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def _run(snippet: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(snippet, "docs/replicas.md", "exec"), {})
    return said.getvalue()


def _votes(rank: int) -> str:
    _run(SINGLE)
    return _run(VOTE)


def test_votes_are_what_the_comments_say() -> None:
    said = run_ranks(3, _votes)
    plain, owned, drawn = said[0].splitlines()
    assert said[1] == said[2] == said[0] and plain == "[1, -1, 0, 0]"
    assert all(line in ("[1, -1, 0, 1]", "[1, -1, 0, -1]") for line in (owned, drawn))


def test_a_script_of_ones_own_resumes_every_worker_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for words in ([], ["checkpoints/2"], ["checkpoints/2"]):
        if (tmp_path / "checkpoints" / "4").exists():
            launch[launch.index("2")] = "3"  # another number of workers: checked below only for going on
            shutil.move(tmp_path / "checkpoints" / "4", tmp_path / "resumed")
        done = subprocess.run(
            [*launch, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        if not words:
            shutil.move(tmp_path / "checkpoints" / "4", tmp_path / "uninterrupted")
    whole, resumed = (tmp_path / "uninterrupted", tmp_path / "resumed")
    workers = ("worker-0000.pt", "worker-0001.pt")
    states = [torch.load(whole / name)["state"] for name in workers]
    torch.testing.assert_close(torch.load(resumed / "model.pt"), torch.load(whole / "model.pt"), rtol=0, atol=0)
    torch.testing.assert_close([torch.load(resumed / name)["state"] for name in workers], states, rtol=0, atol=0)
    own = [[value for slot in state.values() if "feedback" in slot for value in slot.values()] for state in states]
    assert own[0] and not any(map(torch.equal, *own)), "momentum and feedback are each worker's own"
