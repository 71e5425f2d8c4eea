"""What every optimizer must and must not do, whatever its rule."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from thinwire.errors import ConfigError
from thinwire.optim import METHODS, DataParallel, SignMuon, build_optimizers, param_groups
from thinwire.optim.buckets import make_buckets
from thinwire.optim.means import AdamWRule
from thinwire.optim.rule import Rule
from thinwire.optim.signs import SignumRule

LR = 0.01
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHODS},
    "signmuon-feedback": ("signmuon", {"feedback": True, "local_polar": True}),
    "signum-feedback": ("signum", {"feedback": True}),
    "signmuon-vote": ("signmuon", {"aux": "vote"}),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Small(nn.Module):
    """A table, a fused projection, filters, a norm, a bias, and a weight that nothing uses."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, dtype=dtype)
        self.fused = nn.Linear(6, 8, dtype=dtype)
        self.filters = nn.Parameter(torch.randn(3, 2, 2, 2).to(dtype))
        self.norm = nn.Parameter(torch.ones(8, dtype=dtype))
        self.idle = nn.Linear(5, 5, dtype=dtype)

    def fused_splits(self) -> dict[str, Sequence[int]]:
        return {"fused.weight": (5, 3)}

    def fill(self, seed: int) -> None:
        """Give everything a gradient but what is idle; rows of the table are zero."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if "idle" not in name:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
                if "table" in name:
                    p.grad[1:4] = 0


def made(case: str, model: nn.Module, rate: float = LR, **more: Any) -> DataParallel:
    name, options = CASES[case]
    (optimizer,) = build_optimizers(param_groups(model, rate), name, **options, **more)
    return optimizer


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run(model: Small, optimizer: DataParallel, start: int, stop: int) -> None:
    """Steps of all virtual workers, every one with gradients of its own."""
    for step in range(start, stop):
        for worker in optimizer.workers.here:
            model.fill(100 * step + worker)
            optimizer.next_worker()
        optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_read_only_and_everything_with_one_moves(case: str, dtype: torch.dtype) -> None:
    model = Small(dtype)
    model.fill(0)
    before = values(model)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    made(case, model, rate=0.1).step()
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        if "idle" in name:
            assert torch.equal(p, old) and p.grad is None, name
        else:
            assert torch.equal(p.grad, gradients[name]) and not torch.equal(p, old) and p.isfinite().all(), name


@pytest.mark.parametrize("case", CASES)
def test_what_has_no_gradient_neither_moves_nor_decays(case: str) -> None:
    model = Small()
    before = values(model.idle)
    decay = {"aux_decay": 0.5} if case not in ("adamw", "sgd") else {}
    optimizer = made(case, model, **({"weight_decay": 0.5} | decay))
    run(model, optimizer, 0, 3)
    assert equal(values(model.idle), before)
    assert not any(value.any() for p in model.idle.parameters() for value in optimizer.state[p].values())


@pytest.mark.parametrize("case", CASES)
def test_a_rate_of_zero_moves_nothing(case: str) -> None:
    model = Small()
    before = values(model)
    optimizer = made(case, model, weight_decay=0.5)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    run(model, optimizer, 0, 2)
    assert equal(values(model), before)


@pytest.mark.parametrize("case", CASES)
def test_a_zero_gradient_moves_nothing(case: str) -> None:
    model = Small()
    before = values(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    made(case, model).step()
    assert equal(values(model), before)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_loaded_state_continues_bit_by_bit(case: str, dtype: torch.dtype, workers: int) -> None:
    model = Small(dtype)
    optimizer = made(case, model, virtual_workers=workers, ties="random")
    run(model, optimizer, 0, 2)
    twin = copy.deepcopy(model)
    resumed = made(case, twin, virtual_workers=workers, ties="random")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, 2, 4)
    run(twin, resumed, 2, 4)
    assert equal(values(twin), values(model))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        mine, loaded = optimizer.state[p], resumed.state[q]
        assert mine.keys() == loaded.keys() and equal(list(mine.values()), list(loaded.values()))


@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (3, 1), (3, 2)])
def test_another_number_of_workers_starts_with_the_mean(
    saved: int, loaded: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = Small()
    before = made("signmuon-feedback", model, virtual_workers=saved)
    run(model, before, 0, 3)
    after = made("signmuon-feedback", model, virtual_workers=loaded)
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        after.load_state_dict(before.state_dict())
    assert "another number of workers: every worker starts with the mean" in caplog.text
    for p in (model.fused.weight, model.filters):
        for name in ("momentum", "feedback"):
            mean = torch.stack([before.worker_state(p, j)[name] for j in range(saved)]).mean(0)
            for here in range(loaded):
                assert torch.equal(after.worker_state(p, here)[name], mean)
    run(model, after, 3, 4)


def test_the_same_number_of_workers_is_loaded_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    model = Small()
    optimizer = made("signmuon", model, virtual_workers=2)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not caplog.text


def test_a_state_of_other_options_is_refused() -> None:
    model = Small()
    with pytest.raises(ConfigError, match=r"'feedback'.*use the options it was saved with"):
        made("signmuon", model).load_state_dict(made("signmuon-feedback", model).state_dict())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_momenta_are_at_least_float32(case: str, dtype: torch.dtype) -> None:
    model = Small(dtype)
    optimizer = made(case, model)
    state = optimizer.state[model.fused.weight]
    for name in ("momentum", "exp_avg", "exp_avg_sq"):
        assert name not in state or state[name].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_rates_below_zero_are_refused_for_all_and_for_one_group(case: str) -> None:
    name, options = CASES[case]
    with pytest.raises(ConfigError, match=r"lr=-1.*0 or more"):
        METHODS[name]([nn.Parameter(torch.ones(2, 2))], lr=-1, **options)
    with pytest.raises(ConfigError, match=r"lr=-1.*0 or more"):
        METHODS[name]([{"params": [nn.Parameter(torch.ones(2, 2))], "lr": -1}], **options)
    with pytest.raises(ConfigError, match=r"lr=-1.*0 or more"):
        METHODS[name]([{"params": [nn.Parameter(torch.ones(2))], "lr": -1, "rule": "adamw"}], **options)


@pytest.mark.parametrize("case", CASES)
def test_sparse_gradients_are_refused(case: str) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"sparse gradients.*sparse=False"):
        made(case, model).step()


@pytest.mark.parametrize("case", CASES)
def test_a_closure_is_called_with_gradients_on(case: str) -> None:
    p, target = nn.Parameter(torch.randn(4, 3)), torch.randn(4, 3)
    name, options = CASES[case]
    optimizer = METHODS[name]([p], lr=LR, **options)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p - target).square().sum()
        loss.backward()
        return float(loss.detach())

    losses = [optimizer.step(closure) for _ in range(30)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("case", CASES)
def test_gradients_that_are_not_finite_leave_everything_as_it_is(case: str) -> None:
    model = Small()
    optimizer = made(case, model)
    run(model, optimizer, 0, 1)
    before, state = values(model), copy.deepcopy(optimizer.state_dict())
    model.fill(1)
    model.norm.grad[3] = torch.nan
    with pytest.warns(RuntimeWarning, match=r"worker 0 abstained .* gradient of norm is not finite"):
        optimizer.step()
    optimizer.step()  # in silence
    assert optimizer.abstained == 2
    assert equal(values(model), before)
    for one, old in zip(optimizer.state_dict()["state"].values(), state["state"].values(), strict=True):
        assert equal(list(one.values()), list(old.values()))
    assert [g["steps"] for g in optimizer.param_groups] == [g["steps"] for g in state["param_groups"]]


def test_virtual_workers_are_counted() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = SignMuon([p], virtual_workers=3)
    p.grad = torch.ones(2, 2)
    with pytest.raises(ConfigError, match=r"gradients of 1 workers.*all 3 virtual workers.*next_worker"):
        optimizer.step()
    optimizer = SignMuon([p], virtual_workers=2)
    for _ in range(2):
        optimizer.next_worker()
    with pytest.raises(ConfigError, match=r"gradients of worker 3.*step\(\)"):
        optimizer.next_worker()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"bucket_elements": 0}, "bucket_elements=0"),
        ({"virtual_workers": 0}, "virtual_workers=0"),
        ({"ties": "coin"}, "'coin'"),
        ({"transport": "pigeon"}, "'pigeon'"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SignMuon([nn.Parameter(torch.ones(2, 2))], **arguments)


def test_a_rate_is_given_once() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"lr=0\.001 beside groups with lr=0\.02"):
        thinwire.SignMuon(thinwire.param_groups(model), lr=1e-3)
    assert thinwire.SignMuon(thinwire.param_groups(model, lr=0.5), lr=0.5).param_groups[0]["lr"] == 0.5
    assert thinwire.SignMuon([model[0].weight]).param_groups[0]["lr"] == 1e-3
    assert thinwire.Muon([model[0].weight]).param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("signs", [[1.0], torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex64)])
def test_a_vote_is_on_dense_real_numbers(signs: object) -> None:
    with pytest.raises(ConfigError, match="dense tensors of real numbers"):
        thinwire.majority_vote(signs)


def test_copies_step_like_their_original() -> None:
    model = nn.Linear(3, 4, bias=False)
    optimizer = thinwire.SignMuon([model.weight])
    model.weight.grad = torch.randn(4, 3)
    pair = copy.deepcopy((model, optimizer))
    pair[0].weight.grad = model.weight.grad.clone()
    for one in (optimizer, pair[1]):
        one.step()
    assert torch.equal(pair[0].weight, model.weight)


def test_a_state_of_another_method_or_shape_changes_nothing() -> None:
    ours = thinwire.SignMuon([nn.Parameter(torch.ones(4, 6))], lr=0.5)
    for other in (thinwire.Muon([nn.Parameter(torch.ones(4, 6))]), thinwire.SignMuon([nn.Parameter(torch.ones(1, 6))])):
        with pytest.raises(ConfigError, match="a state"):
            ours.load_state_dict(other.state_dict())
        assert ours.param_groups[0]["lr"] == 0.5


def test_feedback_does_not_vote_where_there_is_no_gradient() -> None:
    p = nn.Parameter(torch.zeros(4))
    optimizer = thinwire.SignSGD([p], lr=1.0, feedback=True)
    p.grad = torch.tensor([1.0, 2.0, 3.0, -4.0])
    optimizer.step()
    before = p.detach().clone()
    p.grad = torch.tensor([1.0, 0.0, 0.0, 0.0])
    optimizer.step()
    assert torch.equal(p[1:], before[1:]) and p[0] != before[0]


@pytest.mark.parametrize("method", [thinwire.Signum, thinwire.SignSGD, thinwire.DistributedLion])
def test_without_votes_nothing_decays(method: type[DataParallel]) -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.zeros(4)
    method([p], lr=0.1, weight_decay=0.1).step()
    assert torch.equal(p, torch.ones(4))


def test_a_worker_without_any_gradient_is_missed() -> None:
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = thinwire.SignMuon([p], virtual_workers=2)
    p.grad = torch.randn(4, 4)
    optimizer.next_worker()
    with pytest.raises(ConfigError, match="gradients of 1 workers"):
        optimizer.step()
    p.grad = torch.randn(4, 4)
    optimizer.step()


def test_means_travel_in_floating_point() -> None:
    with pytest.raises(ConfigError, match=r"aux_dtype=torch\.int8"):
        thinwire.SignMuon([nn.Parameter(torch.ones(2, 2))], aux_dtype=torch.int8)


@pytest.mark.parametrize(("rule", "buckets"), [(AdamWRule(), 1), (SignumRule(), 2)])
def test_positions_part_only_what_is_voted_on(rule: Rule, buckets: int) -> None:
    group = {"params": [nn.Parameter(torch.zeros(70)) for _ in range(3)], "splits": [()] * 3, "positions": [10, 12, 99]}
    made = make_buckets([(group, rule)], [True] * 3, 1 << 20)
    assert len(made) == buckets and [i for bucket in made for i in bucket.indices] == [0, 1, 2]
    assert [bucket.first_word for bucket in made] == ([10, 99] if buckets == 2 else [0])


def test_ties_do_not_depend_on_what_else_has_a_gradient() -> None:
    def last(idle: bool) -> Tensor:
        several = [nn.Parameter(torch.zeros(70)) for _ in range(3)]
        optimizer = thinwire.SignSGD(several, lr=1.0, ties="random", virtual_workers=2)
        for sign in (1.0, -1.0):
            for p in several[idle:]:
                p.grad = torch.full((70,), sign)
            optimizer.next_worker()
        optimizer.step()
        return several[2].detach()

    assert torch.equal(last(idle=True), last(idle=False)) and len(last(idle=True).unique()) == 2


@pytest.mark.parametrize("lacking", ["no gradient", "zeros", "abstains"])
def test_with_feedback_the_step_is_the_mean_over_those_who_vote(lacking: str) -> None:
    p, rows = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(3, 2))
    optimizer = thinwire.SignSGD([p, rows], lr=1.0, feedback=True, virtual_workers=3)
    for worker, size in enumerate((2.0, 4.0, 0.0)):
        p.grad = torch.full((4,), size) if size or lacking == "zeros" else None
        rows.grad = torch.zeros(3, 2)
        rows.grad[worker] = 1.0
        if not size and lacking == "abstains":
            optimizer.abstain()
        optimizer.next_worker()
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((4,), -3.0))
    assert torch.equal(rows.detach()[:2], torch.full((2, 2), -1.0))  # not diluted by the rows that nobody touched


def test_who_is_told_to_abstain_is_counted_in_silence() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = thinwire.Signum([p], virtual_workers=3)
    for worker in range(3):
        p.grad = torch.full((2, 2), torch.inf if worker else 1.0)
        if worker:
            optimizer.abstain()
        optimizer.next_worker()
    optimizer.step()
    assert optimizer.abstained == 2 and bool((p < 1).all())


def kept(p: nn.Parameter) -> Tensor:
    p.grad = torch.ones(3)
    return p.grad


def flat(p: nn.Parameter) -> Tensor:
    buffer = torch.ones(9)
    p.grad = buffer[3:6]
    return buffer


def detached(p: nn.Parameter) -> Tensor:
    p.grad = torch.ones(3)
    return p.grad.data


@pytest.mark.parametrize("hold", [kept, flat, detached])
def test_recorded_gradients_are_nobody_elses(hold: Callable[[nn.Parameter], Tensor]) -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer = thinwire.SGD([p], lr=1.0, momentum=0.0, virtual_workers=2)
    for _ in range(2):
        held = hold(p)
        optimizer.next_worker()
        held.zero_()
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((3,), -1.0))


def test_who_trains_alone_among_others_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = thinwire.SignMuon([torch.nn.Parameter(torch.zeros(2, 2))])
    optimizer.step()
    assert not caplog.text
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    optimizer.step()
    optimizer.step()
    assert caplog.text.count("trains alone") == 1
    assert "SignMuon trains alone (group=None) in one of 4 processes" in caplog.text


def test_strides_of_a_parameter_do_not_decide_bits() -> None:
    """One worker here and two alike, of which each casts the same vote, end with the same weights."""
    ends = []
    for num_workers in (1, 2):
        generator = torch.Generator().manual_seed(3)
        p = nn.Parameter(torch.randn(48, 64, generator=generator).t())
        optimizer = SignMuon([p], lr=0.02, feedback=True, virtual_workers=num_workers)
        for _ in range(6):
            gradient = torch.randn(48, 64, generator=generator).t()
            for _ in range(num_workers):
                p.grad = gradient.clone()
                optimizer.next_worker()
            optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends)


def test_feedback_survives_gradients_whose_sum_overflows() -> None:
    p = nn.Parameter(torch.zeros(64, 64))
    optimizer = thinwire.SignSGD([p], lr=1.0, feedback=True)
    p.grad = torch.full((64, 64), 1e36)
    optimizer.step()
    assert p.isfinite().all() and optimizer.state[p]["feedback"].isfinite().all()


def test_the_mean_of_workers_is_the_state_for_another_number_of_them() -> None:
    p = nn.Parameter(torch.zeros(2, 3))
    states = []
    for worker in (1.0, 3.0):
        optimizer = thinwire.Signum([p], lr=0.1)
        p.grad = torch.full_like(p, worker)
        optimizer.step()
        states.append(copy.deepcopy(optimizer.state_dict()))
    mean = thinwire.mean_of_workers(states)
    momenta = [state["state"][0]["momentum"] for state in (*states, mean)]
    torch.testing.assert_close(momenta[2], (momenta[0] + momenta[1]) / 2)
    optimizer.load_state_dict(mean)
    with pytest.raises(ConfigError, match="no states of workers"):
        thinwire.mean_of_workers([])
