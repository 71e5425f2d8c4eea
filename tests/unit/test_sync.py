"""Owners and mirrors, all in this process: after collect, a step and publish, both ends hold the same bits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.reference.small import CONFIG, TIED, batch, loss, small_model, small_twin, twin_of
from thinwire import codecs
from thinwire.errors import ConfigError
from thinwire.optim import build_optimizers, groups, route
from thinwire.pipeline import Twin, frames
from thinwire.stiefel import orthogonality_error

MAPL = codecs.get("mapl", rank=4, anchor_rank=3, wire_format="fp32")
IDENTITY = codecs.get("identity", wire_format="fp32")


def optimizers_of(twin: Twin) -> list[torch.optim.Optimizer]:
    named = [pair for stage in twin.stages for pair in stage.named_parameters()]
    return build_optimizers(groups(route(named, lr=0.02, adamw_lr=0.01, frame_lr=0.002)))


def train(twin: Twin, steps: int = 3) -> None:
    optimizers = optimizers_of(twin)
    for _ in range(steps):
        twin.step(*batch())
        twin.sync.collect()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twin.sync.publish()


def test_owners_and_mirrors_are_listed_in_one_order_on_every_stage() -> None:
    twin = small_twin(MAPL, 4)
    assert [(one.kind, one.owner[1], one.mirror[1]) for one in twin.sync.shared] == [
        *(("frame", f"outbound.{p}.frame_DK", f"inbound.{p}.frame_DK") for p in range(3)),
        *(("anchors", f"anchors.{p}.table_VK", f"sending.{p}.table_VK") for p in (1, 2)),
    ]
    assert small_twin(MAPL, 1).sync.shared == small_twin(IDENTITY, 3).sync.shared == []
    assert [one.kind for one in small_twin(IDENTITY, 3, TIED).sync.shared] == ["tied"]


@pytest.mark.parametrize("name", ["mapl", "free"])
def test_after_steps_both_ends_hold_identical_frames_that_have_moved(name: str) -> None:
    twin = small_twin(codecs.get(name, rank=4, anchor_rank=3), 4)
    before = [frame.detach().clone() for frame in frames(twin.stages).values()]
    train(twin)
    for old, (sender, receiver) in zip(before, pairwise(twin.stages), strict=True):
        assert torch.equal(sender.encoder.frame_DK, receiver.decoder.frame_DK)
        assert not torch.equal(sender.encoder.frame_DK, old)
        assert name == "free" or orthogonality_error(sender.encoder.frame_DK) < 1e-5


def test_frozen_frames_stay() -> None:
    twin = small_twin(codecs.get("fixed", rank=4), 3)
    before = [frame.detach().clone() for frame in frames(twin.stages).values()]
    train(twin)
    assert all(torch.equal(a, b) for a, b in zip(before, frames(twin.stages).values(), strict=True))


def test_sending_anchors_share_storage_with_their_owner() -> None:
    twin = small_twin(MAPL, 4)
    twin.sync.publish(everything=True)
    optimizers = optimizers_of(twin)
    for stage in twin.stages[1:-1]:
        assert stage.sending_anchors.table_VK is not stage.own_anchors.table_VK
        assert stage.sending_anchors.table_VK.data_ptr() == stage.own_anchors.table_VK.data_ptr()
        assert torch.equal(stage.sending_anchors.basis_KD, stage.own_anchors.basis_KD)
    twin.step(*batch())
    twin.sync.collect()
    for optimizer in optimizers:
        optimizer.step()
    for stage in twin.stages[1:-1]:
        assert stage.own_anchors.table_VK.any()
        assert torch.equal(stage.sending_anchors.table_VK, stage.own_anchors.table_VK)


def test_collecting_adds_both_halves_and_takes_the_mirrors() -> None:
    twin = small_twin(MAPL, 3)
    twin.step(*batch())
    halves = {
        shared: [twin.sync.parameters[end].grad.clone() for end in (shared.owner, shared.mirror)]
        for shared in twin.sync.shared
    }
    twin.sync.collect()
    assert halves
    for shared, (own, other) in halves.items():
        assert torch.equal(twin.sync.parameters[shared.owner].grad, own + other)
        assert twin.sync.parameters[shared.mirror].grad is None


def test_a_mirror_without_a_gradient_counts_as_zero() -> None:
    twin = small_twin(codecs.get("mapl", rank=4, frame_gradient="sender"), 2)
    twin.step(*batch())
    owner = twin.stages[0].encoder.frame_DK
    half = owner.grad.clone()
    twin.sync.collect()
    assert torch.equal(owner.grad, half)


def test_without_any_gradient_collecting_gives_none_and_nothing_moves() -> None:
    twin = small_twin(MAPL, 3)
    twin.sync.collect()
    assert all(parameter.grad is None for stage in twin.stages for parameter in stage.parameters())


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_tied_head_gets_the_gradient_of_the_whole_model(num_stages: int) -> None:
    whole = small_model(TIED)
    loss(whole(batch()[0]), batch()[1]).backward()
    twin = small_twin(IDENTITY, num_stages, TIED)
    twin.step(*batch())
    twin.sync.collect()
    got = {name: p for stage in twin.stages for name, p in stage.model.named_parameters() if p.grad is not None}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(got[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)


def test_a_tied_head_on_a_stage_of_its_own_is_summed_and_published() -> None:
    twin = small_twin(IDENTITY, 2, TIED)
    first, last = twin.stages
    last.model.head = torch.nn.Linear(CONFIG.dim, CONFIG.vocab_size, bias=False)  # as another process would hold it
    twin = twin_of(twin.stages)
    twin.sync.publish(everything=True)
    assert torch.equal(last.model.head.weight, first.model.embedding.weight)
    twin.step(*batch())
    whole = small_model(TIED)
    loss(whole(batch()[0]), batch()[1]).backward()
    twin.sync.collect()
    torch.testing.assert_close(first.model.embedding.weight.grad, whole.embedding.weight.grad, rtol=1e-4, atol=1e-5)


def test_starting_spans_the_principal_directions_or_keeps_the_random_frame() -> None:
    for init, changes in (("pca", True), ("random", False)):
        twin = small_twin(codecs.get("mapl", rank=4, anchor_rank=3, init=init), 3)
        before = {name: frame.detach().clone() for name, frame in frames(twin.stages).items()}
        twin.start(batch()[0])
        for name, frame in frames(twin.stages).items():
            assert torch.equal(frame, before[name]) is not changes
        for sender, receiver in pairwise(twin.stages):
            assert torch.equal(sender.encoder.frame_DK, receiver.decoder.frame_DK)


def test_in_one_process_synchronising_is_free() -> None:
    twin = small_twin(MAPL, 3)
    train(twin, steps=1)
    assert twin.sync.ledger.total() == 0


def test_a_batch_of_another_shape_is_refused() -> None:
    for rows, tokens in ((3, 5), (4, 6), (0, 5)):
        with pytest.raises(ConfigError, match=r"batch of shape .*allowed: \(4, 5\): 2 microbatches of \(2, 5\)"):
            small_twin(IDENTITY, 2).step(*batch(rows, tokens))
