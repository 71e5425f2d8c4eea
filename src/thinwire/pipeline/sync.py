"""Tensors that live on two stages: one stage owns them, the other mirrors them (design D3).

After the backward passes the mirror sends its half of the gradient to the owner; after the optimizer's step the
owner sends the new value. Nothing is recomputed at the other end, so mixed hardware cannot drift. Frames go this
way, from each boundary's sender to its receiver, and tied embeddings, from the first stage to the last.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.errors import WireError
from thinwire.link import Link, LinkQueue, wait_until
from thinwire.pipeline.stage import Stage
from thinwire.wire import Direction, Header, Layout, Ledger, new_carrier, open_carrier

_CODEC = int.from_bytes(b"sync", "little")


@dataclass(frozen=True)
class Shared:
    """A tensor with an owner and a mirror, each a stage and a parameter name.

    Traffic is billed at `boundary`. With `one_sided` the mirror has no gradient to send.
    """

    kind: str
    boundary: int
    owner: tuple[int, str]
    mirror: tuple[int, str]
    one_sided: bool = False

    def local(self, stage_rank: dict[int, int]) -> bool:
        """Whether owner and mirror live on one rank: then nothing is sent."""
        return stage_rank[self.owner[0]] == stage_rank[self.mirror[0]]


def shared_tensors(stages: Sequence[Stage]) -> list[Shared]:
    """List all tensors that the pipeline of these stages holds twice, in one order for every rank."""
    stage = stages[0]
    last = stage.num_stages - 1
    if last == 0:
        return []
    shared = []
    one_sided = not stage.codec.has_mirror_gradients
    for p in range(last):
        for name, _ in (stage.decoder if stage.is_last else stage.encoder).named_parameters():
            ends = (p, f"outbound.{p}.{name}"), (p + 1, f"inbound.{p}.{name}")
            shared.append(Shared("frame", p, *ends, one_sided))
    for p in range(1, last):
        for name, _ in stage.own_anchors.named_parameters() if stage.own_anchors is not None else ():
            shared.append(Shared("anchors", p, (p, f"anchors.{p}.{name}"), (p, f"sending.{p}.{name}")))
    for owner, mirror in getattr(stage.model, "tied_parameters", ()):
        shared.append(Shared("tied", last, (0, f"model.{owner}"), (last, f"model.{mirror}")))
    return shared


class Sync:
    """Keeps mirrors equal to their owners, for the stages that this process holds.

    Args:
        stages: this process's stages.
        stage_rank: the rank in `group` of every stage; all equal in one process.
        group: None in one process.
        link: emulated for what crosses no boundary's own wire (tied embeddings, from the first stage to the last).
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        stage_rank: dict[int, int],
        ledger: Ledger,
        group: dist.ProcessGroup | None = None,
        link: Link | None = None,
    ) -> None:
        self.stage_rank = stage_rank
        self.group = group
        self.ledger = ledger
        self.ports = {(port.boundary, port.incoming): port for stage in stages for port in stage.ports()}
        self.parameters = {
            (stage.index, name): parameter
            for stage in stages
            for name, parameter in stage.named_parameters(remove_duplicate=False)
        }
        self.direct = LinkQueue(link) if link is not None else None
        self.shared = shared_tensors(stages)
        for shared in self.shared:
            mirror = self.parameters.get(shared.mirror)
            if mirror is not None and mirror is not self.parameters.get(shared.owner):
                mirror.is_mirror = True  # type: ignore[attr-defined]  # optimizers leave it alone

    def mirrors(self) -> set[str]:
        """Names of the parameters that follow an owner: no optimizer steps them."""
        return {shared.mirror[1] for shared in self.shared}

    def collect(self) -> None:
        """Add each mirror's gradient to its owner's and drop it. A missing gradient counts as zero."""
        learning = [shared for shared in self.shared if self._learns(shared) and not shared.one_sided]
        gradients = [self._gradient(shared) for shared in learning]
        arrived = self._exchange(learning, gradients, Direction.BACKWARD)
        for shared, gradient in zip(learning, arrived, strict=True):
            owner = self.parameters.get(shared.owner)
            if owner is not None and gradient is not None and (owner.grad is not None or bool(gradient.any())):
                owner.grad = gradient if owner.grad is None else owner.grad + gradient

    def publish(self, *, everything: bool = False, boundary: int | None = None) -> None:
        """Give each mirror its owner's value; returns when all have it.

        Args:
            everything: also tensors that do not learn (at the start).
            boundary: only what is billed at this boundary.
        """
        chosen = [
            shared
            for shared in self.shared
            if (everything or self._learns(shared)) and boundary in (None, shared.boundary)
        ]
        owners = [self.parameters.get(shared.owner) for shared in chosen]
        values = [None if owner is None else owner.detach() for owner in owners]
        arrived = self._exchange(chosen, values, Direction.FORWARD)
        for shared, value in zip(chosen, arrived, strict=True):
            mirror = self.parameters.get(shared.mirror)
            if mirror is not None and value is not None:
                if shared.local(self.stage_rank):
                    mirror.data = value  # one storage from now on
                else:
                    mirror.data.copy_(value)

    def _learns(self, shared: Shared) -> bool:
        ends = (shared.owner, shared.mirror)
        return any(self.parameters[end].requires_grad for end in ends if end in self.parameters)

    def _gradient(self, shared: Shared) -> Tensor | None:
        """Take the mirror's gradient away from it, where this process holds the mirror."""
        mirror = self.parameters.get(shared.mirror)
        if mirror is None:
            return None
        gradient = torch.zeros_like(mirror) if mirror.grad is None else mirror.grad
        mirror.grad = None
        return gradient

    def _exchange(
        self, shared: Sequence[Shared], outgoing: Sequence[Tensor | None], direction: Direction
    ) -> list[Tensor | None]:
        """Send each tensor across; returns what arrived here, in the same order (None: nothing for this process)."""
        arrived: list[Tensor | None] = [None] * len(shared)
        carriers: dict[int, Tensor] = {}
        operations: list[dist.P2POp] = []
        for i, (item, tensor) in enumerate(zip(shared, outgoing, strict=True)):
            source, target = _ends(item, direction)
            sends, receives = source in self.parameters, target in self.parameters
            if item.local(self.stage_rank):
                arrived[i] = tensor
                continue
            if sends and tensor is not None:
                carriers[i] = self._pack(item, tensor, direction)
            if sends and not receives:
                operations.append(self._operation(dist.isend, carriers.pop(i), self.stage_rank[target[0]]))
            if receives and not sends:
                carriers[i] = self._empty_carrier(self.parameters[target])
                operations.append(self._operation(dist.irecv, carriers[i], self.stage_rank[source[0]]))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for i, carrier in carriers.items():
            arrived[i] = self._unpack(shared[i], carrier, direction)
        return arrived

    def _operation(self, function: object, tensor: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(function, tensor, group=self.group, group_peer=rank)  # type: ignore[arg-type]

    def _pack(self, shared: Shared, tensor: Tensor, direction: Direction) -> Tensor:
        number = self.shared.index(shared)  # takes the microbatch's place: which tensor this is
        header = Header(_CODEC, shared.boundary, direction, number, _layout(tensor), time.monotonic())
        carrier, payload = new_carrier(header, tensor.device)
        payload[header.layout.codes_section].view(torch.float32).copy_(tensor.reshape(-1))
        kind = shared.kind if direction is Direction.FORWARD else f"{shared.kind}_gradient"
        self.ledger.bill(shared.boundary, direction, kind, header.layout.total_bytes)
        return carrier

    def _empty_carrier(self, parameter: Tensor) -> Tensor:
        return torch.empty(_layout(parameter).total_bytes // 4, dtype=torch.float32, device=parameter.device)

    def _unpack(self, shared: Shared, carrier: Tensor, direction: Direction) -> Tensor:
        where = f"{shared.kind} of boundary {shared.boundary}, {direction.name.lower()}"
        header, payload = open_carrier(carrier, where)
        expected = (_CODEC, shared.boundary, direction, self.shared.index(shared))
        if (header.codec, header.boundary, header.direction, header.microbatch) != expected:
            raise WireError(f"{where}: received message {header.microbatch} of boundary {header.boundary} instead")
        port = self.ports.get((shared.boundary, direction))
        if port is not None:
            port.wait_for_link(header.sent_at_s, payload.numel())
        elif self.direct is not None:
            wait_until(self.direct.arrival(header.sent_at_s, payload.numel()))
        _, target = _ends(shared, direction)
        values = payload[header.layout.codes_section].view(torch.float32)
        return values.view(self.parameters[target].shape).to(self.parameters[target].dtype)


def _layout(tensor: Tensor) -> Layout:
    return Layout(1, tensor.numel(), 0, 4 * tensor.numel())


def _ends(shared: Shared, direction: Direction) -> tuple[tuple[int, str], tuple[int, str]]:
    """Where a tensor comes from and where it goes."""
    return (shared.owner, shared.mirror) if direction is Direction.FORWARD else (shared.mirror, shared.owner)


def frames(stages: Sequence[Stage]) -> dict[str, nn.Parameter]:
    """The master frames held here, by name."""
    return {
        name: parameter
        for stage in stages
        for name, parameter in stage.named_parameters()
        if name.startswith("outbound.") and name.endswith(".frame_DK")
    }
