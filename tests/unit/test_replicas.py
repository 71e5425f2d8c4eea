"""What a run says about the exchange between replicas, without any process."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli import parse_config
from thinwire.collectives.cost import AlphaBeta
from thinwire.train import recipes, replicas
from thinwire.train.config import Config
from thinwire.train.metrics import to_json
from thinwire.train.validate import validate

VOTING = [name for name in recipes.names() if recipes.get(name).optim.method == "signmuon"]


def config_of(recipe: str, *words: str) -> Config:
    config: Config = parse_config(recipes.get(recipe), words)
    return config


def account(config: Config, plan: replicas.Plan) -> dict[str, Any]:
    record = {"wire_bytes_dp": 400_000.0, "exchange_s": 0.2, "optimizer_s": 0.3}
    return replicas.account(config, plan, [record], 1_000_000)


def test_before_the_first_step_all_transports_are_predicted_and_the_chosen_one_is_marked() -> None:
    config = config_of("tiny-gpt", "--dp.link", "50mbit,20ms", "--dp.transport", "auto", "--dp.replicas", "4")
    plan = replicas.Plan(config, AlphaBeta.of(50e6, 0.02), 1e6, {"bf16": 1e5})
    text = "\n".join(plan.lines())
    assert "4 replicas" in text and "50 Mbit/s and 20 ms (emulated)" in text
    (marked,) = [line for line in plan.lines() if "this run" in line]
    assert marked.split()[0] == plan.transport == "gather"
    assert all(name in text for name in ("fp32", "packed", "sum"))


def test_after_the_last_step_measured_and_predicted_are_said() -> None:
    config = config_of("tiny-gpt", "--dp.link", "50mbit,20ms")
    summary = account(config, replicas.Plan(config, AlphaBeta.of(50e6, 0.02), 1e6, {"bf16": 1e5}))
    assert summary["bytes_per_step_worker_dp"] == 200_000 and summary["compression_factor_dp"] == 20
    text = "\n".join(replicas.lines(summary))
    said = ("took 0.200 s", f"predicted {summary['predicted_exchange_s']:.3f} s", "200,000 bytes", "20.00x")
    assert all(part in text for part in (*said, "signs pay below", "carries 50 Mbit/s"))


def test_where_no_signs_are_sent_there_is_no_break_even(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of("2d-llama-uncompressed")
    plan = replicas.Plan(config, AlphaBeta.of(1e12), 0.0, {"fp32": 1e6, "bf16": 1e5})
    summary = account(config, plan)
    assert "break_even_bps" not in summary and not caplog.records
    assert summary["predicted_exchange_s"] == pytest.approx(plan.table()["means"][1])
    assert "signs" not in "\n".join(replicas.lines(summary))


def test_every_key_of_the_summary_is_documented() -> None:
    config = config_of("tiny-gpt")
    page = (Path(__file__).parents[2] / "docs" / "replicas.md").read_text()
    summary = account(config, replicas.Plan(config, AlphaBeta.of(50e6, 0.02), 1e6, {}))
    assert [key for key in summary if f"`{key}`" not in page] == []


@pytest.mark.parametrize("recipe", VOTING)
def test_the_advice_where_signs_do_not_pay_can_be_followed(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    words = ["--optim.feedback", "--optim.scale", "rms", "--dp.transport", "auto"]
    config = config_of(recipe, *words)
    with caplog.at_level(logging.WARNING, "thinwire"):
        account(config, replicas.Plan(config, AlphaBeta.of(1e12), 1e6, {"bf16": 1e5}))
    advice = caplog.text.split("`")[1].split()
    changed = config_of(recipe, *words, *advice)
    validate(changed)
    assert (changed.optim.method, changed.dp.aux, changed.optim.lr) == ("muon", "adamw", 0.02)


def test_json_has_neither_nan_nor_infinity() -> None:
    assert to_json({"a": [math.nan, 1.0, (math.inf,)], "b": None}) == '{"a": [null, 1.0, [null]], "b": null}'
