"""Routing: every parameter by exactly one rule, in a whole model and over the stages of a pipeline."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from tests.reference.small import CONFIG, TIED, small_model, small_twin
from thinwire import codecs, param_groups
from thinwire.errors import ConfigError
from thinwire.models import LlamaConfig
from thinwire.optim import Muon, Route, build_optimizers, describe, fused_splits, groups, route
from thinwire.pipeline import Twin

MAPL = {"rank": 4, "anchor_rank": 3}


def routes_of(twin: Twin, *, free_frames: bool = False) -> list[Route]:
    return route(
        [pair for stage in twin.stages for pair in stage.named_parameters()],
        lr=0.02,
        adamw_lr=0.01,
        frame_lr=0.002,
        fused=fused_splits(twin.stages),
        free_frames=free_frames,
    )


def rules(routes: list[Route]) -> dict[str, str]:
    return {one.name: one.rule for one in routes}


@pytest.mark.parametrize("name", codecs.names())
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_every_parameter_of_a_pipeline_is_routed_once(name: str, config: LlamaConfig, num_stages: int) -> None:
    twin = small_twin(codecs.get(name, **({} if name in ("identity", "cut") else MAPL)), num_stages, config)
    routes = routes_of(twin)
    names = [name for stage in twin.stages for name, _ in stage.named_parameters()]
    assert Counter(one.name for one in routes) == Counter(names)
    stepped = [one.parameter for one in routes if one.rule not in ("mirror", "frozen")]
    optimized = [
        p for optimizer in build_optimizers(groups(routes)) for g in optimizer.param_groups for p in g["params"]
    ]
    assert len(stepped) == len({id(p) for p in stepped}) == len(optimized)
    assert {id(p) for p in stepped} == {id(p) for p in optimized}


def test_each_kind_of_parameter_has_its_rule_and_rate() -> None:
    routes = {one.name: one for one in routes_of(small_twin(codecs.get("mapl", **MAPL), 4))}
    for name, rule, lr, splits in (
        ("model.embedding.weight", "adamw", 0.01, ()),
        ("model.head.weight", "adamw", 0.01, ()),
        ("model.norm.weight", "adamw", 0.01, ()),
        ("model.layers.2.ffn_norm.weight", "adamw", 0.01, ()),
        ("model.layers.0.attention.wqkv.weight", "muon", 0.02, (16, 8, 8)),
        ("model.layers.3.ffn.w13.weight", "muon", 0.02, (64, 64)),
        ("model.layers.3.ffn.w2.weight", "muon", 0.02, ()),
        ("outbound.1.frame_DK", "spel", 0.002, ()),
        ("inbound.1.frame_DK", "mirror", 0.0, ()),
        ("anchors.0.table_VK", "adamw", 0.01, ()),
        ("sending.2.table_VK", "mirror", 0.0, ()),
    ):
        one = routes[name]
        assert (one.name, one.rule, one.lr, one.splits) == (name, rule, lr, splits)


def test_frozen_frames_are_listed_and_free_frames_go_to_adamw_at_their_rate() -> None:
    frozen = routes_of(small_twin(codecs.get("fixed", rank=4), 2))
    assert rules(frozen)["outbound.0.frame_DK"] == "frozen"
    free = {one.name: one for one in routes_of(small_twin(codecs.get("free", rank=4), 2), free_frames=True)}
    assert (free["outbound.0.frame_DK"].rule, free["outbound.0.frame_DK"].lr) == ("adamw", 0.002)


def test_a_tied_head_follows_the_embedding_over_stages_and_is_one_parameter_in_a_whole_model() -> None:
    over_stages = rules(routes_of(small_twin(codecs.get("identity"), 2, TIED)))
    assert (over_stages["model.embedding.weight"], over_stages["model.head.weight"]) == ("adamw", "mirror")
    names = [name for group in param_groups(small_model(TIED)) for name in group["names"]]
    assert names.count("embedding.weight") == 1 and "head.weight" not in names


def test_param_groups_of_a_model_cover_it_and_know_its_fused_matrices() -> None:
    model = small_model()
    made = param_groups(model, lr=0.04)
    assert {group["rule"]: group["lr"] for group in made} == {"muon": 0.04, "adamw": 0.02}
    assert sorted(name for g in made for name in g["names"]) == sorted(name for name, _ in model.named_parameters())
    muon = next(group for group in made if group["rule"] == "muon")
    splits = dict(zip(muon["names"], muon["splits"], strict=True))
    assert splits["layers.0.attention.wqkv.weight"] == (16, 8, 8) and splits["layers.0.attention.wo.weight"] == ()
    Muon([muon]).step()


@pytest.mark.parametrize("wrap", [lambda model: nn.ModuleDict({"inner": model}), nn.Sequential], ids=["dict", "list"])
def test_param_groups_know_the_fused_matrices_of_a_wrapped_model(wrap: type[nn.Module]) -> None:
    muon = next(group for group in param_groups(wrap(small_model())) if group["rule"] == "muon")
    assert sum(len(splits) > 0 for splits in muon["splits"]) == 2 * CONFIG.num_layers


def test_param_groups_of_a_stage_leave_mirrors_to_their_owners() -> None:
    stage = small_twin(codecs.get("mapl", **MAPL), 4).stages[1]
    names = {name: group["rule"] for group in param_groups(stage) for name in group["names"]}
    assert names["outbound.1.frame_DK"] == "spel"
    assert "inbound.0.frame_DK" not in names and "sending.1.table_VK" not in names


def test_further_patterns_go_to_adamw() -> None:
    made = param_groups(small_model(), adamw=[r"layers\.0\..*w2", "wo"])
    adamw = next(group for group in made if group["rule"] == "adamw")
    assert "layers.0.ffn.w2.weight" in adamw["names"] and "layers.3.attention.wo.weight" in adamw["names"]
    assert "layers.1.ffn.w2.weight" not in adamw["names"]


def parameters(**shapes: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    return [(name.replace("_", "."), nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


RATES = {"lr": 0.02, "adamw_lr": 0.01, "frame_lr": 0.002}


def test_convolutions_go_to_muon_and_classifiers_do_not() -> None:
    made = rules(route(parameters(conv1_weight=(4, 3, 3, 3), fc_weight=(10, 4), conv1_bias=(4,)), **RATES))
    assert made == {"conv1.weight": "muon", "fc.weight": "adamw", "conv1.bias": "adamw"}


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"pattern 'layer_9'.*match a parameter"):
        param_groups(small_model(), adamw=["wo", "layer_9"])


def test_a_fused_name_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="wqkv"):
        route(parameters(qkv_weight=(12, 4)), **RATES, fused={"wqkv.weight": (4, 4, 4)})


@pytest.mark.parametrize("splits", [(4, 4), (4, 4, 5), ()], ids=str)
def test_splits_that_do_not_add_up_are_an_error(splits: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"splits .* of qkv.weight; allowed: row counts that add up to 12"):
        route(parameters(qkv_weight=(12, 4)), **RATES, fused={"qkv.weight": splits})


def test_the_table_has_a_row_for_every_parameter() -> None:
    routes = routes_of(small_twin(codecs.get("mapl", **MAPL), 2))
    table = {row["parameter"]: row for row in describe(routes)}
    assert len(table) == len(routes)
    assert table["model.layers.0.attention.wqkv.weight"] == {
        "parameter": "model.layers.0.attention.wqkv.weight",
        "shape": "32 x 16",
        "rule": "muon (3 matrices)",
        "lr": 0.02,
    }
    assert table["inbound.0.frame_DK"]["rule"] == "mirror"


def test_one_optimizer_follows_every_rule_that_occurs() -> None:
    for codec, rules in (
        (codecs.get("mapl", rank=4), {"muon", "adamw", "spel"}), (codecs.get("identity"), {"muon", "adamw"}),
    ):  # fmt: skip
        (optimizer,) = build_optimizers(groups(routes_of(small_twin(codec, 2))))
        assert type(optimizer) is Muon and {group["rule"] for group in optimizer.param_groups} == rules
