"""From routes to optimizers, learning-rate schedules, and clipping over stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.optim.data_parallel import DataParallel
from thinwire.optim.methods import METHODS

Decay = Literal["cosine", "wsd", "constant"]
DECAYS: tuple[Decay, ...] = ("cosine", "wsd", "constant")


def build_optimizers(groups: Iterable[dict[str, Any]], method: str = "muon", **options: Any) -> list[DataParallel]:
    """Return the optimizer of a method for `groups` (of `param_groups`), with all of its state made; [] for no group.

    Raises:
        ConfigError: unknown method, or options that it does not take.
    """
    if method not in METHODS:
        raise ConfigError(f"optimizer {method!r}", ", ".join(METHODS))
    made = list(groups)
    return [METHODS[method](made, **options)] if made else []


def lr_factor(step: int, total_steps: int, *, warmup: int, decay: Decay) -> float:
    """The factor on every rate at `step` (0-based): linear warm-up, then one of the decays.

    cosine: half a cosine from 1 to 0. wsd: constant, then linear to 0 over the last fifth. constant: 1.

    Raises:
        ConfigError: unknown decay.
    """
    if decay not in DECAYS:
        raise ConfigError(f"learning-rate decay {decay!r}", ", ".join(DECAYS))
    if step < warmup:
        return (step + 1) / warmup
    if decay == "constant":
        return 1.0
    if decay == "cosine":
        progress = (step - warmup) / max(1, total_steps - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    left = (total_steps - step) / max(1, total_steps // 5)
    return min(1.0, max(0.0, left))


def set_lr(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's rate to `factor` times its own base rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["base_lr"]


def gradient_square_sum(parameters: Iterable[Tensor]) -> Tensor:
    """Sum of squares of all gradients, float64, on the CPU: stages add theirs to get the norm of the whole model."""
    norms = [p.grad.float().norm() for p in parameters if p.grad is not None]
    return torch.stack(norms).double().square().sum().cpu() if norms else torch.zeros((), dtype=torch.float64)


def clip_gradients(parameters: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale all gradients by `max_norm / norm` where the norm of the whole model exceeds `max_norm`."""
    if norm <= max_norm:
        return
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(max_norm / norm)
