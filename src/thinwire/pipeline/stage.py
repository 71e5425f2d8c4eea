"""A stage: some layers of a model between the receiving end of one boundary and the sending end of the next."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from thinwire.codecs import Anchors, Boundary, Codec, Decoder, Encoder
from thinwire.codecs.port import Port, pack, unpack
from thinwire.errors import ConfigError
from thinwire.link import Link
from thinwire.wire import Direction, Ledger, id_width


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """A generator for one named tensor: what it draws depends on nothing else, so a layout changes no weights."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class Stage(nn.Module):
    """Stage `index` of `num_stages`. The first takes ids `(B, T)`, the others a carrier; the last gives logits.

    Parameter names are unique over the whole pipeline, so that checkpoints need no stage numbers:

        model.*                 the model's own names
        outbound.P.frame_DK     master frame of boundary P (this stage sends over it)
        inbound.P.frame_DK      its copy at the receiving stage
        anchors.S.table_VK      anchors of stage S
        sending.S.table_VK      the same anchors as the sending end sees them

    Zero-bubble schedules split a stage's backward pass at its parameters and fail where one parameter sits at two
    depths of a stage (torch 2.13). A stage between two boundaries uses its anchors at both ends, so the sending end
    has Parameters of its own over the same storage; `sync` adds their gradients to the owner's.
    """

    def __init__(self, index: int, num_stages: int, model: nn.Module, codec: Codec, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.index, self.num_stages = index, num_stages
        self.dim, self.vocab_size = dim, vocab_size
        self.model = model
        self.codec = codec
        self.inbound = nn.ModuleDict()
        self.outbound = nn.ModuleDict()
        self.anchors = nn.ModuleDict()
        self.sending = nn.ModuleDict()
        self.receiver: Port | None = None
        self.sender: Port | None = None
        if num_stages > 1:
            self._add_ends()

    def _add_ends(self) -> None:
        if self.codec.needs_ids and self.codec.id_bytes < id_width(self.vocab_size):
            raise ConfigError(
                f"id_bytes={self.codec.id_bytes} for a vocabulary of {self.vocab_size}",
                f"at least {id_width(self.vocab_size)}",
                f"set codec option id_bytes={id_width(self.vocab_size)}",
            )
        made = self.codec.anchors(self.dim, self.vocab_size)
        if made is not None:
            self.anchors[str(self.index)] = made
            if not self.is_first and not self.is_last:
                self.sending[str(self.index)] = copy.deepcopy(made)
        if not self.is_first:
            boundary = Boundary(self.index - 1, self.dim)
            self.inbound[str(boundary.index)] = self.codec.decoder(boundary)
            self.receiver = Port(self.codec, boundary.index, Direction.BACKWARD)
        if not self.is_last:
            boundary = Boundary(self.index, self.dim)
            self.outbound[str(boundary.index)] = self.codec.encoder(boundary)
            self.sender = Port(self.codec, boundary.index, Direction.FORWARD)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def encoder(self) -> Encoder:
        """The end that sends to the next stage. The last stage has none."""
        end = self.outbound[str(self.index)]
        assert isinstance(end, Encoder)
        return end

    @property
    def decoder(self) -> Decoder:
        """The end that receives from the stage before. The first stage has none."""
        end = self.inbound[str(self.index - 1)]
        assert isinstance(end, Decoder)
        return end

    @property
    def own_anchors(self) -> Anchors | None:
        """The anchors that this stage adds on receive, if its codec has any."""
        return _anchors(self.anchors, self.index)

    @property
    def sending_anchors(self) -> Anchors | None:
        """The same anchors, to be taken out on send."""
        return _anchors(self.sending or self.anchors, self.index)

    def ports(self) -> Iterator[Port]:
        """The ends of wires that this stage holds."""
        yield from (port for port in (self.receiver, self.sender) if port is not None)

    def connect(self, ledger: Ledger, link: Link | None, stage_rank: dict[int, int]) -> None:
        """Bill to `ledger` and emulate `link` at every boundary whose two stages live on different ranks."""
        for port in self.ports():
            crosses = stage_rank[port.boundary] != stage_rank[port.boundary + 1]
            port.connect(ledger, link, crosses=crosses)

    def init_weights(self, seed: int) -> None:
        """Draw all parameters, each from its own name; call it after `to_empty` from the meta device."""
        self.model.init_weights(seed)  # type: ignore[operator]
        self.init_ends(seed)

    def init_ends(self, seed: int) -> None:
        """Draw anchors and master frames. The copies of frames are filled by `sync.publish`."""
        for anchors in (self.own_anchors, self.sending_anchors):
            if anchors is not None:
                anchors.init_weights(seeded_generator(seed, f"anchors.{self.index}"))
        if not self.is_last:
            self.encoder.init_weights(seeded_generator(seed, f"outbound.{self.index}"))

    def hidden(self, received: Tensor, microbatch: int) -> tuple[Tensor, Tensor | None]:
        """Run what was received through this stage's layers; returns `(B, T, D)` (or logits) and the ids."""
        if self.receiver is None:
            output: Tensor = self.model(received)
            return output, received
        z_BTK, ids_BT = unpack(received, self.receiver, microbatch, self.dim)
        with torch.autocast(z_BTK.device.type, enabled=False):
            x_BTD = self.decoder(z_BTK, ids_BT, self.own_anchors)
        return self.model(x_BTD.to(next(self.model.parameters()).dtype)), ids_BT

    def send(self, x_BTD: Tensor, ids_BT: Tensor | None, microbatch: int) -> Tensor:
        """Return the carrier of activations `(B, T, D)` for the next stage."""
        assert self.sender is not None
        with torch.autocast(x_BTD.device.type, enabled=False):
            z_BTK = self.encoder(x_BTD, ids_BT, self.sending_anchors)
        return pack(z_BTK, ids_BT, self.sender, microbatch, self.dim)

    def forward(self, received: Tensor, microbatch: Tensor | int = 0) -> Tensor:
        """Take ids or a carrier of microbatch number `microbatch`; return a carrier or, at the end, logits."""
        number = int(microbatch)
        output, ids_BT = self.hidden(received, number)
        return output if self.sender is None else self.send(output, ids_BT, number)


def _anchors(holder: nn.ModuleDict, index: int) -> Anchors | None:
    if not holder:
        return None
    made = holder[str(index)]
    assert isinstance(made, Anchors)
    return made
