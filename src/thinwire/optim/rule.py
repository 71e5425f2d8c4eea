"""What a rule of training is: its state, what a worker contributes, and the step that follows from what all decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

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

    def check(self, p: Tensor, splits: Sequence[int]) -> None:
        """Raise ConfigError for a parameter that the rule cannot train."""

    def check_group(self, group: Group) -> None:
        """Raise ConfigError for options that the rule takes less of than `options.KINDS` says."""

    def state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        """New state for a parameter: a worker's own where the wire is a vote, else everybody's."""

    def directions(self, slots: Sequence[Slot], gradients: Sequence[Tensor], group: Group) -> list[Tensor]:
        """One worker's directions, to be voted on or averaged; a vote's rule updates the worker's state here."""

    def apply(self, slots: Sequence[Slot], decided: Sequence[Tensor], group: Group, sizes: Sequence[Tensor]) -> None:
        """Move the parameters by what was decided. `sizes[i]`: with error feedback, the mean size of each matrix."""


class Unchecked:
    """Takes every parameter, and every value that `options.KINDS` takes."""

    def check(self, p: Tensor, splits: Sequence[int]) -> None:
        pass

    def check_group(self, group: Group) -> None:
        pass


def has_feedback(rule: Rule, group: Group) -> bool:
    """Whether a group's directions get what the signs left out; options are every group's, means leave nothing out."""
    return rule.wire == "vote" and bool(group.get("feedback"))


def state_names(rule: Rule, group: Group) -> set[str]:
    """What the options of a group want a parameter's state to hold."""
    return {*rule.state(torch.empty(0), group), *(["feedback"] if has_feedback(rule, group) else [])}


def state_dtype(p: Tensor) -> torch.dtype:
    """Of momenta: float32, or float64 for float64."""
    return torch.promote_types(p.dtype, torch.float32)


def zeros_like(p: Tensor) -> Tensor:
    """New state in the shape of a parameter."""
    return torch.zeros_like(p, dtype=state_dtype(p), memory_format=torch.preserve_format)
