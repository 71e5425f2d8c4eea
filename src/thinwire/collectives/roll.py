"""The roll call before an exchange: who takes part, in what, and whether all mean the same thing.

Every worker sends one header of 64 bytes to all others:

    magic 4, version u8, kind u8 (0 vote, 1 step), transport u8, ties u8, flags u32, step u64, seed u64,
    elements u64, layout 8 bytes, options 8 bytes, reserved 12 bytes; little-endian

`layout` is a digest of the names, shapes and order of all tensors, `options` one of every number that decides a step
(rates, momenta, ...). As all headers reach all workers, all see the same disagreement and raise the same error: nobody
waits for somebody who left. Flags: 1 the worker abstains (its gradient is not finite), 2 some of its tensors have no
gradient (which ones follows in a second message), 4 the worker has refused its input: all others refuse with it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.errors import ConfigError, WireError

MAGIC = b"THWV"
VERSION = 1
ABSTAINS, INCOMPLETE, REFUSES = 1, 2, 4
_HEADER = struct.Struct("<4sBBBBIQQQ8s8s12x")
HEADER_BYTES = _HEADER.size
_FIELDS = ("kind", "transport", "tie rule", "step", "seed", "elements", "layout", "options")


@dataclass(frozen=True)
class Subject:
    """What is exchanged. `layout` and `options` are texts, one line per entry; their digests are compared."""

    layout: tuple[str, ...]
    num_elements: int
    options: tuple[str, ...] = ()
    step: int = 0
    seed: int = 0
    transport: int = 0
    ties: int = 0
    kind: int = 0

    def header(self, flags: int) -> bytes:
        return _HEADER.pack(
            MAGIC, VERSION, self.kind, self.transport, self.ties, flags, self.step % (1 << 64), self.seed % (1 << 64),
            self.num_elements, _digest(self.layout), _digest(self.options),
        )  # fmt: skip


@dataclass(frozen=True)
class Roll:
    """The outcome: which workers vote, and which tensors each of them has (`present[worker][tensor]`)."""

    subject: Subject
    voters: tuple[int, ...]
    present: tuple[tuple[bool, ...], ...]

    def anybody(self, tensor: int) -> bool:
        """Whether any voter has this tensor."""
        return any(self.present[worker][tensor] for worker in self.voters)


@dataclass(frozen=True)
class Header:
    """A received header."""

    values: tuple[Any, ...]
    flags: int

    @classmethod
    def from_bytes(cls, raw: bytes, worker: int) -> Header:
        """Parse.

        Raises:
            WireError: not a header, or one of another version.
        """
        magic, version, kind, transport, ties, flags, *rest = _HEADER.unpack(raw)
        if magic != MAGIC:
            raise WireError(f"worker {worker} sent {raw[:4].hex()} where the header of a vote was expected")
        if version != VERSION:
            raise WireError(f"worker {worker} speaks version {version} of the vote, this one {VERSION}")
        return cls((kind, transport, ties, *rest), flags)


def first_difference(headers: Sequence[Header]) -> tuple[int, str] | None:
    """The first worker whose header differs from worker 0's, and in which field."""
    for worker, header in enumerate(headers):
        for name, mine, theirs in zip(_FIELDS, headers[0].values, header.values, strict=True):
            if mine != theirs:
                return worker, name
    return None


def disagreement(headers: Sequence[Header], texts: Sequence[Sequence[str]]) -> ConfigError:
    """The error that names the first worker, field and, given everybody's texts, entry that differ; and the steps."""
    found = first_difference(headers)
    assert found is not None
    worker, name = found
    mine, theirs = (dict(zip(_FIELDS, headers[i].values, strict=True)) for i in (0, worker))
    given = f"{name} of worker {worker} is {_show(theirs[name])}, of worker 0 {_show(mine[name])}"
    if name in ("layout", "options", "elements"):
        given = f"{'tensors' if name != 'options' else name} of worker {worker} differ from those of worker 0"
        for number in range(max(len(texts[0]), len(texts[worker]))):
            a, b = (text[number] if number < len(text) else "nothing" for text in (texts[0], texts[worker]))
            if a != b:
                given += f": entry {number} is {_apart(b, a)}, there {_apart(a, b)}"
                break
    given += f"; worker {worker} is at step {theirs['step']}, worker 0 at step {mine['step']}"
    remedy = "start every process with the same code and configuration, and let none leave out a step"
    return ConfigError(given, "the same on all workers", remedy)


def _apart(text: str, other: str) -> str:
    """What of an entry of several parts the other one does not have, or all of it."""
    return "; ".join(part for part in text.split("; ") if part not in other.split("; ")) or text


def _show(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _digest(text: Sequence[str]) -> bytes:
    return hashlib.blake2b("\n".join(text).encode(), digest_size=8).digest()
