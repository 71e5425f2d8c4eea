"""Factorised anchors (MAPL, arXiv 2606.05484): `e = E[ids] R`.

The residual stream carries a token-dependent shift of high rank that would use up the frame. Sender and receiver
take it out and put it back from their own tables.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.codecs.base import Anchors
from thinwire.errors import ConfigError
from thinwire.stiefel import random_frame


class FactorisedAnchors(Anchors):
    """A trainable `(V, K')` table `E`, zero at the start, and fixed random orthonormal rows `R`, `(K', D)`.

    Both in float32. `R` never leaves its stage, so the two ends of a boundary need not agree on it.
    """

    def __init__(self, dim: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        if not 0 < rank <= dim:
            raise ConfigError(f"anchor rank {rank}", f"1 to the model's width, {dim} (0 for no anchors)")
        self.table_VK = nn.Parameter(torch.zeros(vocab_size, rank, dtype=torch.float32))
        self.basis_KD: Tensor
        self.register_buffer("basis_KD", torch.empty(rank, dim, dtype=torch.float32))

    def forward(self, ids_BT: Tensor) -> Tensor:
        anchors: Tensor = F.embedding(ids_BT, self.table_VK) @ self.basis_KD
        return anchors

    def project(self, ids_BT: Tensor, frame_DK: Tensor) -> Tensor:
        """`E[ids] (R A)`: the small product first."""
        return F.embedding(ids_BT, self.table_VK) @ (self.basis_KD @ frame_DK)

    def init_weights(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            self.table_VK.zero_()
            rank, dim = self.basis_KD.shape
            self.basis_KD.copy_(random_frame(dim, rank, generator).mT)
