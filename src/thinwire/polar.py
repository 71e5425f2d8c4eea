"""The polar factor of a matrix by odd polynomials in it, without an SVD.

Every iteration here has the form, with the Gram matrix G = X^T X,

    X <- X (a I + b G + c G^2)

which maps each singular value s to a s + b s^3 + c s^5 and leaves the singular vectors alone. A sequence of such
polynomials that drives all singular values to one computes the polar factor U V^T of X = U S V^T.

Sources: Muon's constants, K. Jordan et al., "Muon"; Polar Express, Amsel et al., arXiv 2505.16932, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Coefficients = Sequence[tuple[float, float, float]]

MUON: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5

# The optimal composition of five quintics for singular values in [1e-3, 1], a safety factor of 1.02 folded in.
POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# The quintic whose value and first two derivatives are right at one: it converges cubically from nearby.
CONVERGED: tuple[float, float, float] = (15 / 8, -10 / 8, 3 / 8)

_SAFETY = 1.02  # keeps the largest singular value below one in spite of rounding


def polar(x: Tensor, coefficients: Coefficients = POLAR_EXPRESS, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the approximate orthogonal polar factor of the last two dimensions of `x`.

    Args:
        x: `(..., O, I)`, any real dtype; each matrix is treated alone.
        coefficients: one `(a, b, c)` per iteration.
        dtype: of the iteration; default float32 on the CPU, bfloat16 on accelerators.

    Returns:
        A tensor of the shape and dtype of `x`. Singular values are 0.86 to 1.14 for the default
        (0.5 to 1.2 for `MUON`) unless they were below a thousandth of the Frobenius norm. A zero matrix gives zero;
        the scale of `x` does not matter. Depends on nothing but `x`: equal inputs give equal outputs on equal hardware.
    """
    work = dtype or (torch.float32 if x.device.type == "cpu" else torch.bfloat16)
    unit = _normalise(x.float()).to(work)
    return newton_schulz(unit, coefficients).to(x.dtype)


def newton_schulz(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Apply the polynomials to `x` `(..., O, I)` as it is, without normalising. Works on the smaller Gram matrix."""
    wide = x.mT if x.size(-2) > x.size(-1) else x
    for a, b, c in coefficients:
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if x.size(-2) > x.size(-1) else wide


def _normalise(x: Tensor) -> Tensor:
    """Divide each matrix by 1.02 times its Frobenius norm, safely from 1e-20 to 1e20 in float32."""
    if x.numel() == 0:
        return x
    largest = x.abs().amax((-2, -1), keepdim=True)
    scaled = x / torch.where(largest > 0, largest, torch.ones_like(largest))
    norm = torch.linalg.matrix_norm(scaled, keepdim=True)
    unit: Tensor = scaled / (_SAFETY * norm.clamp_min(torch.finfo(x.dtype).tiny))
    return unit
