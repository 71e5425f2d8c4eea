"""Run folders read back, finished, running and broken; the table and the picture made of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console

from thinwire.errors import ConfigError
from thinwire.report import Run, comparison_picture, comparison_rows, comparison_tables, load_run
from thinwire.report import picture as picture_module
from thinwire.report.table import link_caption

NUM_STEPS = 20


def metrics_line(step: int, **changes: Any) -> str:
    line: dict[str, Any] = {
        "step": step,
        "tokens": 100 * step,
        "loss": 3 + 5 * math.exp(-step / 5),
        "lr": 1e-3,
        "step_s": 0.5,
        "tokens_per_s": 200.0,
        "wire_bytes_fwd": 1000,
        "wire_bytes_bwd": 1000,
        "wire_bytes_dp": 0,
        "wire_bytes_sync": 10,
        "orthogonality_error": 1e-7,
    }
    return json.dumps(line | changes)


def evaluation_line(step: int) -> str:
    return json.dumps({"step": step, "tokens": 100 * step, "val_loss": 3.5, "elapsed_s": 1.0})


def write_run(folder: Path, *, link: str | None = "20mbit,20ms", stages: int = 4, **summary: Any) -> Path:
    folder.mkdir(parents=True)
    config = {"pipeline": {"codec": "subspace", "link": link, "stages": stages}, "optim": {"method": "muon"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(metrics_line(s) + "\n" for s in range(1, NUM_STEPS + 1)))
    (folder / "evals.jsonl").write_text("".join(evaluation_line(s) + "\n" for s in (0, 10, 20)))
    values = {
        "val_loss": 3.5,
        "val_bits_per_byte": 2.25,
        "bytes_per_token_fwd": 130.0,
        "bytes_per_token_bwd": 65.0,
        "bytes_per_token_sync": 1.0,
        "compression_factor_fwd": 7.876,
        "compression_factor_bwd": 15.75,
        "compression_factor_dp": None,
        "median_step_s": 0.5,
        "predicted_step_s": 0.45,
        "orthogonality_error": 3e-7,
        "codec": "subspace",
        "link": link,
    }
    (folder / "summary.json").write_text(json.dumps(values | summary))
    return folder


def write_replicas(folder: Path, *, family: str = "gpt", dp_link: str = "50mbit,20ms", **summary: Any) -> Path:
    """Two replicas of a whole model, no pipeline."""
    values = {"exchange_s": 0.0834, "predicted_exchange_s": 0.079, "dp_bandwidth_bps": 5e7, "break_even_bps": 1.75e8}
    values |= {"bytes_per_step_worker_dp": 99_457.0, "compression_factor_dp": 27.14, "orthogonality_error": None}
    silent = {f"{key}_{way}": None for key in ("bytes_per_token", "compression_factor") for way in ("fwd", "bwd")}
    write_run(folder, link="none", stages=1, **(values | silent | summary))
    parts = {"model": {"family": family}, "pipeline": {"stages": 1}, "optim": {"method": "signmuon"}}
    parts["dp"] = {"replicas": 2, "emulate": False, "link": dp_link}
    (folder / "config.json").write_text(json.dumps(parts))
    return folder


def text_of(runs: list[Run], width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        for table in comparison_tables(runs):
            console.print(table)
    return capture.get()


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "one"))
    assert (run.name, run.codec, run.link, run.finished) == ("one", "subspace", "20mbit,20ms", True)
    assert [m["step"] for m in run.metrics] == list(range(1, NUM_STEPS + 1))
    assert [e["step"] for e in run.evaluations] == [0, 10, 20]
    assert run.column("tokens")[-1] == 100 * NUM_STEPS
    assert all(math.isnan(value) for value in run.column("no such key"))


def test_a_running_run_lacks_its_last_line_and_its_summary(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "running")
    (folder / "summary.json").unlink()
    (folder / "evals.jsonl").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(metrics_line(NUM_STEPS + 1)[:37])
    run = load_run(folder)
    assert len(run.metrics) == NUM_STEPS
    assert (run.evaluations, run.summary, run.finished) == ([], {}, False)
    assert (run.codec, run.link) == ("subspace", "20mbit,20ms")
    assert comparison_rows([run])[0]["median_step_s"] is None
    assert text_of([run]).count(" -") >= 7


def test_a_whole_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text(metrics_line(1) + "\n" + metrics_line(2))
    assert len(load_run(folder).metrics) == 2


def test_of_a_resumed_step_the_last_one_counts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = [metrics_line(1), metrics_line(2, loss=9.0), metrics_line(3, loss=9.0), metrics_line(2, loss=1.0)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = load_run(folder)
    assert run.column("step") == [1, 2, 3]
    assert run.column("loss")[1:] == [1.0, 9.0]


def test_a_codec_may_be_recorded_with_its_options(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", codec={"name": "integer", "bits": 4}, link="none")
    run = load_run(folder)
    assert (run.codec, run.link) == ("integer", None)


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"", "config.json is not JSON"),
        ("config.json", b"[1]", "holds a list"),
        ("config.json", b"\xff\xfe\x00", "config.json is not JSON"),
        ("metrics.jsonl", b'{"step": 1}\n{"st\n{"step": 3}\n', "metrics.jsonl, line 2 is not JSON"),
        ("metrics.jsonl", b"7\n", "line 1 holds a int"),
        ("evals.jsonl", b"oops\n", "evals.jsonl, line 1"),
        ("summary.json", b'{"val_loss": 3.', "summary.json is not JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: bytes | None, word: str) -> None:
    folder = write_run(tmp_path / "broken")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=word) as caught:
        load_run(folder)
    assert "broken" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, word in (("absent", "is no folder"), ("file", "is no folder"), ("empty", "is empty")):
        with pytest.raises(ConfigError, match=f"{name} {word}.*run folder"):
            load_run(tmp_path / name)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics.jsonl cannot be read"):
        load_run(folder)


def test_rows_compare_with_the_first_run(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / "a", median_step_s=2.0)), load_run(write_run(tmp_path / "b"))]
    first, second = comparison_rows(runs)
    assert (first["name"], first["speedup"], second["speedup"]) == ("a", 1.0, 4.0)
    assert second["predicted_error_percent"] == pytest.approx(-10.0)
    assert (second["compression_factor_fwd"], second["link"]) == (7.876, "20mbit,20ms")
    json.dumps([first, second])


def with_codec(folder: Path, name: str, anchor_rank: int, loss: float, factor: float) -> Run:
    write_run(folder, val_loss=loss, compression_factor_fwd=factor)
    config = json.loads((folder / "config.json").read_text())
    config["codec"] = {"name": name, "anchor_rank": anchor_rank}
    (folder / "config.json").write_text(json.dumps(config))
    return load_run(folder)


def test_the_share_of_the_wires_value_needs_the_cut_and_the_whole_with_the_same_anchors(tmp_path: Path) -> None:
    plain = with_codec(tmp_path / "plain", "identity", 0, 2.6, 0.99)
    whole = with_codec(tmp_path / "whole", "fixed", 16, 2.5, 0.98)
    cut = with_codec(tmp_path / "cut", "cut", 16, 2.9, 60.0)
    mapl = with_codec(tmp_path / "mapl", "mapl", 16, 2.6, 8.0)
    worse = with_codec(tmp_path / "worse", "mapl", 16, 3.0, 64.0)
    runs = [plain, whole, cut, mapl, worse]
    kept = [row["wire_value_kept"] for row in comparison_rows(runs)]
    assert kept == [None, 1.0, 0.0, pytest.approx(0.75), pytest.approx(-0.25)]
    assert "75%" in text_of(runs) and "-25%" in text_of(runs)
    assert comparison_rows([plain, cut, mapl])[2]["wire_value_kept"] is None
    useless = with_codec(tmp_path / "useless", "cut", 16, 2.4, 60.0)
    assert comparison_rows([whole, useless, mapl])[2]["wire_value_kept"] is None


def test_the_table_shows_values_and_fits_a_terminal(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / "demo-bf16")), load_run(write_run(tmp_path / "demo-mapl"))]
    text = text_of(runs)
    for word in ("demo-mapl", "subspace", "3.5000", "2.2500", "130", "65", "7.88x", "15.75x", "500 ms"):
        assert word in text
    for word in ("450 ms (-10%)", "1.00x", "3.0e-07", "emulated link of 20mbit,20ms between stages"):
        assert word in text
    assert "replicas" not in text


def test_replicas_get_a_table_with_their_link_and_costs(tmp_path: Path) -> None:
    text = text_of([load_run(write_replicas(tmp_path / "two"))])
    for word in ("signmuon", "50mbit,20ms", "50 Mbit/s", "99.5", "27.14x", "83.4 ms", "79 ms", "175 Mbit/s"):
        assert word in text
    assert "emulated link of 50mbit,20ms between replicas" in text and "No link" not in text
    assert "between stages" not in text and "muon" not in text.replace("signmuon", "")


def test_the_legend_names_what_compresses(tmp_path: Path) -> None:
    runs = [load_run(write_replicas(tmp_path / "two")), load_run(write_run(tmp_path / "staged"))]
    assert [picture_module._compressors(run) for run in runs] == [["signmuon"], ["subspace"]]


def test_pictures_are_counted_as_pictures(tmp_path: Path) -> None:
    run = load_run(write_replicas(tmp_path / "p", family="resnet18", val_bits_per_byte=None, val_accuracy=61.25))
    text = text_of([run])
    assert "61.25 %" in text and "token" not in text
    (tokens, *_), (pictures, *_) = (picture_module._panels(runs) for runs in ([], [run]))
    assert (tokens.label, pictures.label) == ("tokens", "pictures")


NAMES = ["signmuon-cifar10", "signmuon-llama-lr0.0003-adamw-ratio5-seed3", "x" * 200]


@pytest.mark.parametrize("name", NAMES, ids=["short", "long", "longest"])
def test_names_and_numbers_are_whole_at_80_columns(tmp_path: Path, name: str) -> None:
    wide = {"dp_bandwidth_bps": 1.234567e11, "break_even_bps": 9.876543e11, "bytes_per_step_worker_dp": 1.2345678e10}
    wide |= {"exchange_s": 1234.5, "predicted_exchange_s": 1234.5, "predicted_step_s": 1234.5, "median_step_s": 98.7}
    slow = load_run(write_replicas(tmp_path / name, dp_link="1000.5mbit,250ms", **wide))
    staged = load_run(write_run(tmp_path / "stages" / name, link="1000.5mbit,250ms", **wide))
    for run in (slow, staged):
        text = text_of([run])
        assert "…" not in text and max(map(len, text.splitlines())) <= 80
        first_column = "".join(line[:81].split("  ")[0].strip() for line in text.splitlines())
        assert first_column.count(name) == len(comparison_tables([run])) - 1
    assert all(word in text_of([slow]) for word in ("1000.5mbit,250ms", "123,457 Mbit/s", "1234.50 s", "(+1151%)"))


def test_diverged_runs_and_odd_names_are_shown_as_they_are(tmp_path: Path) -> None:
    odd = load_run(write_run(tmp_path / "_[b]$x$", val_loss=math.nan, median_step_s=math.inf))
    text = text_of([odd], width=120)
    assert "_[b]$x$" in text
    assert "nan" in text
    comparison_picture([odd], tmp_path / "odd.png")


def test_equal_folder_names_are_told_apart(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / folder)) for folder in ("x/run", "y/run", "z/other")]
    assert [row["name"] for row in comparison_rows(runs)] == ["x/run", "y/run", "other"]
    assert [row["name"] for row in comparison_rows([runs[0], runs[0]])]


def test_different_links_are_never_mixed_silently(tmp_path: Path) -> None:
    slow, real = load_run(write_run(tmp_path / "a")), load_run(write_run(tmp_path / "b", link=None))
    assert "real connections" in link_caption([real])
    assert "DIFFERENT" in link_caption([slow, real])
    text = text_of([slow, real], width=120)
    assert "20mbit,20ms" in text and "real" in text
    near, far = (load_run(write_replicas(tmp_path / dp_link, dp_link=dp_link)) for dp_link in ("1gbit", "5mbit"))
    assert "DIFFERENT" in link_caption([near, far])


def test_the_picture_is_one_png_of_the_stated_size(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / name)) for name in ("a", "b")]
    path = tmp_path / "new folder" / "picture.png"
    comparison_picture(runs, path)
    pixels = imread(path)
    assert pixels.shape[:2] == (650, 1800)
    assert pixels[..., :3].std() > 0.02
    assert [file.name for file in path.parent.iterdir()] == ["picture.png"]


def test_runs_with_nothing_to_draw_still_give_a_picture(tmp_path: Path) -> None:
    fresh = write_run(tmp_path / "fresh")
    for file in ("metrics.jsonl", "evals.jsonl", "summary.json"):
        (fresh / file).unlink()
    silent = write_run(tmp_path / "silent")
    lines = [metrics_line(s, wire_bytes_fwd=0, wire_bytes_bwd=0, wire_bytes_sync=0) for s in (1, 2, 3)]
    (silent / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    comparison_picture([load_run(fresh)], tmp_path / "fresh.png")
    comparison_picture([load_run(fresh), load_run(silent)], tmp_path / "both.png")
    comparison_picture([], tmp_path / "none.png")


def test_a_failed_picture_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def half_a_picture(self: Figure, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    old = tmp_path / "picture.png"
    old.write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", half_a_picture)
    with pytest.raises(OSError, match="disk full"):
        comparison_picture([load_run(write_run(tmp_path / "run"))], old)
    assert old.read_bytes() == b"old"
    assert not list(tmp_path.glob(".*.part"))


def test_axes_carry_running_sums_and_evaluations_their_step(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run"))
    assert picture_module._elapsed_s(run)[-1] == pytest.approx(0.5 * NUM_STEPS)
    assert picture_module._bytes_sent(run)[-1] == 2010 * NUM_STEPS
    points = picture_module._validation(run, run.column("tokens"))
    assert points == [(0.0, 3.5), (1000.0, 3.5), (2000.0, 3.5)]
    run.evaluations[:] = [{"step": None, "val_loss": None}]
    comparison_picture([run], tmp_path / "picture.png")


def test_smoothing_starts_without_bias_and_steps_over_gaps() -> None:
    assert picture_module._smoothed([4.0] * 200) == pytest.approx([4.0] * 200)
    assert picture_module._smoothed([math.nan, 2.0, math.nan]) == pytest.approx([math.nan, 2.0, 2.0], nan_ok=True)
