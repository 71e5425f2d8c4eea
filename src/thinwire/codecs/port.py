"""One end of a boundary's wire: coordinates to carriers and back, in the stage's autograd graph (design D1).

Forward, the sender packs coordinates and the receiver unpacks them; backward, the receiver packs their gradient and
the sender unpacks it. Both directions go through the same two methods of `Port`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.errors import WireError
from thinwire.link import Link, LinkQueue, wait_until
from thinwire.wire import Direction, Header, Ledger, new_carrier, open_carrier, read_ids, write_ids


class Port:
    """One end of boundary `boundary`: packs what leaves in direction `outgoing`, unpacks what comes the other way.

    Attributes:
        crosses: whether the boundary lies between two processes; inside one, nothing is sent, billed or delayed.
        waited_s: seconds spent waiting for the emulated link so far.
    """

    def __init__(self, codec: Codec, boundary: int, outgoing: Direction) -> None:
        self.codec = codec
        self.boundary = boundary
        self.outgoing = outgoing
        self.incoming = Direction(1 - outgoing)
        self.ledger = Ledger()
        self.crosses = True
        self.queue: LinkQueue | None = None
        self.waited_s = 0.0

    def connect(self, ledger: Ledger, link: Link | None, *, crosses: bool) -> None:
        """Bill to `ledger`, and delay what arrives as `link` would (None: not at all)."""
        self.ledger = ledger
        self.crosses = crosses
        self.queue = LinkQueue(link) if link is not None and crosses else None

    def pack(self, z_BTK: Tensor, ids_BT: Tensor | None, microbatch: int, dim: int, *, training: bool = True) -> Tensor:
        """Return a fresh carrier holding `z_BTK` (and ids, exactly), stamped with the time, and bill it.

        Outside training it is billed as evaluation.
        """
        layout = self.codec.layout((z_BTK.size(0), z_BTK.size(1), dim))
        stamp = time.monotonic() if self.queue is not None else 0.0
        header = Header(self.codec.digest, self.boundary, self.outgoing, microbatch, layout, stamp)
        carrier, payload = new_carrier(header, z_BTK.device)
        write_ids(payload, layout, ids_BT)
        self.codec.number_formats[self.outgoing].write(
            z_BTK, payload[layout.codes_section], payload[layout.side_section]
        )
        if self.crosses:
            self.ledger.bill(self.boundary, self.outgoing, self._kind(training), layout.total_bytes)
        return carrier

    def unpack(self, carrier: Tensor, microbatch: int, dim: int) -> tuple[Tensor, Tensor | None]:
        """Return the float32 numbers `(B, T, K)` and the ids `(B, T)` of a carrier, once the link lets it arrive.

        Raises:
            WireError: the payload is of another codec, boundary, direction or microbatch.
        """
        where = f"boundary {self.boundary}, {self.incoming.name.lower()}, microbatch {microbatch}"
        header, payload = open_carrier(carrier, where)
        self._check(header, microbatch, where)
        self.wait_for_link(header.sent_at_s, payload.numel())
        layout = header.layout
        expected = self.codec.layout((layout.rows, layout.tokens, dim))
        if layout != expected:
            raise WireError(f"{where}: header announces {layout}, expected {expected}")
        shape = (layout.rows, layout.tokens, self.codec.num_coordinates(dim))
        wire = self.codec.number_formats[self.incoming]
        numbers = wire.read(payload[layout.codes_section], payload[layout.side_section], shape)
        numbers.resize_(shape)  # in place: a view would forbid in-place operations on what autograd gets from here
        return numbers, read_ids(payload, layout)

    def wait_for_link(self, sent_at_s: float, num_bytes: int) -> None:
        """Wait until the emulated link, if any, would have delivered a message stamped `sent_at_s` (0: no stamp)."""
        if self.queue is not None and sent_at_s:
            self.waited_s += wait_until(self.queue.arrival(sent_at_s, num_bytes))

    def _kind(self, training: bool) -> str:
        if self.outgoing is Direction.BACKWARD:
            return "gradient"
        return "activation" if training else "evaluation"

    def _check(self, header: Header, microbatch: int, where: str) -> None:
        for what, got, expected in (
            ("codec", header.codec, self.codec.digest),
            ("boundary", header.boundary, self.boundary),
            ("direction", header.direction, self.incoming),
            ("microbatch", header.microbatch, microbatch),
        ):
            if got != expected:
                remedy = "; start both ends with the same recipe" if what == "codec" else ""
                raise WireError(f"{where}: the payload is of {what} {got}, expected {expected}{remedy}")


class _Pack(torch.autograd.Function):
    """Coordinates to carrier; backward, the carrier of the gradient to the coordinates' gradient."""

    @staticmethod
    def forward(
        ctx: Any, z_BTK: Tensor, ids_BT: Tensor | None, port: Port, microbatch: int, dim: int, training: bool
    ) -> Tensor:
        ctx.port, ctx.microbatch, ctx.dim, ctx.dtype = port, microbatch, dim, z_BTK.dtype
        return port.pack(z_BTK, ids_BT, microbatch, dim, training=training)

    @staticmethod
    def backward(ctx: Any, *carriers: Tensor) -> tuple[Tensor | None, ...]:
        gradient, _ = ctx.port.unpack(carriers[0], ctx.microbatch, ctx.dim)
        return gradient.to(ctx.dtype), None, None, None, None, None


class _Unpack(torch.autograd.Function):
    """Carrier to coordinates and ids; backward, the coordinates' gradient to its carrier."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, port: Port, microbatch: int, dim: int) -> tuple[Tensor, Tensor | None]:
        ctx.port, ctx.microbatch, ctx.dim = port, microbatch, dim
        z_BTK, ids_BT = port.unpack(carrier, microbatch, dim)
        if ids_BT is not None:
            ctx.mark_non_differentiable(ids_BT)
        return z_BTK, ids_BT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.port.pack(gradients[0], None, ctx.microbatch, ctx.dim), None, None, None


def pack(z_BTK: Tensor, ids_BT: Tensor | None, port: Port, microbatch: int, dim: int) -> Tensor:
    """Return the carrier of coordinates `z_BTK`, a node of the graph whose gradient arrives as a carrier too."""
    carrier: Tensor = _Pack.apply(  # type: ignore[no-untyped-call]
        z_BTK, ids_BT, port, microbatch, dim, torch.is_grad_enabled()
    )
    return carrier


def unpack(carrier: Tensor, port: Port, microbatch: int, dim: int) -> tuple[Tensor, Tensor | None]:
    """Return what a carrier holds: coordinates `(B, T, K)`, whose gradient leaves as a carrier, and the ids."""
    received: tuple[Tensor, Tensor | None] = _Unpack.apply(carrier, port, microbatch, dim)  # type: ignore[no-untyped-call]
    return received
