"""What must agree: between the workers of a step, and between an optimizer and the state it is to load."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.optim.options import KINDS
from thinwire.optim.rule import Group, Rule

_numbered: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_NOT_OPTIONS = ("params", "names", "param_names", "splits", "positions", "base_lr", "rule")


def next_number(group: dist.ProcessGroup | None) -> int:
    """The number of the next optimizer that steps with a group for the first time.

    All that these numbers depend on is what all workers have done together: one that leaves out a step of its first
    optimizer, and meets the others with its second, has another number there, however alike the two are.
    """
    return 0 if group is None else _numbered.get(group, 0) + 1


def assign_number(group: dist.ProcessGroup | None, number: int) -> None:
    """All workers of the group have met with this number."""
    if group is not None:
        _numbered[group] = max(number, _numbered.get(group, 0))


def describe_parameters(groups: Iterable[tuple[Group, Rule]], values: bool) -> tuple[str, ...]:
    """A line per parameter, and per group where its words lie; with `values` also a digest of each parameter."""
    lines = []
    for group, rule in groups:
        for name, p, splits in zip(parameter_names(group), group["params"], group["splits"], strict=True):
            digest = f"; values {_digest(p)}" if values else ""  # replicas that start apart would stay apart
            lines.append(f"{name} {tuple(p.shape)} {p.dtype} {tuple(splits)} {rule.name}{digest}")
        lines.append(f"positions {group.get('positions')}")
    return tuple(lines)


def parameter_names(group: Group) -> list[str]:
    """The names of a group's parameters, or their numbers in it."""
    names = group.get("names") or group.get("param_names")
    return list(names) if names else [f"parameter {i}" for i in range(len(group["params"]))]


def describe_options(groups: Iterable[Group]) -> tuple[str, ...]:
    """A line per group with all that decides a step."""
    return tuple(
        "; ".join(f"{key}={group[key]}" for key in sorted(group) if key not in _NOT_OPTIONS) for group in groups
    )


def check_loadable(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    """Refuse a state of another method, other parameters or other shapes before anything is changed."""
    try:
        ours, theirs = optimizer.param_groups, state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (ours, theirs)]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"a state of groups with {sizes[1]} parameters", f"{sizes[0]}")
        for mine, saved in zip(ours, theirs, strict=True):
            _check_like(mine, saved)
            for p, key in zip(mine["params"], saved["params"], strict=True):
                _check_shapes(p.dim(), optimizer.state[p], state_dict["state"].get(key, {}))
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"a state that cannot be read ({error!r})", "what state_dict() returns") from None


def _check_like(mine: Group, saved: Group) -> None:
    ours = {*KINDS, "names", "splits", "positions", "rule"}  # what else is there belongs to a schedule, or the user
    differ = sorted((mine.keys() ^ saved.keys()) & ours)
    differ = differ or [key for key in ("names", "rule") if mine.get(key) != saved.get(key)]
    if differ:
        raise ConfigError(f"a state of another method or other parameters ({differ})", "this optimizer's own")


def _check_shapes(dim: int, mine: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Of one parameter; states of another number of workers may have another first dimension, or none."""
    found, wanted = ({name: tuple(value.shape) for name, value in state.items()} for state in (saved, mine))
    fits = found.keys() == wanted.keys() and all(
        len(shape) <= dim + 1 and shape[max(0, len(shape) - dim) :] == wanted[name][max(0, len(wanted[name]) - dim) :]
        for name, shape in found.items()
    )
    if not fits:
        raise ConfigError(f"a state with {found}", f"{wanted}", "use the options it was saved with")


def fill_state(mine: dict[str, Tensor], saved: dict[str, Tensor], dim: int) -> bool:
    """Take over the saved state of a parameter of `dim` dimensions; whether it is one of another number of workers."""
    resized = False
    for name, target in mine.items():
        value = saved[name].to(target.device, target.dtype)
        if value.shape != target.shape:
            resized = True
            value = mean_state(list(value) if value.dim() > dim else [value]).expand(target.shape)
        target.copy_(value)
    return resized


def mean_state(states: Sequence[Tensor]) -> Tensor:
    """The rule for another number of workers: everyone continues with the mean of what the saved ones had."""
    return torch.stack([state.float() for state in states]).mean(0).to(states[0].dtype)


def mean_of_workers(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the `state_dict()` with which every worker continues, from those of another number of workers."""
    if not states:
        raise ConfigError("no states of workers", "the state_dict() of every worker that was saved")
    together = {
        key: {name: _mean([theirs["state"][key][name] for theirs in states]) for name in own}
        for key, own in states[0]["state"].items()
    }
    return {**states[0], "state": together}


def _mean(values: Sequence[Tensor]) -> Tensor:
    """To the bit where all are alike, as those of averaged parameters are."""
    return values[0] if all(torch.equal(values[0], value) for value in values) else mean_state(values)


def _digest(p: Tensor) -> str:
    octets = p.detach().contiguous().flatten().view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(octets.data, digest_size=8).hexdigest()
