"""What crosses a boundary: the payload, the carrier it travels in, and the account of what was sent.

A payload is bytes in four sections, each padded to four bytes:

    header   48 bytes, below
    ids      token ids, unsigned little-endian integers of `id_bytes` each, exact
    codes    the coordinates in the wire's number format
    side     scales and whatever else the format needs

It travels as a *carrier*: a flat float32 tensor with the payload's bytes, since the pipeline engine moves (and its
gradients flow through) floating tensors only. Nobody computes on a carrier. It is always a fresh tensor, never a
view: zero-bubble schedules detach it in place. A gradient's carrier has the size of the activation's; its ids
section is idle.
"""

from __future__ import annotations

import binascii
import math
import struct
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from thinwire.errors import ConfigError, WireError

MAGIC = b"THNW"
VERSION = 2
_HEADER = struct.Struct("<4sBBHIHHIIIIIId")
HEADER_BYTES = _HEADER.size
_CHECK = slice(6, 8)  # where the check of the other bytes lies
DATA_PARALLEL = -1  # in the place of a boundary: traffic between replicas
_ID_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


class Direction(IntEnum):
    """Which way a message goes across a boundary."""

    FORWARD = 0
    BACKWARD = 1


def padded(num_bytes: int) -> int:
    """The next multiple of four."""
    return -(-num_bytes // 4) * 4


def id_width(vocab_size: int) -> int:
    """Bytes in which every id of a vocabulary travels exactly: 1, 2 or 4.

    Raises:
        ConfigError: no such vocabulary, or above 2^32.
    """
    for width in _ID_DTYPES:
        if 0 < vocab_size <= 1 << 8 * width:
            return width
    raise ConfigError(f"vocabulary of {vocab_size}", f"1 to {1 << 32}")


@dataclass(frozen=True)
class Layout:
    """Sizes of a payload's sections, in bytes, for `rows` sequences of `tokens` tokens each."""

    rows: int
    tokens: int
    id_bytes: int
    code_bytes: int
    side_bytes: int = 0

    @property
    def ids_section(self) -> slice:
        return slice(HEADER_BYTES, HEADER_BYTES + self.rows * self.tokens * self.id_bytes)

    @property
    def codes_section(self) -> slice:
        start = padded(self.ids_section.stop)
        return slice(start, start + self.code_bytes)

    @property
    def side_section(self) -> slice:
        start = padded(self.codes_section.stop)
        return slice(start, start + self.side_bytes)

    @property
    def total_bytes(self) -> int:
        """Everything that is sent: header, ids, codes, side sections and padding."""
        return padded(self.side_section.stop)


@dataclass(frozen=True)
class Header:
    """The first 48 bytes of every payload. `sent_at_s` is the sender's monotonic clock, 0 when nobody waits."""

    codec: int
    boundary: int
    direction: Direction
    microbatch: int
    layout: Layout
    sent_at_s: float = 0.0

    def to_bytes(self) -> bytes:
        size = self.layout
        ids = size.ids_section.stop - size.ids_section.start
        return _checked(
            MAGIC, VERSION, self.direction, 0, self.codec, self.boundary, size.id_bytes, self.microbatch,
            size.rows, size.tokens, ids, size.code_bytes, size.side_bytes, self.sent_at_s,
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Header:
        """Parse a header; `where` names the message in errors.

        Raises:
            WireError: not one of our payloads, or of another version.
        """
        magic, version, direction, check, codec, boundary, id_bytes, microbatch, *sizes, sent = _HEADER.unpack(raw)
        rows, tokens, ids, codes, side = sizes
        if magic != MAGIC or direction not in (Direction.FORWARD, Direction.BACKWARD):
            raise WireError(f"{where}: received bytes that are no payload (they start with {raw[:4].hex()})")
        if version != VERSION:
            raise WireError(f"{where}: payload version {version}, this end speaks {VERSION}; install one on all ranks")
        if check != _check(raw) or not 0 <= sent < math.inf:
            raise WireError(f"{where}: the header was damaged on its way (check {check:#06x}, send time {sent})")
        if ids != rows * tokens * id_bytes:
            raise WireError(f"{where}: header announces {ids} bytes of ids for {rows} x {tokens} of {id_bytes} bytes")
        layout = Layout(rows, tokens, id_bytes, codes, side)
        return cls(codec, boundary, Direction(direction), microbatch, layout, sent)


def _check(raw: bytes) -> int:
    """CRC-16-CCITT of a header without its check."""
    return binascii.crc_hqx(raw[_CHECK.stop :], binascii.crc_hqx(raw[: _CHECK.start], 0xFFFF))


def _checked(magic: bytes, version: int, direction: int, check: int, *rest: float) -> bytes:
    raw = bytearray(_HEADER.pack(magic, version, direction, check, *rest))
    raw[_CHECK] = _check(bytes(raw)).to_bytes(2, "little")
    return bytes(raw)


def new_carrier(header: Header, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a fresh carrier with its header written, and the uint8 view of it in which to write the rest."""
    carrier = torch.empty(header.layout.total_bytes // 4, dtype=torch.float32, device=device)
    payload = carrier.view(torch.uint8)
    raw = torch.frombuffer(bytearray(header.to_bytes()), dtype=torch.uint8)
    payload[:HEADER_BYTES] = raw.to(device)
    size = header.layout
    for start, stop in (
        (size.ids_section.stop, size.codes_section.start),
        (size.codes_section.stop, size.side_section.start),
        (size.side_section.stop, size.total_bytes),
    ):
        if start < stop:
            payload[start:stop] = 0  # padding, else it would carry whatever was in this memory
    return carrier, payload


def open_carrier(carrier: Tensor, where: str) -> tuple[Header, Tensor]:
    """Return the header of a received carrier and its payload as uint8.

    Raises:
        WireError: the header is none of ours or announces another number of bytes than arrived.
    """
    if carrier.dtype != torch.float32 or carrier.dim() != 1 or 4 * carrier.numel() < HEADER_BYTES:
        raise WireError(f"{where}: expected a flat float32 carrier, received {carrier.dtype} {tuple(carrier.shape)}")
    payload = carrier.detach().contiguous().view(torch.uint8)
    header = Header.from_bytes(bytes(payload[:HEADER_BYTES].cpu().numpy()), where)
    if header.layout.total_bytes != payload.numel():
        raise WireError(f"{where}: header announces {header.layout.total_bytes} bytes, {payload.numel()} arrived")
    return header, payload


def write_ids(payload: Tensor, layout: Layout, ids_BT: Tensor | None) -> None:
    """Write token ids `(B, T)` of any integer dtype, exactly; None leaves the section zero."""
    section = payload[layout.ids_section]
    if ids_BT is None:
        section.zero_()
    elif layout.id_bytes:
        if ids_BT.numel() and (int(ids_BT.min()) < 0 or int(ids_BT.max()) >= 1 << 8 * layout.id_bytes):
            raise WireError(
                f"token ids outside 0 to {(1 << 8 * layout.id_bytes) - 1} on a wire of {layout.id_bytes} bytes"
            )
        section.view(_ID_DTYPES[layout.id_bytes]).copy_(ids_BT.reshape(-1))


def read_ids(payload: Tensor, layout: Layout) -> Tensor | None:
    """Return the token ids `(B, T)` as int64, or None when this wire carries none."""
    if not layout.id_bytes:
        return None
    ids = payload[layout.ids_section].view(_ID_DTYPES[layout.id_bytes])
    return ids.to(torch.int64).view(layout.rows, layout.tokens)


@dataclass(frozen=True)
class Entry:
    """A line of the account. `kind`: activation, gradient, frame, frame_gradient, tied, ..., vote, vote_header, mean.

    Between replicas `boundary` is DATA_PARALLEL.
    """

    boundary: int
    direction: Direction
    kind: str


class Ledger:
    """The exact account of what this process handed to the network: bytes and messages per boundary and kind."""

    def __init__(self) -> None:
        self.num_bytes: Counter[Entry] = Counter()
        self.num_messages: Counter[Entry] = Counter()

    def bill(self, boundary: int, direction: Direction, kind: str, num_bytes: int) -> None:
        """Record one message."""
        entry = Entry(boundary, direction, kind)
        self.num_bytes[entry] += num_bytes
        self.num_messages[entry] += 1

    def total(self, *, kind: str | None = None, direction: Direction | None = None, boundary: int | None = None) -> int:
        """Bytes sent so far, over all entries that match what is given."""
        return sum(
            num_bytes
            for entry, num_bytes in self.num_bytes.items()
            if kind in (None, entry.kind)
            and direction in (None, entry.direction)
            and boundary in (None, entry.boundary)
        )
