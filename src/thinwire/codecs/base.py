"""What a boundary codec is.

A codec is an immutable description of how activations cross the boundaries of a pipeline. It says what one message
costs and makes the two learned (or not) ends of a boundary:

    encoder(x_BTD, ids_BT, anchors) -> z_BTK      sender:   coordinates, ordinary autograd
    decoder(z_BTK, ids_BT, anchors) -> x_BTD      receiver: activations, ordinary autograd

The bytes in between are the business of `Port`, the same for all codecs: coordinates go through the codec's number
format into a payload, and gradients come back the same way.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from thinwire.codecs.format_names import get_format
from thinwire.codecs.formats import Format
from thinwire.errors import ConfigError
from thinwire.wire import Layout

_COUNTS = (1, 8, 9, 1000, 999_999, 1_000_000)  # of numbers, for which two formats' costs are compared


@dataclass(frozen=True)
class Boundary:
    """The cut between stages `index` and `index + 1` of a model of width `dim`."""

    index: int
    dim: int


class Anchors(nn.Module, ABC):
    """The token-dependent part of an activation that a stage rebuilds from ids. `forward(ids_BT) -> (B, T, D)`."""

    @abstractmethod
    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the anchors `(B, T, D)` of token ids `(B, T)`."""

    def project(self, ids_BT: Tensor, frame_DK: Tensor) -> Tensor:
        """Return `anchors @ frame`, `(B, T, K)`."""
        projected: Tensor = self(ids_BT) @ frame_DK
        return projected

    @abstractmethod
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw the parameters; also after `to_empty` from the meta device."""


class Encoder(nn.Module, ABC):
    """The sender's end of a boundary. What its parameters share with the decoder's by name, it owns."""

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw the parameters; also after `to_empty` from the meta device."""

    def init_from(self, x_BTD: Tensor, ids_BT: Tensor | None, anchors: Anchors | None) -> None:
        """Adapt the parameters to the first activations, before anything crosses."""

    @abstractmethod
    def forward(self, x_BTD: Tensor, ids_BT: Tensor | None, anchors: Anchors | None) -> Tensor:
        """Return coordinates `(B, T, K)`."""


class Decoder(nn.Module, ABC):
    """The receiver's end of a boundary."""

    @abstractmethod
    def forward(self, z_BTK: Tensor, ids_BT: Tensor | None, anchors: Anchors | None) -> Tensor:
        """Return activations `(B, T, D)`."""


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """Base of all codecs. Fields are options; two ends with different options refuse each other's payloads.

    Attributes:
        wire_format: number format of the coordinates, a name that `format_names.get_format` knows.
        gradient_format: of their gradients, where it is another; it has to cost the same (design D2).
        id_bytes: bytes per token id on the wire, 1, 2 or 4, for codecs whose receiver needs ids.
    """

    wire_format: str = "bf16"
    gradient_format: str = ""
    id_bytes: int = 2

    def __post_init__(self) -> None:
        there, back = self.number_formats
        if any((there.code_bytes(n), there.side_bytes(n)) != (back.code_bytes(n), back.side_bytes(n)) for n in _COUNTS):
            raise ConfigError(
                f"gradient_format {back.name!r} with wire_format {there.name!r}",
                "formats that cost the same: the same bits and blocks, as in int4-clip and int4-sr",
                "a boundary has one budget for both directions",
            )
        if self.id_bytes not in (1, 2, 4):
            raise ConfigError(f"id_bytes={self.id_bytes}", "1, 2 or 4 (2 holds vocabularies up to 65,536)")

    @property
    @abstractmethod
    def needs_ids(self) -> bool:
        """Whether token ids travel with the activations."""

    @abstractmethod
    def num_coordinates(self, dim: int) -> int:
        """Numbers sent per token for activations of width `dim`.

        Raises:
            ConfigError: the codec cannot work at this width.
        """

    @abstractmethod
    def encoder(self, boundary: Boundary) -> Encoder:
        """Make the sender's end, on the current default device."""

    @abstractmethod
    def decoder(self, boundary: Boundary) -> Decoder:
        """Make the receiver's end, on the current default device."""

    @property
    def has_mirror_gradients(self) -> bool:
        """Whether the decoder's copies of the encoder's parameters have gradients, to be sent to their owner."""
        return True

    def anchors(self, dim: int, vocab_size: int) -> Anchors | None:
        """Make the anchors of one stage, or None. A stage adds them on receive and takes them out on send."""
        return None

    @cached_property
    def number_formats(self) -> tuple[Format, Format]:
        """Of activations and of gradients, by `Direction`."""
        return get_format(self.wire_format), get_format(self.gradient_format or self.wire_format)

    @cached_property
    def digest(self) -> int:
        """32 bits that tell codecs with different names or options apart; part of every header."""
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=4).digest(), "little")

    def layout(self, shape: tuple[int, int, int]) -> Layout:
        """The payload of activations of shape `(B, T, D)`."""
        rows, tokens, dim = shape
        numbers = rows * tokens * self.num_coordinates(dim)
        wire = self.number_formats[0]
        id_bytes = self.id_bytes if self.needs_ids else 0
        return Layout(rows, tokens, id_bytes, wire.code_bytes(numbers), wire.side_bytes(numbers))

    def wire_bytes(self, shape: tuple[int, int, int]) -> int:
        """Bytes sent for activations of shape `(B, T, D)`, everything included; their gradient costs the same."""
        return self.layout(shape).total_bytes
