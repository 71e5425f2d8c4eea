"""SPEL: steepest descent in spectral norm on the Stiefel manifold ("Manifold constrained steepest descent",
arXiv 2601.21487), the rule by which MAPL (arXiv 2606.05484) trains its frames:

    g_R = g - A sym(A^T g)          tangent projection
    m   = beta m + (1 - beta) g_R
    d   = polar(m)                  spectral-norm steepest descent
    A  <- retract(A - lr d)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.polar import polar
from thinwire.stiefel import orthogonality_error, project_tangent, retract

MAX_FRAME_LR = 0.05  # beyond, A - lr d leaves the range in which the retraction is exact to 1e-6


def spel_step(frame_DK: Tensor, momentum_DK: Tensor, lr: float) -> Tensor:
    """Return the next frame: one step of length `lr` (spectral norm) against the direction of the momentum."""
    return retract(frame_DK - lr * polar(momentum_DK, dtype=torch.float32))


def _check_rates(lr: float, momentum: float) -> None:
    if not 0 <= lr <= MAX_FRAME_LR or not 0 <= momentum < 1:
        raise ConfigError(
            f"frame lr {lr} and momentum {momentum}",
            f"lr in [0, {MAX_FRAME_LR}], momentum in [0, 1)",
            "frames take small steps: MAPL's are a tenth of the main rate",
        )


class Spel(torch.optim.Optimizer):
    """Trains frames; they stay orthonormal to 1e-6. Float32, no weight decay, `p.grad` is read only.

    Args:
        params: `(D, K)` orthonormal matrices, or groups of them.
        lr: step in spectral norm, at most 0.05; MAPL uses 0.1 times the main rate.
        momentum: beta.

    Raises:
        ConfigError: a rate or momentum out of range, or a parameter that is not an orthonormal float32 matrix.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.002, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its state is made at once, so that a checkpoint finds it."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_rates(group["lr"], group["momentum"])
        for p in group["params"]:
            if p.dim() != 2 or p.dtype != torch.float32:
                raise ConfigError(f"a frame of {p.dtype} {tuple(p.shape)}", "float32 matrices D x K, K <= D")
            if p.size(0) < p.size(1) or not orthogonality_error(p) <= 1e-3:
                raise ConfigError(
                    f"a frame {tuple(p.shape)} with orthogonality error {orthogonality_error(p):.1e}",
                    "orthonormal columns",
                    "start from random_frame",
                )
            self.state[p]["momentum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check_rates(group["lr"], group["momentum"])
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group["lr"], group["momentum"])
        return loss

    def _step(self, p: Tensor, lr: float, beta: float) -> None:
        momentum: Tensor = self.state[p]["momentum"]
        momentum.lerp_(project_tangent(p, p.grad), 1 - beta)  # type: ignore[arg-type]
        if lr:  # the retraction alone would move the last bits
            p.copy_(spel_step(p, momentum, lr))

    def orthogonality_error(self) -> float:
        """The largest `max |A^T A - I|` over all frames."""
        return max((orthogonality_error(p) for group in self.param_groups for p in group["params"]), default=0.0)
