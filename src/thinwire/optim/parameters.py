"""Which parameters an optimizer takes, and how they are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.optim.options import FLOATS
from thinwire.optim.rule import Group


def listed(params: Any) -> list[Any]:
    """Return parameters, or groups of them, as a list.

    Raises:
        ConfigError: one tensor, a module, a mapping, a set (which has no order), or nothing that can be listed.
    """
    if isinstance(params, Tensor | nn.Module | Mapping | Set | str) or not isinstance(params, Iterable):
        raise ConfigError(
            f"parameters given as {type(params).__name__}", "a list of parameters, or a list of groups",
            "give thinwire.param_groups(model) or model.parameters()",
        )  # fmt: skip
    return list(params)


def copied_group(group: Any, rules: Iterable[str]) -> Group:
    """Return a copy of a group, its parameters in a list.

    Raises:
        ConfigError: no group, one of an unknown rule, or one in which a parameter occurs twice.
    """
    if not isinstance(group, dict) or "params" not in group:
        raise ConfigError(f"a group of type {type(group).__name__}", 'a dict with "params"', "use param_groups")
    if group.get("rule", "muon") not in list(rules):
        raise ConfigError(f"a group with rule {group['rule']!r}", ", ".join(rules), "use param_groups")
    params = [group["params"]] if isinstance(group["params"], Tensor) else listed(group["params"])
    tensors = [entry[-1] if isinstance(entry, tuple) and entry else entry for entry in params]
    if len({id(p) for p in tensors}) < len(tensors):
        raise ConfigError("a group with a parameter twice", "each once", "use param_groups, which takes tied ones once")
    return {**group, "params": params}


def check_parameters(group: Group) -> None:
    """Raises ConfigError for parameters that no rule takes, and for lists in the group that do not go with them."""
    for p in group["params"]:
        if type(p) not in (nn.Parameter, Tensor):
            raise ConfigError(f"a parameter of type {type(p).__name__}", "plain parameters, whole on every worker")
        strides = zip(p.shape, p.stride(), strict=True) if p.layout is torch.strided else ()
        if any(size > 1 and stride == 0 for size, stride in strides):
            raise ConfigError(
                f"an expanded parameter {tuple(p.shape)}", "a place in memory for each number", "clone it"
            )
        if p.dtype not in FLOATS or p.layout is not torch.strided:
            raise ConfigError(
                f"a parameter of {p.dtype} {tuple(p.shape)}, {p.layout}", "dense real floating-point numbers",
                "leave it out, as param_groups leaves out what is frozen",
            )  # fmt: skip
    for name in ("names", "splits", "positions"):
        if name in group and (not isinstance(group[name], list | tuple) or len(group[name]) != len(group["params"])):
            raise ConfigError(f"{name}={group[name]!r}", f"a list with an entry for each of {len(group['params'])}")


def check_any_trained(groups: Iterable[Group]) -> None:
    """Raises ConfigError where there is nothing to train."""
    parameters = [p for group in groups for p in group["params"]]
    if not any(p.requires_grad for p in parameters):
        given = f"{len(parameters)} parameters, all frozen" if parameters else "groups without any parameter"
        raise ConfigError(given, "at least one that requires a gradient", "set requires_grad, or build no optimizer")
