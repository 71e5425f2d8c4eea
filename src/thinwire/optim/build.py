"""From routes to optimizers, learning-rate schedules, and clipping over stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.optim.muon import Muon
from thinwire.optim.spel import Spel

Decay = Literal["cosine", "wsd", "constant"]
_RULES = ("muon", "adamw", "spel")
DECAYS: tuple[Decay, ...] = ("cosine", "wsd", "constant")


def build_optimizers(
    groups: Iterable[dict[str, Any]],
    *,
    momentum: float = 0.95,
    frame_momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
) -> list[torch.optim.Optimizer]:
    """Return one optimizer per rule among `groups` (of `param_groups`): Muon, AdamW, SPEL. Only Muon's decay."""
    made: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        if group.get("rule") not in _RULES:
            raise ConfigError(f"a group with rule {group.get('rule')!r}", ", ".join(_RULES), "use param_groups")
        made.setdefault(group["rule"], []).append(group)
    optimizers: list[torch.optim.Optimizer] = []
    if "muon" in made:
        optimizers.append(Muon(made["muon"], momentum=momentum, weight_decay=weight_decay))
    if "adamw" in made:
        optimizers.append(torch.optim.AdamW(made["adamw"], betas=betas, eps=1e-10, weight_decay=0.0))
    if "spel" in made:
        optimizers.append(Spel(made["spel"], momentum=frame_momentum))
    for optimizer in optimizers:
        _create_state(optimizer)
    return optimizers


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create all state now, not at the first step, so that a checkpoint has the same tensors at any time.

    One step with zero gradients and zero rates moves nothing; what it counted is zeroed.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


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
