"""What a rule of training is: its state, what a worker contributes, and the step that follows from what all decided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from thinwire.errors import ConfigError

Group = dict[str, Any]
Wire = Literal["vote", "mean"]


@dataclass
class Slot:
    """A parameter, its logical matrices, and its state: of one worker, or what all share."""

    parameter: Tensor
    splits: Sequence[int]
    state: dict[str, Tensor]


class Rule(Protocol):
    """Mathematics only. `wire` says what crosses the network: signs of the directions, or means of the gradients."""

    name: str
    wire: Wire

    def check(self, p: Tensor, splits: Sequence[int], group: Group) -> None:
        """Raise ConfigError for what the rule cannot train."""

    def state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        """New state for a parameter: a worker's own where the wire is a vote, else everybody's."""

    def directions(self, slots: Sequence[Slot], gradients: Sequence[Tensor], group: Group) -> list[Tensor]:
        """One worker's directions, to be voted on or averaged; a vote's rule updates the worker's state here."""

    def apply(self, slots: Sequence[Slot], decided: Sequence[Tensor], group: Group, sizes: Sequence[Tensor]) -> None:
        """Move the parameters by what was decided. `sizes[i]`: with error feedback, the mean size of each matrix."""


def has_feedback(rule: Rule, group: Group) -> bool:
    """Whether a group's directions get what the signs left out; options are every group's, means leave nothing out."""
    return rule.wire == "vote" and bool(group.get("feedback"))


def state_dtype(p: Tensor) -> torch.dtype:
    """Of momenta: float32, or float64 for float64."""
    return torch.promote_types(p.dtype, torch.float32)


def zeros_like(p: Tensor) -> Tensor:
    """New state in the shape of a parameter."""
    return torch.zeros_like(p, dtype=state_dtype(p), memory_format=torch.preserve_format)


def check_rates(rule: str, **rates: float) -> None:
    """Raises ConfigError unless rates and decays are 0 or more, and momenta (and betas) in [0, 1)."""
    for name, value in rates.items():
        is_fraction = "momentum" in name or "beta" in name
        if not 0 <= value < (1 if is_fraction else math.inf):
            allowed = "momentum in [0, 1)" if is_fraction else f"{name} of 0 or more"
            raise ConfigError(f"{rule} with {name}={value}", allowed)
