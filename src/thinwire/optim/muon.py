"""Muon: momentum, orthogonalised (K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks").

    m <- beta m + (1 - beta) g
    u  = (1 - beta) g + beta m        with Nesterov, else m
    W <- (1 - lr wd) W - lr sqrt(max(1, O / I)) polar(u)

Each logical matrix is orthogonalised alone: fused projections are cut into their parts, convolution filters are
viewed as (O, I * kh * kw). Matrices of one shape go through the iteration in one batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.polar import POLAR_EXPRESS, Coefficients, batch_size, named, polar


def logical_matrices(tensor: Tensor, splits: Sequence[int] = ()) -> list[Tensor]:
    """View a weight (or what belongs to it) as the matrices it consists of: `(O, I)` each.

    `splits` are the row counts of fused matrices; further dimensions (convolutions) count as input.
    """
    flat = tensor.flatten(1)
    return list(flat.split(list(splits))) if splits else [flat]


def orthogonalise(matrices: Sequence[Tensor], coefficients: Coefficients | str = POLAR_EXPRESS) -> list[Tensor]:
    """Return the polar factor of each matrix; those of equal shape are computed together, `batch_size` at a time."""
    by_shape: dict[tuple[torch.Size, torch.device], list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        by_shape[matrix.shape, matrix.device].append(i)
    result: list[Tensor] = [torch.empty(0)] * len(matrices)
    for indices in by_shape.values():
        size = batch_size(matrices[indices[0]])
        for start in range(0, len(indices), size):
            some = indices[start : start + size]
            batch = torch.stack([matrices[i] for i in some]) if len(some) > 1 else matrices[some[0]].unsqueeze(0)
            for i, factor in zip(some, polar(batch, coefficients), strict=True):
                result[i] = factor
    return result


def _check(lr: float, momentum: float, weight_decay: float) -> None:
    if not (0 <= lr < math.inf and 0 <= momentum < 1 and 0 <= weight_decay < math.inf):
        raise ConfigError(
            f"Muon with lr={lr}, momentum={momentum}, weight_decay={weight_decay}",
            "lr and weight_decay of 0 or more, momentum in [0, 1)",
        )


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices, one process.

    Args:
        params: weights of two dimensions or more, or groups of them, as `param_groups` makes them (`splits` in a group
            gives the row counts of fused matrices, one tuple per parameter).
        lr: step in spectral norm; a square matrix moves by `lr` in every direction it moves in.
        momentum: beta.
        weight_decay: decoupled.
        coefficients: of the polar iteration, by name or by value.

    `p.grad` is read only, parameters without a gradient do not move. Momentum is kept in float32.

    Raises:
        ConfigError: a negative rate, a momentum outside [0, 1), or a parameter of fewer than two dimensions.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        coefficients: Coefficients | str = POLAR_EXPRESS,
    ) -> None:
        self.coefficients = named(coefficients)
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its state is made at once, so that a checkpoint finds it."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check(group["lr"], group["momentum"], group["weight_decay"])
        group.setdefault("splits", [() for _ in group["params"]])
        for p, splits in zip(group["params"], group["splits"], strict=True):
            if p.dim() < 2 or not p.numel() or not p.is_floating_point():
                given = f"Muon for a parameter of {p.dtype} {tuple(p.shape)}"
                raise ConfigError(given, "real matrices, two dimensions or more", "use AdamW")
            if splits and (sum(splits) != p.size(0) or min(splits) < 1):
                raise ConfigError(f"splits {tuple(splits)}", f"row counts that add up to {p.size(0)}")
            self.state[p]["momentum"] = torch.zeros_like(p, dtype=torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch would round the float32 momentum of bfloat16 parameters."""
        super().load_state_dict(state_dict)
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        parameters = (p for group in self.param_groups for p in group["params"])
        for key, p in zip(keys, parameters, strict=True):
            saved = state_dict["state"][key]["momentum"]
            self.state[p]["momentum"] = saved.to(p.device, torch.float32, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        moving = [(p, splits) for p, splits in zip(group["params"], group["splits"], strict=True) if p.grad is not None]
        directions = [self._direction(p, group) for p, _ in moving]
        matrices = [m for d, (_, splits) in zip(directions, moving, strict=True) for m in logical_matrices(d, splits)]
        factors = iter(orthogonalise(matrices, self.coefficients))
        for p, splits in moving:
            p.mul_(1 - group["lr"] * group["weight_decay"])
            parts = [next(factors) for _ in logical_matrices(p, splits)]
            update = torch.cat([max(1.0, part.size(0) / part.size(1)) ** 0.5 * part for part in parts])
            p.sub_(update.view(p.shape), alpha=group["lr"])

    def _direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum and return what is to be orthogonalised, float32."""
        beta = group["momentum"]
        gradient = p.grad
        assert gradient is not None
        momentum: Tensor = self.state[p]["momentum"]
        momentum.lerp_(gradient.float(), 1 - beta)
        return torch.lerp(gradient.float(), momentum, beta) if group["nesterov"] else momentum
