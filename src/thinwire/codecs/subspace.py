"""MAPL's boundary (Janson, Oyallon, Belilovsky, "Learned Subspace Compression for Communication-Efficient Pipeline
Parallelism", arXiv 2606.05484): activations cross as coordinates in an orthonormal frame.

    Z     = (X - e_send[ids]) A          sender
    X_hat = Z A^T + e_recv[ids]          receiver

`A` is a D x K frame, one per boundary. Its gradient has two halves, `(X - e_send)^T dZ` at the sender and
`dX_hat^T Z` at the receiver; each end holds a copy of the frame and autograd leaves each half in its copy's `.grad`.
The sender owns the master: `pipeline.sync` brings the halves together and sends the new frame (design D3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.codecs.anchors import FactorisedAnchors
from thinwire.codecs.base import Anchors, Boundary, Codec, Decoder, Encoder
from thinwire.errors import ConfigError
from thinwire.stiefel import principal_frame, random_frame

FrameRule = Literal["manifold", "free", "frozen"]
FrameInit = Literal["pca", "random"]
FRAME_RULES: tuple[FrameRule, ...] = ("manifold", "free", "frozen")


class _FrameEnd(nn.Module):
    """An end of a boundary: its copy of the frame, float32."""

    def __init__(self, dim: int, rank: int, rule: FrameRule) -> None:
        super().__init__()
        self.rule = rule
        self.frame_DK = nn.Parameter(torch.empty(dim, rank, dtype=torch.float32), requires_grad=rule != "frozen")


class SubspaceEncoder(_FrameEnd, Encoder):
    """The sender's end; its frame is the master, orthonormal from the start."""

    def __init__(self, dim: int, rank: int, rule: FrameRule, init: FrameInit) -> None:
        super().__init__(dim, rank, rule)
        self.init = init

    def forward(self, x_BTD: Tensor, ids_BT: Tensor | None, anchors: Anchors | None) -> Tensor:
        z_BTK: Tensor = x_BTD.to(self.frame_DK.dtype) @ self.frame_DK
        if anchors is None or ids_BT is None:
            return z_BTK
        return z_BTK - anchors.project(ids_BT, self.frame_DK)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        self.frame_DK.copy_(random_frame(self.frame_DK.size(0), self.frame_DK.size(1), generator))

    @torch.no_grad()
    def init_from(self, x_BTD: Tensor, ids_BT: Tensor | None, anchors: Anchors | None) -> None:
        """With init "pca": span the leading principal directions of activations, anchors out, not centred."""
        if self.init != "pca":
            return
        residual = x_BTD.float() if anchors is None or ids_BT is None else x_BTD.float() - anchors(ids_BT)
        rows = residual.flatten(0, -2)
        self.frame_DK.copy_(principal_frame(rows.mT @ rows, self.frame_DK.size(1)))


class SubspaceDecoder(_FrameEnd, Decoder):
    """The receiver's end; its frame is a copy. With `owner_gradient_only` its half of the gradient is left out."""

    def __init__(self, dim: int, rank: int, rule: FrameRule, owner_gradient_only: bool) -> None:
        super().__init__(dim, rank, rule)
        self.owner_gradient_only = owner_gradient_only

    def forward(self, z_BTK: Tensor, ids_BT: Tensor | None, anchors: Anchors | None) -> Tensor:
        frame_DK = self.frame_DK.detach() if self.owner_gradient_only else self.frame_DK
        x_BTD: Tensor = z_BTK.to(frame_DK.dtype) @ frame_DK.mT
        if anchors is None or ids_BT is None:
            return x_BTD
        anchored: Tensor = x_BTD + anchors(ids_BT)
        return anchored


@dataclass(frozen=True, kw_only=True)
class Subspace(Codec):
    """Coordinates in a frame, with factorised anchors.

    Attributes:
        rank: K, coordinates per token; at most the model's width.
        anchor_rank: K', columns of the anchor tables; 0 for none, then no ids travel either.
        frame: how the frame learns: on the Stiefel manifold (MAPL), free of any constraint, or not at all.
        frame_gradient: "both" halves summed (the exact gradient) or the "sender" half alone; the paper does not say.
        init: of the frame: "pca" of the first activations, or "random".
    """

    rank: int
    anchor_rank: int = 0
    frame: FrameRule = "manifold"
    frame_gradient: Literal["both", "sender"] = "both"
    init: FrameInit = "pca"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, allowed in (
            ("frame", self.frame, FRAME_RULES),
            ("frame_gradient", self.frame_gradient, ("both", "sender")),
            ("init", self.init, ("pca", "random")),
        ):
            if value not in allowed:
                raise ConfigError(f"codec {name}={value!r}", ", ".join(allowed))
        for name, rank in (("rank", self.rank), ("anchor_rank", self.anchor_rank)):
            if not isinstance(rank, int) or isinstance(rank, bool):
                raise ConfigError(f"codec {name}={rank!r}", "a whole number")
        if self.rank < 1:
            raise ConfigError(f"codec rank {self.rank}", "1 to the model's width")
        if self.anchor_rank < 0:
            raise ConfigError(f"codec anchor_rank {self.anchor_rank}", "0 (none) to the model's width")

    @property
    def needs_ids(self) -> bool:
        return self.anchor_rank > 0

    def num_coordinates(self, dim: int) -> int:
        if self.rank > dim or self.anchor_rank > dim:
            raise ConfigError(
                f"codec rank {self.rank} and anchor_rank {self.anchor_rank} for activations of width {dim}",
                f"ranks up to {dim}",
                "lower the rank or use the identity codec",
            )
        return self.rank

    @property
    def has_mirror_gradients(self) -> bool:
        return self.frame_gradient == "both"

    def encoder(self, boundary: Boundary) -> Encoder:
        return SubspaceEncoder(boundary.dim, self.num_coordinates(boundary.dim), self.frame, self.init)

    def decoder(self, boundary: Boundary) -> Decoder:
        rank = self.num_coordinates(boundary.dim)
        return SubspaceDecoder(boundary.dim, rank, self.frame, owner_gradient_only=not self.has_mirror_gradients)

    def anchors(self, dim: int, vocab_size: int) -> Anchors | None:
        return FactorisedAnchors(dim, vocab_size, self.anchor_rank) if self.anchor_rank else None
