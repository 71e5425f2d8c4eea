"""What optimizers refuse: values, names and parameters, at any time, and that a refusal changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from thinwire.errors import ConfigError
from thinwire.optim import METHODS, DataParallel, Spel
from thinwire.optim.methods import options_of
from thinwire.optim.options import KINDS
from thinwire.stiefel import random_frame

NAN, INF = float("nan"), float("inf")
RATES: list[Any] = [-1, NAN, INF, "1", None, True, [0.1], 1j, torch.tensor(0.1), 10**400]
WORDS: list[Any] = ["foo", "", None, 0, True, ["zero"], b"zero", torch.ones(2)]
FLAGS: list[Any] = [0, 1, "yes", None, torch.tensor(True)]
DTYPES: list[Any] = [torch.int8, torch.float8_e4m3fn, torch.complex64, "bfloat16", None]
ODD: dict[str, list[Any]] = {
    **{name: RATES for name in ("weight_decay", "aux_decay", "eps")},
    "lr": [rate for rate in RATES if rate is not None],
    **{name: [*RATES, 1, 1.0] for name in ("momentum", "frame_momentum", "aux_momentum")},
    "betas": [*RATES, (0.9,), (), (0.9, 0.9, 0.9), (0.9, 1.0), (0.9, NAN), (0.9, "0.9"), "ab", 0.9, {0: 0.9, 1: 0.9}],
    **{name: WORDS for name in ("average", "decay", "scale", "aux", "transport", "ties")},
    **{name: FLAGS for name in ("nesterov", "local_polar", "feedback")},
    "coefficients": ["best", None, [], 3, [(1, 2)], [(1, 2, NAN)], [(1, 2, "3")], [1, 2, 3], "", b"muon"],
    **{name: DTYPES for name in ("wire_dtype", "aux_dtype")},
    "seed": [-1, 1 << 63, 1.5, "1", None, True, NAN],
    "virtual_workers": [0, -1, 1.5, True, "2", None, 10**9],
    "bucket_elements": [0, -1, 1.5, True, "2", None],
    "ledger": ["ledger", 1],
    "link": ["10mbit", 1],
}
CASES = [(name, option) for name, method in METHODS.items() for option in options_of(method) if option != "group"]


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (4, 4)))


@pytest.mark.parametrize(("method", "option"), CASES)
def test_every_option_of_every_method_refuses_odd_values(method: str, option: str) -> None:
    for value in ODD[option]:
        with pytest.raises(ConfigError, match=rf"with {option}=[^;]+; allowed: ."):
            METHODS[method]([weight()], **{option: value})
        if option in METHODS[method]([weight()]).defaults and not (method == "lion" and option == "betas"):
            with pytest.raises(ConfigError, match=rf"with {option}=[^;]+; allowed: ."):
                METHODS[method]([{"params": [weight()], option: value}])


@pytest.mark.parametrize("option", ["lr", "momentum", "virtual_workers", "seed"])
def test_frames_refuse_them_too(option: str) -> None:
    for value in ODD[option]:
        with pytest.raises(ConfigError, match=rf"Spel with {option}="):
            Spel([nn.Parameter(random_frame(6, 2))], **{option: value})


def test_no_option_is_left_out_of_the_table() -> None:
    assert {option for _, option in CASES} <= {*KINDS}


@pytest.mark.parametrize(
    ("method", "option", "match"),
    [
        (
            thinwire.SignSGD,
            {"momentum": 0.9},
            r"SignSGD with momentum; allowed: lr, .*an option of SignMuon, Signum, Muon",
        ),
        (
            thinwire.Muon,
            {"feedback": True},
            r"Muon with feedback; .*option of SignMuon, Signum, SignSGD, DistributedLion$",
        ),
        (thinwire.AdamW, {"scale": "rms"}, r"AdamW with scale; .*option of SignMuon$"),
        (thinwire.AdamW, {"main": 1}, r"AdamW with main; .*no method has it"),
        (thinwire.Spel, {"aux": "vote"}, r"Spel with aux; allowed: lr, momentum, group"),
        (thinwire.SGD, {"learning_rate": 1}, r"SGD with learning_rate; .*no method has it"),
    ],
)
def test_another_methods_option_is_told_from_a_typing_error(method: Any, option: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        method([weight()], **option)


def test_a_group_has_its_methods_options_only() -> None:
    with pytest.raises(ConfigError, match=r"Muon with feedback; .*option of SignMuon"):
        thinwire.Muon([{"params": [weight()], "feedback": True}])
    with pytest.raises(ConfigError, match="Muon with ties"):
        thinwire.Muon([{"params": [weight()], "ties": "random"}])
    assert thinwire.Muon([{"params": [weight()], "comment": "mine"}]).param_groups[0]["comment"] == "mine"


PARAMETERS: dict[str, Callable[[], Any]] = {
    "none": list,
    "only empty groups": lambda: [{"params": []}, {"params": []}],
    "all frozen": lambda: [nn.Parameter(torch.ones(2, 2), requires_grad=False)],
    "float8": lambda: [nn.Parameter(torch.ones(2, 2).to(torch.float8_e4m3fn))],
    "integers": lambda: [weight(), nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False)],
    "complex": lambda: [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))],
    "sparse": lambda: [nn.Parameter(torch.eye(2).to_sparse())],
    "a dict": lambda: dict(nn.Linear(2, 2).named_parameters()),
    "one group": lambda: {"params": [weight()]},
    "a module": lambda: nn.Linear(2, 2),
    "a sequence of modules": lambda: nn.Sequential(nn.Linear(2, 2)),
    "modules": lambda: [nn.Linear(2, 2)],
    "one tensor": weight,
    "a set": lambda: {weight()},
    "a word": lambda: "weight",
    "a number": lambda: 3,
    "numbers": lambda: [1.0],
    "no leaf": lambda: [weight() * 2],
    "twice": lambda: [weight()] * 2,
    "in two groups": lambda: [{"params": [p]} for p in [weight()] * 2],
    "a group without parameters": lambda: [{"lr": 0.1}],
    "a group in a list": lambda: [{"params": [weight()]}, [weight()]],
    "a dict in a group": lambda: [{"params": {"a": weight()}}],
    "an unknown rule": lambda: [{"params": [weight()], "rule": ["muon"]}],
    "too few splits": lambda: [{"params": [weight(), weight()], "splits": [()]}],
    "odd splits": lambda: [{"params": [weight()], "splits": [("a", "b")]}],
    "too many names": lambda: [{"params": [weight()], "names": ["a", "b"]}],
}  # fmt: skip


@pytest.mark.parametrize("method", [thinwire.SignMuon, thinwire.Muon])
@pytest.mark.parametrize("given", PARAMETERS)
def test_parameters_that_cannot_be_trained_are_refused(given: str, method: type[DataParallel]) -> None:
    with pytest.raises(ConfigError, match="; allowed:"):
        method(PARAMETERS[given]())


def test_names_and_frozen_ones_among_others_are_taken() -> None:
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    optimizer = thinwire.SignSGD(model.named_parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


# --- nothing is changed by what is refused --------------------------------------------------------------------------


def seen(optimizer: DataParallel) -> Any:
    return copy.deepcopy((optimizer.state_dict(), len(optimizer.state)))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def stepped() -> tuple[nn.Parameter, DataParallel]:
    p = weight()
    optimizer = thinwire.Signum([p], lr=0.1)
    p.grad = torch.randn(4, 4)
    optimizer.step()
    return p, optimizer


@pytest.mark.parametrize(
    "group",
    [
        {"params": [weight(), nn.Parameter(torch.ones(2, dtype=torch.complex64))]},
        {"params": [weight()], "lr": NAN},
        {"params": [weight()], "rule": "other"},
        {"params": [weight()], "scale": "rms"},
        {"params": [weight() * 2]},
        [weight()],
    ],
    ids=["complex", "lr", "rule", "option", "leaf", "list"],
)
def test_a_refused_group_leaves_no_trace(group: Any) -> None:
    _, optimizer = stepped()
    before, given = seen(optimizer), copy.copy(group)
    with pytest.raises(ConfigError):
        optimizer.add_param_group(group)
    assert same(seen(optimizer), before)
    assert not isinstance(group, dict) or group.keys() == given.keys()
    optimizer.step()


def test_groups_can_be_given_to_two_optimizers() -> None:
    model = nn.Linear(3, 3)
    made = thinwire.param_groups(model, lr=0.1)
    first, second = thinwire.SignMuon(made, momentum=0.5), thinwire.SignMuon(made, momentum=0.7)
    assert (first.param_groups[0]["momentum"], second.param_groups[0]["momentum"]) == (0.5, 0.7)


def spoil_group(state: Any) -> Any:
    state["param_groups"][0]["lr"] = NAN
    return state


def spoil_shape(state: Any) -> Any:
    state["state"][0]["momentum"] = torch.ones(2, 3, 4, 4)
    return state


def spoil_value(state: Any) -> Any:
    state["state"][0]["momentum"] = 0.5
    return state


@pytest.mark.parametrize(
    "spoil", [spoil_group, spoil_shape, spoil_value, lambda state: {}, lambda state: None, lambda state: {"state": {}}]
)
def test_a_refused_state_changes_nothing(spoil: Callable[[Any], Any]) -> None:
    _, optimizer = stepped()
    before = seen(optimizer)
    with pytest.raises(ConfigError, match="; allowed:"):
        optimizer.load_state_dict(spoil(copy.deepcopy(optimizer.state_dict())))
    assert same(seen(optimizer), before)


@pytest.mark.parametrize("option", ["lr", "momentum", "weight_decay"])
def test_options_changed_between_steps_are_checked_before_anything_moves(option: str) -> None:
    for value in ODD[option]:
        p, optimizer = stepped()
        before, state = p.detach().clone(), seen(optimizer)
        good = optimizer.param_groups[0][option]
        optimizer.param_groups[0][option] = value
        with pytest.raises(ConfigError, match=f"Signum with {option}="):
            optimizer.step()
        optimizer.param_groups[0][option] = good
        assert torch.equal(p, before) and same(seen(optimizer), state)
        optimizer.step()


def test_options_that_need_another_state_stay_as_they_were() -> None:
    for method, option, value in ((thinwire.SignSGD, "momentum", 0.9), (thinwire.Signum, "feedback", True)):
        p = weight()
        optimizer = method([p], lr=0.1)
        optimizer.param_groups[0][option] = value
        with pytest.raises(ConfigError, match=r"a state of .*build another"):
            optimizer.step()


def test_a_frames_rate_is_checked_at_every_step() -> None:
    p = nn.Parameter(random_frame(6, 2))
    optimizer = Spel([p], lr=0.01)
    p.grad = torch.randn(6, 2)
    optimizer.param_groups[0]["lr"] = 0.06
    before = optimizer.state[p]["momentum"].clone()
    with pytest.raises(ConfigError, match="tenth of the main rate"):
        optimizer.step()
    assert torch.equal(optimizer.state[p]["momentum"], before)


def test_what_the_exchange_goes_by_is_checked_at_every_step() -> None:
    for option in ("ties", "transport", "seed"):
        p, optimizer = stepped()
        before = p.detach().clone()
        setattr(optimizer, option, ODD[option][0])
        with pytest.raises(ConfigError, match=f"Signum with {option}="):
            optimizer.step()
        assert torch.equal(p, before)


def test_a_state_saved_under_a_schedule_is_taken_by_an_optimizer_without_one() -> None:
    p, optimizer = stepped()
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    other = thinwire.Signum([weight()], lr=0.3)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["initial_lr"] == other.param_groups[0]["lr"] == 0.1
    assert torch.equal(*(one.state[q]["momentum"] for one, q in ((optimizer, p), (other, other._parameters()[0]))))
