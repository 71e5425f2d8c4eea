"""The workers of a data-parallel group, and the plain collectives between them: billed, delayed by an emulated link,
and failing with an error that says who is missing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.bits import MAX_VOTERS
from thinwire.collectives import roll as rolls
from thinwire.collectives.alarm import is_set, missing
from thinwire.collectives.flights import Exchange, Pending, Sent
from thinwire.collectives.in_turn import IN_TURN_BYTES, courier
from thinwire.errors import ConfigError, PeerError, one_line
from thinwire.link import Link, LinkQueue, wait_until
from thinwire.wire import DATA_PARALLEL, Direction, Ledger

_SLICE = timedelta(seconds=1)  # between two looks at whether somebody else has raised the alarm


class Workers:
    """Who takes part: the M members of `group`, one of them here; or `virtual` workers, all of them here.

    Args:
        group: of torch.distributed; None: this process alone.
        virtual: workers computed by this process, one after another.
        ledger: billed for what this process sends.
        link: emulated between the members.

    Raises:
        ConfigError: this process is no member of the group, or both kinds of workers are asked for.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        virtual: int = 1,
        ledger: Ledger | None = None,
        link: Link | None = None,
    ) -> None:
        if group is not None and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
            raise ConfigError("a group that does not contain this process", "a group of torch.distributed it is in")
        self.group = group
        self.size = virtual if group is None else dist.get_world_size(group)
        if not 1 <= self.size <= MAX_VOTERS or virtual < 1:
            raise ConfigError(f"{min(virtual, self.size)} workers", f"1 to {MAX_VOTERS}")
        if virtual > 1 and group is not None and self.size > 1:
            raise ConfigError(f"{virtual} virtual workers in a group of {self.size}", "one or the other")
        if group is not None and self.size == 1 and virtual > 1:
            self.group, self.size = None, virtual
        self.here = tuple(range(self.size)) if self.group is None else (dist.get_rank(self.group),)
        self.ledger = ledger
        self.waited_s = 0.0  # for others and for the network, in all
        self.queue = LinkQueue(link) if link is not None else None

    @property
    def is_networked(self) -> bool:
        """Whether anything has to be sent."""
        return self.group is not None and self.size > 1

    # --- the roll call -------------------------------------------------------------------------------------------

    def call(
        self,
        subject: rolls.Subject,
        abstaining: Sequence[bool],
        present: Sequence[Sequence[bool]],
        device: torch.device,
    ) -> rolls.Roll:
        """Return who votes on what; `abstaining` and `present` are of the workers here.

        Raises:
            ConfigError: workers disagree about the subject; names the first difference. All workers raise it.
            PeerError: a worker cannot be reached.
        """
        return Pending(self, self._call(subject, abstaining, present, device)).result()

    def refuse(self, device: torch.device) -> None:
        """Let all others know that this worker has refused its input, so that they do not wait for it."""
        if self.is_networked:
            row = torch.frombuffer(bytearray(rolls.Subject((), 0).header(rolls.REFUSES)), dtype=torch.uint8).to(device)
            Pending(self, self.all_gather(row, "vote_header")).result()

    def _call(
        self,
        subject: rolls.Subject,
        abstaining: Sequence[bool],
        present: Sequence[Sequence[bool]],
        device: torch.device,
    ) -> Exchange[rolls.Roll]:
        flags = [rolls.ABSTAINS * a | rolls.INCOMPLETE * (not all(p)) for a, p in zip(abstaining, present, strict=True)]
        if self.is_networked:
            row = torch.frombuffer(bytearray(subject.header(flags[0])), dtype=torch.uint8).to(device)
            everyone = yield from self.all_gather(row, "vote_header")
            raw = everyone.cpu().numpy()
            headers = [rolls.Header.from_bytes(raw[worker].tobytes(), worker) for worker in range(self.size)]
            refusing = [worker for worker, header in enumerate(headers) if header.flags & rolls.REFUSES]
            if refusing:
                raise ConfigError(f"input that worker {refusing[0]} refused", remedy="see its own error")
            if (found := rolls.first_difference(headers)) is not None:
                texts: list[list[str]] = []
                if found[1] in ("elements", "layout", "options"):
                    mine = subject.options if found[1] == "options" else subject.layout
                    texts = [text.split("\n") for text in (yield from self.all_gather_text("\n".join(mine), device))]
                raise rolls.disagreement(headers, texts)
            flags = [header.flags for header in headers]
            if any(flag & rolls.INCOMPLETE for flag in flags):
                held = torch.tensor(present[0], dtype=torch.uint8, device=device)
                present = (yield from self.all_gather(held, "vote_header")).cpu().bool().tolist()
            else:
                present = [list(present[0])] * self.size
        voters = tuple(worker for worker in range(self.size) if not flags[worker] & rolls.ABSTAINS)
        return rolls.Roll(subject, voters, tuple(tuple(held) for held in present))

    def all_gather_text(self, text: str, device: torch.device) -> Exchange[list[str]]:
        """Every worker's text; each may have another length."""
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
        sizes = (yield from self.all_gather(torch.tensor([mine.numel()], device=device), "vote_header")).flatten()
        padded = torch.nn.functional.pad(mine, (0, int(sizes.max()) - mine.numel()))
        texts = yield from self.all_gather(padded, "vote_header")
        return [bytes(row[:size].tolist()).decode() for row, size in zip(texts.cpu(), sizes.tolist(), strict=True)]

    # --- plain collectives; what a rank sends is billed ------------------------------------------------------------

    def all_gather(self, row: Tensor, kind: str) -> Exchange[Tensor]:
        """Return `(M, *)`: every worker's row `(*)`, of one shape and dtype on all."""
        sent = _octets(row)
        received = sent.new_empty(self.size * sent.numel())
        yield self._start(lambda: self._all_gather(sent, received), kind, (self.size - 1) * sent.numel())
        return received.view(self.size, -1).view(row.dtype).view(self.size, *row.shape)

    def all_to_all(self, rows: Tensor, kind: str) -> Exchange[Tensor]:
        """Send row j of `(M, *)` to worker j; return `(M, *)`, row j from worker j."""
        sent = _octets(rows)
        received = torch.empty_like(sent)
        yield self._start(lambda: self._all_to_all(sent, received), kind, (self.size - 1) * (sent.numel() // self.size))
        return received.view(rows.dtype).view(rows.shape)

    def _all_gather(self, sent: Tensor, received: Tensor) -> Any:
        if dist.get_backend(self.group) != "gloo" or sent.numel() < IN_TURN_BYTES:
            return dist.all_gather_single(received, sent, group=self.group, async_op=True)
        assert self.group is not None
        return courier(self.group).all_to_all(self.group, sent.expand(self.size, -1), received.view(self.size, -1))

    def _all_to_all(self, sent: Tensor, received: Tensor) -> Any:
        if dist.get_backend(self.group) != "gloo":
            return dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        assert self.group is not None
        return courier(self.group).all_to_all(self.group, sent.view(self.size, -1), received.view(self.size, -1))

    def all_reduce(self, values: Tensor, kind: str) -> Exchange[Tensor]:
        """Return the sum over all workers; billed as a ring."""
        total = values.clone()
        num_bytes = total.numel() * total.element_size()
        work = self._start(
            lambda: dist.all_reduce(total, group=self.group, async_op=True),
            kind, 2 * (self.size - 1) * num_bytes // self.size, rounds=2 * (self.size - 1),
        )  # fmt: skip
        yield work
        return total

    def _start(self, start: Any, kind: str, num_bytes: int, rounds: int | None = None) -> Sent:
        began_s = time.monotonic()
        try:
            work = start()
        except RuntimeError as error:
            raise self.failure(error, kind) from error
        if self.ledger is not None:
            self.ledger.bill(DATA_PARALLEL, Direction.FORWARD, kind, num_bytes)
        if self.queue is None:
            return Sent(work, kind)
        rounds = self.size - 1 if rounds is None else rounds
        return Sent(work, kind, self.queue.arrival(began_s, num_bytes) + (rounds - 1) * self.queue.link.latency_s)

    def finish(self, sent: Sent) -> None:
        """Wait for a collective, and for the emulated link.

        Raises:
            PeerError: a worker or the network failed.
        """
        began_s = time.monotonic()
        try:
            self._wait(sent.work)
        except RuntimeError as error:
            raise self.failure(error, sent.what) from error
        wait_until(sent.arrives_s)
        self.waited_s += time.monotonic() - began_s

    def _wait(self, work: Any) -> None:
        """Wait in slices: who waits for a survivor, not for the dead worker, gets no error of its own for minutes."""
        if dist.get_backend(self.group) != "gloo":
            work.wait()
            return
        while not work.is_completed():
            try:
                work.wait(_SLICE)
            except RuntimeError:
                if work.is_completed():
                    raise
                if is_set(self.group, "alarm"):
                    raise RuntimeError("another worker has lost one") from None
        work.wait()  # raises what went wrong

    def failure(self, error: RuntimeError, kind: str) -> Exception:
        """What to raise for an error of torch.distributed: names the workers that no longer answer."""
        who = missing(self.group, self.here[0], self.size)
        silent = f"no answer from worker{'s' * (len(who) > 1)} {', '.join(map(str, who))}" if who else "a peer failed"
        return PeerError(
            f"{silent}, noticed by worker {self.here[0]} of {self.size} in its {kind} exchange: {one_line(error)}"
        )


def _octets(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
