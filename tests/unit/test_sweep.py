"""Sweeps: which runs, resumed and failed ones, the table. Training itself is played by a function here."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.cli import main, parse_config
from thinwire.errors import ConfigError, ThinwireError
from thinwire.report.sweeps import sweep_table
from thinwire.sweep import Job, jobs, sweep
from thinwire.train import recipes

CODECS = ["fixed,rank=192,anchor_rank=16", "cut,anchor_rank=16", "mapl,anchor_rank=16,wire_format=int4"]
LOSS = {"fixed": 2.5, "cut": 3.0, "mapl": 2.6}


class Trainer:
    """Stands for `thinwire train`: writes what a run leaves; fails where the codec's name is among `failing`."""

    def __init__(self, failing: tuple[str, ...] = (), code: int = 3) -> None:
        self.failing, self.code, self.commands, self.lock = failing, code, 0, threading.Lock()

    def __call__(self, command: list[str], stdout: Any, **_: Any) -> SimpleNamespace:
        self.commands += 1
        words = command[command.index("train") + 1 :]
        with self.lock:  # tyro's cache is not made for threads
            config = parse_config(recipes.get(words[0]), words[1:])
        codec = config.codec
        if codec.name in self.failing:
            stdout.write("much\nthinwire: the loss is not finite\n")
            return SimpleNamespace(returncode=self.code)
        run = Path(config.folder) / config.name
        (run / "checkpoints").mkdir(parents=True)
        parts = {"pipeline": {"stages": 4}, "codec": {"name": codec.name, "anchor_rank": codec.anchor_rank}}
        summary = {
            "val_loss": LOSS[codec.name] + 0.1 * config.train.seed,
            "compression_factor_fwd": 0.98 if codec.name == "fixed" else 8.1,
            "bytes_per_token_fwd": 10.0,
        }
        (run / "config.json").write_text(json.dumps(parts))
        (run / "summary.json").write_text(json.dumps(summary))
        return SimpleNamespace(returncode=0)


def played(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Trainer:
    trainer = Trainer(**options)
    monkeypatch.setattr(subprocess, "run", trainer)
    return trainer


def test_every_method_runs_with_one_seed_before_any_with_the_next() -> None:
    made = jobs(["tiny"], ["identity", "mapl,anchor_rank=16"], [4, 8], [1, 2], ["--train.steps", "5"])
    assert [(job.codec[:4], job.factor, job.seed) for job in made] == [
        ("iden", 0.0, 1), ("mapl", 4, 1), ("mapl", 8, 1), ("iden", 0.0, 2), ("mapl", 4, 2), ("mapl", 8, 2),
    ]  # fmt: skip
    assert len({job.name for job in made}) == len(made)


@pytest.mark.parametrize("codec", ["identity", "cut,anchor_rank=4", "fixed,rank=24", "mapl,wire_format=int4-clip"])
def test_words_are_flags_that_train_knows(codec: str) -> None:
    job = Job("tiny", codec, 4.0 if codec.startswith("mapl") else 0.0, 7, ("--train.steps", "5"))
    config = parse_config(recipes.get("tiny"), job.words[1:])
    assert config.codec.name == codec.split(",")[0] and config.pipeline.emulate
    assert (config.train.seed, config.train.steps) == (7, 5)
    if config.codec.name == "fixed":
        assert (config.codec.rank, config.codec.factor) == (24, 0)
    if config.codec.name == "mapl":
        assert (config.codec.rank, config.codec.factor, config.codec.wire_format) == (0, 4, "int4-clip")


def test_the_table_compares_with_runs_of_the_same_anchors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch)
    rows = sweep(jobs(["tiny"], CODECS, [8], [1, 3]), tmp_path, parallel=2, say=lambda _: None)
    whole, cut, mapl = rows
    assert json.loads((tmp_path / "table.json").read_text()) == rows
    assert whole["degradation_percent"] == 0 and whole["wire_value_kept"] == 1 and cut["wire_value_kept"] == 0
    assert mapl["wire_value_kept"] == pytest.approx(0.8) and mapl["val_loss_mean"] == pytest.approx(2.8)
    assert mapl["val_loss_sd"] == pytest.approx(0.2 / 2**0.5) and mapl["seeds"] == 2
    assert mapl["degradation_percent"] == pytest.approx(50 * (2.7 / 2.6 + 2.9 / 2.8) - 100)
    assert sweep_table(rows).row_count == 3
    assert not list(tmp_path.glob("runs/*/checkpoints"))


def test_a_second_call_runs_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = played(monkeypatch, failing=("mapl",))
    todo = jobs(["tiny"], CODECS, [8], [1, 2])
    with pytest.raises(ThinwireError, match=r"mapl.*not finite.*mapl") as told:
        sweep(todo, tmp_path, say=lambda _: None)
    assert not isinstance(told.value, ConfigError) and len(json.loads((tmp_path / "table.json").read_text())) == 2
    trainer = played(monkeypatch)
    assert len(sweep(todo, tmp_path, say=lambda _: None)) == 3
    assert trainer.commands == 2


def test_results_of_other_flags_are_not_taken_for_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch)
    sweep(jobs(["tiny"], CODECS, [8], [1]), tmp_path, say=lambda _: None)
    with pytest.raises(ConfigError, match="choose another --folder"):
        sweep(jobs(["tiny"], CODECS, [8], [1], ["--train.steps", "5"]), tmp_path, say=lambda _: None)


def test_a_wrong_configuration_ends_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, failing=("cut",), code=2)
    with pytest.raises(ConfigError, match=r"cut.*not finite"):
        sweep(jobs(["tiny"], CODECS[1:2], [], [1]), tmp_path, say=lambda _: None)


@pytest.mark.parametrize(
    "words",
    [["tiny"], ["tiny", "--codecs", "mapl"], ["tiny", "--codecs", "mapl,16", "--factors", "8"], ["--codecs", "cut"]],
)
def test_wrong_words_are_refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *words, "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("thinwire: ")
