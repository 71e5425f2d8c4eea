"""The command: every wrong input is one line that says what was given, and exit code 2, before anything is written."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from filelock import FileLock

from thinwire.cli import given_fields, main, parse_config
from thinwire.errors import ConfigError
from thinwire.train import recipes
from thinwire.train.stored import from_dict, to_dict
from thinwire.train.validate import settle, validate

SMALL = [
    "--model.dim", "32", "--model.num-layers", "4", "--model.num-heads", "2", "--model.seq-len", "16",
    "--model.vocab-size", "300", "--train.batch-size", "4", "--train.steps", "2", "--pipeline.microbatches", "4",
    "--data.val-tokens", "128", "--pipeline.emulate",
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("\n".join(f"word{i % 97} and {i * i % 89};" for i in range(3000)))
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command prints when it exits with 2."""
    assert main(words) == 2
    line = capsys.readouterr().err
    assert len(line.strip().splitlines()) == 1, line
    assert line.startswith("thinwire: ")
    return line


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out
    assert main(["--version"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian"], "did you mean train"),
        (["train"], "no recipe"),
        (["train", "tinny"], "did you mean tiny?"),
        (["train", "tiny", "--pipeline.stagess", "2"], "did you mean --pipeline.stages?"),
        (["train", "tiny", "--train.steps", "many"], "many"),
        (["train", "tiny", "--train.steps", "0"], "train.steps=0; allowed: 1 or more"),
        (["train", "tiny", "--pipeline.schedule", "2F2B"], "allowed: GPipe, 1F1B"),
        (["train", "tiny", "--pipeline.microbatches", "2"], "2 microbatches for 4 stages"),
        (["train", "tiny", "--pipeline.stages", "9"], "9 stages for a model of 4 layers"),
        (["train", "tiny", "--pipeline.stages", "3", "--pipeline.balance", "1", "1", "1"], "add up to 4"),
        (["train", "tiny", "--train.batch-size", "12"], "a multiple of 8"),
        (["train", "tiny", "--pipeline.link", "fast"], "link 'fast'"),
        (["train", "tiny", "--pipeline.link", "0mbit"], "a rate above 0"),
        (["train", "tiny", "--codec.name", "zip"], "allowed: identity, mapl"),
        (["train", "tiny", "--codec.rank", "4"], "codec.rank, which has no effect with llama, muon, identity"),
        (["train", "tiny", "--codec.name", "mapl"], "exactly one of codec.rank and codec.factor"),
        (["train", "tiny", "--codec.name", "mapl", "--codec.rank", "193"], "for activations of width 192"),
        (["train", "tiny", "--codec.name", "mapl", "--codec.factor", "1000"], "codec factor 1000"),
        (["train", "tiny", "--pipeline.stages-per-rank", "2"], "pipeline.stages_per_rank, which has no effect"),
        (["train", "tiny", "--pipeline.stages", "1", "--codec.name", "mapl"], "codec.name, which has no effect"),
        (["train", "tiny-mapl", "--codec.rank", "4", "--codec.factor", "8"], "exactly one of codec.rank"),
        (["train", "tiny", "--optim.frame-ratio", "0.2"], "optim.frame_ratio, which has no effect"),
        (["train", "tiny", "--optim.lr", "nan"], "optim.lr=nan"),
        (["train", "tiny-mapl", "--optim.lr", "1"], "frames' rate 0.1"),
        (["train", "tiny", "--model.size", "huge"], "model size 'huge'"),
        (["train", "tiny", "--model.num-heads", "5"], "num_heads"),
        (["train", "tiny", "--name", "../x"], "without slashes"),
        (["train", "tiny", "--resume"], "is no run folder"),
        (["train", "tiny", "--data.source", "nowhere.txt"], "nowhere.txt"),
        (["train", "tiny", "--model.family", "vgg"], "vgg"),
        (["train", "tiny", "--model.width", "8"], "model.width, which has no effect with llama"),
        (["train", "tiny-gpt", "--model.width", "8"], "model.width, which has no effect with gpt"),
        (["train", "tiny-gpt", "--model.size", "1b"], "model size '1b' of a gpt"),
        (["train", "tiny-resnet"], "data.source=stdlib for a resnet18"),
        (["train", "tiny-resnet", "--data.source", "nowhere"], "image source 'nowhere'"),
        (["train", "tiny-resnet", "--model.vocab-size", "9"], "model.vocab_size, which has no effect with resnet18"),
        (["train", "tiny-resnet", "--data.text-column", "img"], "data.text_column, which has no effect with resnet18"),
        (["train", "tiny-resnet", "--codec.name", "mapl", "--codec.rank", "4"], "codec.name, which has no effect"),
        (["train", "tiny-resnet", "--pipeline.stages", "2"], "2 stages of a resnet18; allowed: 1; set pipeline"),
        (["eval", "nowhere"], "nowhere is no run folder"),
        (["generate", "nowhere", "x"], "nowhere is no run folder"),
        (["report", "nowhere"], "nowhere"),
        (["report"], "runs"),
        (["demo", "--steps", "few"], "few"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_input_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert says in refused(capsys, *words)
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"\0\1\2\3" * 1000, "not text"),
        ("é".encode("latin-1") * 100, "UTF-8"),
        (b"short text\n" * 3, ""),
    ],
    ids=["empty", "binary", "undecodable", "too short"],
)  # fmt: skip
def test_text_that_cannot_be_used_is_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], content: bytes, says: str
) -> None:
    (here / "bad.txt").write_bytes(content)
    line = refused(capsys, "train", "tiny", *SMALL, "--data.source", "bad.txt")
    assert says.lower() in line.lower()
    assert not (here / "runs").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_text_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "text.txt").chmod(0)
    assert "text.txt" in refused(capsys, "train", "tiny", *SMALL, "--data.source", "text.txt")


def test_a_vocabulary_larger_than_the_text_gives_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "tiny", *SMALL, "--data.source", "text.txt", "--model.vocab-size", "30000"]
    assert "30000" in refused(capsys, *words)


def test_a_port_in_use_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        port = str(other.getsockname()[1])
        words = ["train", "tiny", *SMALL[:-1], "--data.source", "text.txt", "--pipeline.port", port]
        assert f"pipeline.port={port}" in refused(capsys, *words)


def test_train_eval_generate_report(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "tiny-mapl", *SMALL, "--data.source", "text.txt", "--codec.factor", "0", "--codec.rank", "4"]
    assert main([*words, "--name", "a"]) == 0
    capsys.readouterr()
    before = sorted((here / "runs").rglob("*"))
    assert "exists" in refused(capsys, *words, "--name", "a")
    assert sorted((here / "runs").rglob("*")) == before
    assert main(["eval", "runs/a", "--json"]) == 0
    evaluation = json.loads(capsys.readouterr().out)
    summary = json.loads((here / "runs/a/summary.json").read_text())
    assert evaluation["val_loss"] == summary["val_loss"]
    assert main(["generate", "runs/a", "word3 and", "--tokens", "5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("word3 and")
    assert main(["generate", "runs/a", "word3 and", "--tokens", "5"]) == 0
    assert capsys.readouterr().out == text
    assert "temperature -1" in refused(capsys, "generate", "runs/a", "x", "--temperature", "-1")
    assert main(["report", "runs/a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["val_loss"] == pytest.approx(summary["val_loss"])
    assert (here / "runs/a/report.png").stat().st_size > 10_000


def test_damaged_run_folders_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs/b").mkdir(parents=True)
    (here / "runs/b/config.json").write_text('{"name": ')
    assert "damaged" in refused(capsys, "eval", "runs/b")
    (here / "runs/b/config.json").write_text('{"nome": "b"}')
    assert "unknown fields" in refused(capsys, "eval", "runs/b")
    (here / "runs/b/config.json").write_text(json.dumps(to_dict(recipes.get("tiny"))))
    assert "no checkpoint" in refused(capsys, "eval", "runs/b")


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_valid_and_survives_json(name: str) -> None:
    config = recipes.get(name)
    validate(config)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_factor_counts_everything() -> None:
    config = recipes.get("demo-mapl")
    codec = config.make_codec()
    assert 8 <= config.expected_factor(codec) < 8 * (codec.rank + 1) / codec.rank  # type: ignore[attr-defined]


def _trained(folder: Path, *words: str) -> list[str]:
    base = ["train", "tiny-mapl", *SMALL, "--data.source", "text.txt", "--codec.factor", "0", "--codec.rank", "4"]
    assert main([*base, "--name", "a", *words]) == 0
    return [*base, "--name", "a"]


def test_a_damaged_checkpoint_is_refused_and_the_run_left_as_it_was(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*_trained(here), "--resume", "--train.steps", "4"]
    newest = here / "runs/a/checkpoints/step-00000002"
    capsys.readouterr()
    shard = next(newest.glob("*.safetensors"))
    state = (newest / "run.json").read_text()
    config = (here / "runs/a/config.json").read_bytes()
    good = shard.read_bytes()
    for content, says in (
        (good[:-1] + bytes([good[-1] ^ 1]), "digest"),
        (good[:100], "digest"),
        (None, "cannot be read"),
    ):
        shard.unlink() if content is None else shard.write_bytes(content)
        assert says in refused(capsys, *words)
        assert says in refused(capsys, "eval", "runs/a")
    shard.write_bytes(good)
    for content in ("[]", "{}", state.replace('"step": 2', '"step": 400'), state.replace('"step": 2', '"step": "x"')):
        (newest / "run.json").write_text(content)
        assert "damaged" in refused(capsys, *words)
    assert (here / "runs/a/config.json").read_bytes() == config
    (newest / "run.json").write_text(state)
    (here / "runs/a/metrics.jsonl").write_bytes(b'[]\n{}\n\xff\xfe\n{"step": "x"}\n')
    assert main(words) == 0


def test_a_finished_run_is_not_run_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = _trained(here)
    capsys.readouterr()
    summary = (here / "runs/a/summary.json").read_bytes()
    assert "at step 2 of 2" in refused(capsys, *words, "--resume")
    assert (here / "runs/a/summary.json").read_bytes() == summary


def test_overwrite_leaves_alone_what_is_no_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "precious").mkdir()
    (here / "precious/data").write_text("keep")
    words = ["train", "tiny", *SMALL, "--data.source", "text.txt", "--folder", ".", "--name", "precious", "--overwrite"]
    assert "no run folder" in refused(capsys, *words)
    assert (here / "precious/data").read_text() == "keep"


def test_a_run_in_progress_is_not_started_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs").mkdir()
    with FileLock(here / "runs/.b.lock"):
        words = ["train", "tiny", *SMALL, "--data.source", "text.txt", "--name", "b"]
        assert "in progress" in refused(capsys, *words)


def test_evaluation_on_other_text_is_refused_but_generation_needs_none(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _trained(here)
    with (here / "text.txt").open("a") as file:
        file.write("and more")
    capsys.readouterr()
    assert "not what" in refused(capsys, "eval", "runs/a")
    (here / "text.txt").unlink()
    assert main(["generate", "runs/a", "word", "--tokens", "2"]) == 0


def test_what_is_no_error_of_ours_is_one_line_too(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(config: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("thinwire.train.launch.load", broken)
    assert main(["train", "tiny", *SMALL]) == 1
    line = capsys.readouterr().err
    assert "unexpected ZeroDivisionError: by nothing" in line and len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "words", "left_out"),
    [
        ("tiny-gpt", ["--optim.method", "muon"], {"dp.ties"}),
        ("tiny-gpt", ["--optim.method=adamw", "--dp.replicas=1"], {"dp.ties"}),
        ("2d-llama", ["--dp.replicas", "1"], {"dp.link"}),
        ("2d-llama", ["--dp.emulate", "--pipeline.emulate"], set()),
        ("2d-llama", ["--pipeline.stages", "1", "--pipeline.microbatches", "1"],
         {"codec.name", "codec.factor", "codec.anchor_rank", "pipeline.link", "optim.frame_ratio"}),
        ("demo-mapl", ["--codec.name", "identity"], {"codec.factor", "codec.anchor_rank"}),
        ("tiny-mapl", ["--codec.rank", "8"], set()),
        ("signmuon-cifar10", ["--optim.method", "lion"], {"optim.momentum"}),
    ],
)  # fmt: skip
def test_what_a_recipe_says_gives_way_to_what_the_user_says(name: str, words: list[str], left_out: set[str]) -> None:
    config, names = settle(parse_config(recipes.get(name), words), given_fields(words))
    validate(config)
    assert set(names) == left_out


def test_what_the_user_says_stays() -> None:
    words = ["--optim.method", "muon", "--dp.ties", "random", "--dp.no-emulate"]
    assert given_fields(words) == {"optim.method", "dp.ties", "dp.emulate"}
    config, names = settle(parse_config(recipes.get("tiny-gpt"), words), given_fields(words))
    assert not names
    with pytest.raises(ConfigError, match=r"dp\.ties, which has no effect"):
        validate(config)
