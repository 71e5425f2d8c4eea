"""Routing on models that are not ours: by module type, by name, and with an error where it cannot be right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reference.small import small_model
from thinwire import codecs
from thinwire.errors import ConfigError
from thinwire.optim import build_optimizers, param_groups
from thinwire.pipeline import split


def rules(model: nn.Module) -> dict[str, str]:
    return {name: group["rule"] for group in param_groups(model) for name in group["names"]}


def test_embeddings_are_known_by_type() -> None:
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(5, 4), "0": nn.Embedding(5, 4), "w": nn.Linear(4, 4)})
    assert rules(model) == {
        "embed_tokens.weight": "adamw", "0.weight": "adamw", "w.weight": "muon", "w.bias": "adamw",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name", "rows"),
    [
        (nn.MultiheadAttention(8, 2), "in_proj_weight", (8, 8, 8)),
        (nn.LSTM(4, 6), "weight_ih_l0", (6, 6, 6, 6)),
        (nn.GRU(4, 6), "weight_hh_l0", (6, 6, 6)),
    ],
)  # fmt: skip
def test_fused_weights_of_torch_are_taken_apart(module: nn.Module, name: str, rows: tuple[int, ...]) -> None:
    splits = {n: s for g in param_groups(module) for n, s in zip(g["names"], g["splits"], strict=True)}
    assert splits[name] == rows
    build_optimizers(param_groups(module))


def test_what_cannot_be_trained_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="a list of patterns"):
        param_groups(model, adamw="weight")
    with pytest.raises(ConfigError, match="regular expressions"):
        param_groups(model, adamw=["("])
    model.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="complex64"):
        param_groups(model)
    with pytest.raises(ConfigError, match="rule 'sgd'"):
        build_optimizers([{"params": [], "rule": "sgd"}])


def test_free_frames_are_free_for_whoever_asks() -> None:
    stages = split(small_model(), 3, codecs.get("free", rank=4))
    by_name = {name: group["rule"] for group in param_groups(stages) for name in group["names"]}
    assert by_name["outbound.0.frame_DK"] == "adamw"
    stages = split(small_model(), 3, codecs.get("mapl", rank=4))
    by_name = {name: group["rule"] for group in param_groups(stages) for name in group["names"]}
    assert by_name["outbound.0.frame_DK"] == "spel"


def test_building_optimizers_keeps_gradients() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    build_optimizers(param_groups(model))
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
