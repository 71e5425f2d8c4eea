"""Learning-rate factors at their corners, base rates, and clipping over stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.optim import Muon, clip_gradients, gradient_square_sum, lr_factor, set_lr
from thinwire.optim.build import DECAYS


@pytest.mark.parametrize("decay", DECAYS)
def test_warm_up_is_linear_and_never_zero(decay: str) -> None:
    factors = [lr_factor(step, 100, warmup=4, decay=decay) for step in range(5)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("decay", DECAYS)
def test_without_warm_up_the_first_step_is_full(decay: str) -> None:
    assert lr_factor(0, 100, warmup=0, decay=decay) == 1.0


def test_cosine_is_half_way_in_the_middle_and_ends_at_zero() -> None:
    factors = [lr_factor(step, 100, warmup=20, decay="cosine") for step in (20, 60, 100, 130)]
    assert factors == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_wsd_is_constant_then_linear_over_the_last_fifth() -> None:
    factors = [lr_factor(step, 100, warmup=10, decay="wsd") for step in (10, 79, 80, 90, 100, 130)]
    assert factors == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0, 0.0])


def test_constant_is_constant() -> None:
    assert {lr_factor(step, 10, warmup=2, decay="constant") for step in range(1, 12)} == {1.0}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("total_steps", [1, 2, 4, 7])
def test_short_runs_stay_between_zero_and_one(decay: str, total_steps: int) -> None:
    for warmup in (0, 1, total_steps, total_steps + 3):
        factors = [lr_factor(step, total_steps, warmup=warmup, decay=decay) for step in range(total_steps)]
        assert all(0 < factor <= 1 for factor in factors)


@pytest.mark.parametrize("decay", ["cosine", "wsd"])
def test_after_the_warm_up_rates_never_rise(decay: str) -> None:
    factors = [lr_factor(step, 57, warmup=9, decay=decay) for step in range(8, 60)]
    assert factors == sorted(factors, reverse=True)


def test_an_unknown_decay_is_refused() -> None:
    with pytest.raises(ConfigError, match="'linear'; allowed: cosine, wsd, constant"):
        lr_factor(0, 10, warmup=0, decay="linear")  # type: ignore[arg-type]


def test_every_group_keeps_its_own_base_rate() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(2, 2))], "lr": lr, "base_lr": lr} for lr in (0.02, 0.01)]
    optimizer = Muon(groups)
    for factor in (0.5, 0.25):
        set_lr([optimizer], factor)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02 * factor, 0.01 * factor])


def gradients(*values: list[float]) -> list[nn.Parameter]:
    made = []
    for value in values:
        made.append(nn.Parameter(torch.zeros(len(value))))
        made[-1].grad = torch.tensor(value)
    return [*made, nn.Parameter(torch.zeros(3))]


def test_stages_add_up_to_the_norm_of_the_whole() -> None:
    stages = gradients([3.0], []), gradients([4.0, 12.0])
    assert float(sum(gradient_square_sum(stage) for stage in stages)) == pytest.approx(169, rel=1e-6)
    assert gradient_square_sum([]).dtype == torch.float64


def test_clipping_scales_to_the_given_norm_only_from_above() -> None:
    stage = gradients([3.0, 4.0])
    clip_gradients(stage, 5.0, 5.0)
    assert torch.equal(stage[0].grad, torch.tensor([3.0, 4.0]))
    clip_gradients(stage, 5.0, 1.0)
    torch.testing.assert_close(stage[0].grad, torch.tensor([0.6, 0.8]))
    assert stage[-1].grad is None
