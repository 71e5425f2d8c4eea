"""ResNets: parameter counts of the literature, shapes, first values, routing, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from thinwire.models import ResNet, ResNetConfig, resnet18, resnet50
from thinwire.optim import param_groups

BOTH = pytest.mark.parametrize("depth", [18, 50])


def built(depth: int, seed: int = 0) -> ResNet:
    model = ResNet(ResNetConfig(depth=depth, width=8))
    model.init_weights(seed)
    return model


def test_counts_are_those_of_the_literature() -> None:
    """torchvision's counts for 1,000 classes, less the 7x7 stem and the classifier, plus ours."""
    with torch.device("meta"):
        found = [sum(p.numel() for p in model.parameters()) for model in (resnet18(), resnet50())]
    stem, classes = 3 * 64 * (49 - 9), 1000 - 10
    assert found == [11_689_512 - stem - classes * 513, 25_557_032 - stem - classes * 2049]


@BOTH
def test_shapes_from_end_to_end(depth: int) -> None:
    model, sides = built(depth), []
    for stage in model.stages:
        stage.register_forward_hook(lambda _module, _inputs, out: sides.append(tuple(out.shape[1:])))
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 10)
    wide = 8 * (1 if depth == 18 else 4)
    assert sides == [(wide, 32, 32), (2 * wide, 16, 16), (4 * wide, 8, 8), (8 * wide, 4, 4)]


@BOTH
def test_every_block_begins_as_its_shortcut(depth: int) -> None:
    model = built(depth).eval()
    block = model.stages[0][1]
    x = torch.rand(1, model.stages[0][0].last_norm.num_features, 4, 4)
    assert torch.equal(block(x), x)
    assert sum(not m.weight.any() for m in model.modules() if isinstance(m, nn.BatchNorm2d)) == {18: 8, 50: 16}[depth]


def test_first_values() -> None:
    model = resnet18(width=32)
    model.init_weights(0)
    conv = model.stages[2][1].conv1.weight
    assert conv.std().item() == pytest.approx(math.sqrt(2 / (128 * 9)), rel=0.02)
    assert model.classifier.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not model.classifier.bias.any()


def test_init_depends_on_the_seed_alone_and_starts_statistics_over() -> None:
    first = built(18, seed=4)
    first(torch.randn(4, 3, 8, 8))
    first.init_weights(4)
    with torch.device("meta"):
        second = ResNet(first.config)
    second.to_empty(device="cpu")
    second.init_weights(4)
    expected = first.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in second.state_dict().items())
    assert not torch.equal(built(18, seed=5).stem.weight, first.stem.weight)


def test_all_parameters_learn_once_the_blocks_have_opened() -> None:
    model = built(50)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.2)
    model(torch.randn(4, 3, 16, 16)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_muon_gets_the_convolutions_and_not_the_classifier() -> None:
    rules = {name: group["rule"] for group in param_groups(built(18), adamw=[r"^stem\."]) for name in group["names"]}
    assert rules["stem.weight"] == rules["classifier.weight"] == rules["norm.weight"] == "adamw"
    assert rules["stages.1.0.conv1.weight"] == rules["stages.1.0.shortcut.0.weight"] == "muon"


@pytest.mark.parametrize("fields", [{"depth": 34}, {"num_classes": 0}, {"width": 0}])
def test_bad_configurations(fields: dict[str, int]) -> None:
    name, value = next(iter(fields.items()))
    with pytest.raises(ValueError, match=f"{name}={value}; allowed"):
        ResNetConfig(**fields)


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 1, 8, 8), torch.zeros(3, 8, 8)]
)
def test_bad_input(images: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"images \(B, 3, Y, X\)"):
        built(18)(images)
