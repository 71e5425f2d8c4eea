"""The sign methods of one worker for one matrix, in a few lines each. Nothing is batched, fused or voted on."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from thinwire.polar import polar

FACTORS = {
    "none": lambda rows, columns: 1.0,
    "fan_in": lambda rows, columns: 1 / sqrt(columns),
    "sqrt_mn": lambda rows, columns: 1 / sqrt(rows * columns),
    "rms": lambda rows, columns: 0.2,
}


def sign_muon_step(weight: Tensor, gradient: Tensor, m: Tensor, lr: float, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the next weight and the next momentum."""
    o = {"momentum": 0.95, "average": "ema", "nesterov": False, "weight_decay": 0.0, "decay": "coupled"} | options
    beta, new = o["momentum"], 1.0 if o["average"] == "heavy_ball" else 1 - o["momentum"]
    g = gradient + o["weight_decay"] * weight if o["decay"] == "coupled" else gradient
    m = beta * m + new * g
    vote = polar(beta * m + new * g if o["nesterov"] else m).sign()
    step = polar(vote.float()) if o.get("local_polar") else vote
    factor = FACTORS[o.get("scale", "none")](*weight.shape)
    if o.get("local_polar") and o.get("scale") == "rms":  # the entries of a polar factor are this much smaller
        factor *= sqrt(max(weight.shape))
    kept = 1 - lr * o["weight_decay"] if o["decay"] == "decoupled" else 1.0
    return kept * weight - lr * factor * step, m


def signum_step(weight: Tensor, gradient: Tensor, m: Tensor, lr: float, beta: float) -> tuple[Any, Any]:
    """Where there is a gradient; with beta = 0 this is SignSGD."""
    m = torch.where(gradient != 0, beta * m + (1 - beta) * gradient, m)
    return weight - lr * torch.where(gradient != 0, m.sign(), 0), m


def lion_step(weight: Tensor, gradient: Tensor, m: Tensor, lr: float, betas: tuple[float, float]) -> tuple[Any, Any]:
    """Where there is a gradient."""
    has = gradient != 0
    step = torch.where(has, (betas[0] * m + (1 - betas[0]) * gradient).sign(), 0)
    return weight - lr * step, torch.where(has, betas[1] * m + (1 - betas[1]) * gradient, m)


@dataclass
class Feedback:
    """Error feedback for one matrix."""

    error: Tensor | float = 0.0
    sizes: list[float] = field(default_factory=list)

    def sign(self, direction: Tensor) -> Tensor:
        """The sign of what was left out so far and the direction, times their mean size."""
        total = direction.double() + self.error
        size = total.abs().mean()
        self.error = total - size * total.sign()
        self.sizes.append(float(size))
        return size * total.sign()
