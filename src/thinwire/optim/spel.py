"""SPEL: steepest descent in spectral norm on the Stiefel manifold ("Manifold constrained steepest descent",
arXiv 2601.21487), the rule by which MAPL (arXiv 2606.05484) trains its frames:

    g_R = g - A sym(A^T g)          tangent projection
    m   = beta m + (1 - beta) g_R
    d   = polar(m)                  spectral-norm steepest descent
    A  <- retract(A - lr d)
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.polar import polar
from thinwire.stiefel import orthogonality_error, project_tangent, retract

MAX_FRAME_LR = 0.05  # beyond, A - lr d leaves the range in which the retraction is exact to 1e-6


def spel_step(frame_DK: Tensor, momentum_DK: Tensor, lr: float) -> Tensor:
    """Return the next frame: one step of length `lr` (spectral norm) against the direction of the momentum."""
    return retract(frame_DK - lr * polar(momentum_DK, dtype=torch.float32))


def spel_update(frame_DK: Tensor, gradient_DK: Tensor, momentum_DK: Tensor, lr: float, beta: float) -> None:
    """Update momentum and frame in place."""
    check_frame_rates(lr, beta)
    momentum_DK.lerp_(project_tangent(frame_DK, gradient_DK), 1 - beta)
    if lr:  # the retraction alone would move the last bits
        frame_DK.copy_(spel_step(frame_DK, momentum_DK, lr))


def check_frame_rates(lr: float, momentum: float) -> None:
    """Raises ConfigError unless the rates suit the retraction."""
    if not 0 <= lr <= MAX_FRAME_LR or not 0 <= momentum < 1:
        raise ConfigError(
            f"frame lr {lr} and momentum {momentum}",
            f"lr in [0, {MAX_FRAME_LR}], momentum in [0, 1)",
            "frames take small steps: MAPL's are a tenth of the main rate",
        )


def check_frame(p: Tensor) -> None:
    """Raises ConfigError unless `p` is an orthonormal float32 matrix."""
    if p.dim() != 2 or p.dtype != torch.float32:
        raise ConfigError(f"a frame of {p.dtype} {tuple(p.shape)}", "float32 matrices D x K, K <= D")
    if p.size(0) < p.size(1) or not orthogonality_error(p) <= 1e-3:
        raise ConfigError(
            f"a frame {tuple(p.shape)} with orthogonality error {orthogonality_error(p):.1e}",
            "orthonormal columns",
            "start from random_frame",
        )
