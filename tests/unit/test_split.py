"""Cutting a model into stages: balance, shared parameters, the meta device, and what is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from tests.reference.small import CONFIG, TIED, batch, loss, small_model, twin_of
from thinwire import codecs
from thinwire.errors import ConfigError
from thinwire.models import Llama, LlamaConfig
from thinwire.pipeline import split
from thinwire.pipeline.split import balance_by_parameters, layer_counts
from thinwire.pipeline.stage import seeded_generator

MAPL = codecs.get("mapl", rank=4, anchor_rank=3, wire_format="fp32")
WHOLE = codecs.get("mapl", rank=16, anchor_rank=3, wire_format="fp32")  # keeps everything
IDENTITY = codecs.get("identity", wire_format="fp32")


def stage_sizes(sizes: Sequence[int], first: int, last: int, counts: Sequence[int]) -> list[int]:
    ends = list(itertools.accumulate(counts))
    totals = [sum(sizes[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    totals[0] += first
    totals[-1] += last
    return totals


def best_by_trying_all(sizes: Sequence[int], first: int, last: int, num_stages: int) -> tuple[int, int]:
    """The smallest (largest stage, sum of squares) over all cuts."""
    costs = []
    for cuts in itertools.combinations(range(1, len(sizes)), num_stages - 1):
        counts = [b - a for a, b in itertools.pairwise((0, *cuts, len(sizes)))]
        totals = stage_sizes(sizes, first, last, counts)
        costs.append((max(totals), sum(total**2 for total in totals)))
    return min(costs)


def random_cases(count: int) -> list[tuple[list[int], int, int, int]]:
    dice = random.Random(0)
    cases = [([7, 4, 7, 2, 3, 7, 8], 2, 4, 5)]  # the best beginning is not part of the best whole
    for _ in range(count):
        num_layers = dice.randint(1, 8)
        sizes = [dice.randint(1, 9) for _ in range(num_layers)]
        cases.append((sizes, dice.randint(0, 9), dice.randint(0, 9), dice.randint(1, num_layers)))
    return cases


def test_no_cut_has_a_smaller_largest_stage() -> None:
    for sizes, first, last, num_stages in random_cases(300):
        counts = balance_by_parameters(sizes, first, last, num_stages)
        assert len(counts) == num_stages and sum(counts) == len(sizes) and min(counts) >= 1
        largest = max(stage_sizes(sizes, first, last, counts))
        assert largest == best_by_trying_all(sizes, first, last, num_stages)[0]


def test_among_the_best_cuts_the_most_even_is_taken() -> None:
    for sizes, first, last, num_stages in random_cases(300):
        totals = stage_sizes(sizes, first, last, balance_by_parameters(sizes, first, last, num_stages))
        evenness = sum(total**2 for total in totals)
        assert evenness == best_by_trying_all(sizes, first, last, num_stages)[1], (sizes, first, last, num_stages)


def test_the_ends_count() -> None:
    assert balance_by_parameters([10] * 6, 0, 0, 3) == [2, 2, 2]
    assert balance_by_parameters([10] * 6, 25, 25, 3) == [1, 4, 1]


@pytest.mark.parametrize("balance", [[2, 2, 1], [4], [3, 2], [4, 0], [5, -1], [2, 2, 0]], ids=str)
def test_balances_that_do_not_fit_are_refused(balance: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"balance \[.*2 numbers of at least 1 that add up to 4"):
        split(small_model(), 2, IDENTITY, balance=balance)


@pytest.mark.parametrize("num_stages", [0, 5, -1])
def test_more_stages_than_layers_are_refused(num_stages: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_stages} stages for a model of 4 layers; allowed: 1 to 4 stages"):
        split(small_model(), num_stages, IDENTITY)


def test_a_balance_by_hand_is_kept() -> None:
    assert layer_counts(small_model(), 2, [1, 3]) == [1, 3]
    stages = split(small_model(), 2, IDENTITY, balance=[1, 3])
    assert [list(stage.model.layers) for stage in stages] == [["0"], ["1", "2", "3"]]


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_share_the_models_parameters_each_once(config: LlamaConfig, num_stages: int) -> None:
    model = small_model(config)
    stages = split(model, num_stages, MAPL)
    found = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            assert name not in found
            found[name] = parameter
    whole = dict(model.named_parameters(remove_duplicate=num_stages == 1))
    assert found.keys() == whole.keys() and all(found[name] is whole[name] for name in whole)


def test_names_are_unique_over_the_pipeline() -> None:
    names = [name for stage in split(small_model(), 4, MAPL) for name, _ in stage.named_parameters()]
    assert len(names) == len(set(names))
    assert {"outbound.2.frame_DK", "inbound.2.frame_DK", "anchors.3.table_VK", "sending.1.table_VK"} <= set(names)
    assert "sending.0.table_VK" not in names and "sending.3.table_VK" not in names


def test_only_the_inner_boundaries_have_ends() -> None:
    stages = split(small_model(), 3, MAPL)
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(True, False), (False, False), (False, True)]
    assert [len(list(stage.ports())) for stage in stages] == [1, 2, 1]
    assert not list(split(small_model(), 1, MAPL)[0].ports())


def test_receivers_start_with_their_senders_frame() -> None:
    stages = split(small_model(), 3, MAPL)
    for sender, receiver in itertools.pairwise(stages):
        assert torch.equal(sender.encoder.frame_DK, receiver.decoder.frame_DK)
    assert not torch.equal(stages[0].encoder.frame_DK, stages[1].encoder.frame_DK)
    assert not torch.equal(stages[0].own_anchors.basis_KD, stages[1].own_anchors.basis_KD)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_a_model_split_on_the_meta_device_comes_to_life_with_the_same_values(config: LlamaConfig) -> None:
    direct = split(small_model(config, seed=5), 3, MAPL, seed=5)
    with torch.device("meta"):
        absent = Llama(config)
    stages = split(absent, 3, MAPL, seed=5)
    assert all(p.is_meta for stage in stages for p in (*stage.parameters(), *stage.buffers()))
    for stage in stages:
        stage.to_empty(device="cpu")
        stage.init_weights(5)
    twin_of(stages).sync.publish(everything=True)
    for made, expected in zip(stages, direct, strict=True):
        values, wanted = made.state_dict(), expected.state_dict()
        assert values.keys() == wanted.keys()
        assert all(torch.equal(values[name], wanted[name]) for name in wanted)


def test_a_layout_changes_no_weights() -> None:
    two, four = ({n: p for s in split(small_model(), k, MAPL) for n, p in s.named_parameters()} for k in (2, 4))
    assert torch.equal(two["outbound.0.frame_DK"], four["outbound.0.frame_DK"])
    assert torch.equal(two["model.layers.3.ffn.w2.weight"], four["model.layers.3.ffn.w2.weight"])


def test_seeds_of_names_differ() -> None:
    draws = [torch.rand(1, generator=seeded_generator(s, n)) for s in (0, 1) for n in ("a", "b")]
    assert len({float(draw) for draw in draws}) == 4


def test_ids_that_do_not_fit_the_wire_are_refused() -> None:
    config = LlamaConfig(vocab_size=257, dim=16, num_layers=2, num_heads=2)
    narrow = codecs.get("mapl", rank=4, anchor_rank=3, id_bytes=1)
    with pytest.raises(ConfigError, match=r"id_bytes=1 for a vocabulary of 257; allowed: at least 2; set .*id_bytes=2"):
        split(small_model(config), 2, narrow)
    split(small_model(config), 2, codecs.get("mapl", rank=4, id_bytes=1))  # no anchors, so no ids travel


@pytest.mark.parametrize("ranks", [{"rank": 17}, {"rank": 4, "anchor_rank": 17}], ids=str)
def test_a_rank_above_the_width_is_refused(ranks: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"rank 17.*16"):
        split(small_model(), 2, codecs.get("mapl", **ranks))


@pytest.mark.parametrize("codec", [IDENTITY, WHOLE], ids=["identity", "mapl"])
def test_a_bf16_model_can_be_cut(codec: codecs.Codec) -> None:
    model = small_model().bfloat16()
    twin = twin_of(split(model, 3, codec))
    ids, targets = batch()
    assert twin.forward(ids).dtype == torch.bfloat16
    assert float(twin.step(ids, targets)) == pytest.approx(float(loss(model(ids), targets).detach()), rel=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert all(stage.encoder.frame_DK.dtype == torch.float32 for stage in twin.stages[:-1] if codec is WHOLE)


@pytest.mark.parametrize("codec", [IDENTITY, MAPL], ids=["identity", "mapl"])
def test_autocast_reaches_the_layers_and_leaves_the_ends_in_float32(codec: codecs.Codec) -> None:
    stages = split(small_model(), 3, codec)
    with torch.autocast("cpu", torch.bfloat16):
        logits = twin_of(stages).forward(batch()[0])
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    learning = [p for stage in stages for n, p in stage.named_parameters() if not n.startswith("sending")]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in learning)
