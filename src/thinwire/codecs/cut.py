"""The cut: a boundary over which nothing of the activation passes. The control of every comparison of codecs.

    Z     = nothing                      sender
    X_hat = e_recv[ids]                  receiver

The receiver starts again from its anchors, and no gradient comes back: stages before the last boundary learn nothing.
What a codec is worth is the share of the way from here to the uncompressed wire, both with the same anchors.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.codecs.anchors import FactorisedAnchors
from thinwire.codecs.base import Anchors, Boundary, Codec, Decoder, Encoder
from thinwire.errors import ConfigError


class _Nothing(Encoder):
    """The sender's end of a cut."""

    def forward(self, x_BTD: Tensor, ids_BT: Tensor | None, anchors: Anchors | None) -> Tensor:
        return x_BTD[..., :0].float()


class _FromAnchors(Decoder):
    """The receiver's end of a cut."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, z_BTK: Tensor, ids_BT: Tensor | None, anchors: Anchors | None) -> Tensor:
        x_BTD = z_BTK.new_zeros(*z_BTK.shape[:-1], self.dim) + z_BTK.sum(-1, keepdim=True)
        return x_BTD if anchors is None or ids_BT is None else x_BTD + anchors(ids_BT)


@dataclass(frozen=True, kw_only=True)
class Cut(Codec):
    """Nothing but token ids, and with `anchor_rank` 0 not even those.

    Attributes:
        anchor_rank: K', columns of the anchor tables; 0 for none.
    """

    anchor_rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.anchor_rank, int) or isinstance(self.anchor_rank, bool) or self.anchor_rank < 0:
            raise ConfigError(f"codec anchor_rank={self.anchor_rank!r}", "0 (none) to the model's width")

    @property
    def needs_ids(self) -> bool:
        return self.anchor_rank > 0

    def num_coordinates(self, dim: int) -> int:
        if self.anchor_rank > dim:
            raise ConfigError(f"codec anchor_rank {self.anchor_rank} for width {dim}", f"ranks up to {dim}")
        return 0

    def encoder(self, boundary: Boundary) -> Encoder:
        self.num_coordinates(boundary.dim)
        return _Nothing()

    def decoder(self, boundary: Boundary) -> Decoder:
        return _FromAnchors(boundary.dim)

    def anchors(self, dim: int, vocab_size: int) -> Anchors | None:
        return FactorisedAnchors(dim, vocab_size, self.anchor_rank) if self.anchor_rank else None
