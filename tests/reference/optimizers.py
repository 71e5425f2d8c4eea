"""One step of Muon and of SPEL for one matrix, in float64, written as in the papers."""

from __future__ import annotations

from math import sqrt

from torch import Tensor

from tests.reference.polar import POLAR_EXPRESS, polar, polynomial


def muon_step(
    weight_OI: Tensor, gradient_OI: Tensor, momentum_OI: Tensor, lr: float, beta: float, nesterov: bool, decay: float
) -> tuple[Tensor, Tensor]:
    """Return the next weight and the next momentum."""
    momentum = beta * momentum_OI + (1 - beta) * gradient_OI
    update = beta * momentum + (1 - beta) * gradient_OI if nesterov else momentum
    rows, columns = weight_OI.shape
    shape_factor = sqrt(rows / columns) if rows > columns else 1.0
    return weight_OI - lr * decay * weight_OI - lr * shape_factor * polynomial(update, POLAR_EXPRESS), momentum


def tangent(frame_DK: Tensor, gradient_DK: Tensor) -> Tensor:
    """Return g - A sym(A^T g)."""
    inner = frame_DK.T @ gradient_DK
    symmetric = 0.5 * (inner + inner.T)
    return gradient_DK - frame_DK @ symmetric


def spel_step(
    frame_DK: Tensor, gradient_DK: Tensor, momentum_DK: Tensor, lr: float, beta: float
) -> tuple[Tensor, Tensor]:
    """Return the next frame, retracted exactly, and the next momentum."""
    momentum = beta * momentum_DK + (1 - beta) * tangent(frame_DK, gradient_DK)
    return polar(frame_DK - lr * polynomial(momentum, POLAR_EXPRESS)), momentum
