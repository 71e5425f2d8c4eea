"""The uncompressed wire: every number of the activation, in float32 (exact), bfloat16 or float16."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.codecs.base import Anchors, Boundary, Codec, Decoder, Encoder


class _Unchanged(Encoder, Decoder):
    """Both ends of an identity wire."""

    def forward(self, x_BTD: Tensor, ids_BT: Tensor | None, anchors: Anchors | None) -> Tensor:
        return x_BTD


@dataclass(frozen=True, kw_only=True)
class Identity(Codec):
    """Sends activations as they are. The reference of every comparison; no ids, no parameters."""

    @property
    def needs_ids(self) -> bool:
        return False

    def num_coordinates(self, dim: int) -> int:
        return dim

    def encoder(self, boundary: Boundary) -> Encoder:
        return _Unchanged()

    def decoder(self, boundary: Boundary) -> Decoder:
        return _Unchanged()
