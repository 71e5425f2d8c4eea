"""The polar factor, and the polynomials that approach it, through the singular value decomposition in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Copied by hand from the papers, to catch a slip in the package: K. Jordan et al., "Muon"; arXiv 2505.16932.
MUON = [(3.4445, -4.7750, 2.0315)] * 5
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def polar(x: Tensor) -> Tensor:
    """Return U V^T of one matrix x = U S V^T."""
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ vh


def polynomial(x: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    """Return U p(S) V^T of one matrix, S / (1.02 ||x||_F) put through s -> a s + b s^3 + c s^5 for each (a, b, c)."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    norm = s.square().sum().sqrt()
    s = s / (1.02 * norm) if norm > 0 else s
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh
