"""Running a pipeline: torch's schedules over our stages, and the one-process twin that computes the same.

Both have three verbs: `step` (forward and backward of one batch, gradients accumulate), `evaluate` (forward only) and
`start` (frames initialised and sent). Losses are sums over the batch as the loss function gives them; nothing is
rescaled behind the user's back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from thinwire.errors import ConfigError
from thinwire.pipeline.activity import Activity
from thinwire.pipeline.orders import check_schedule, stage_rank
from thinwire.pipeline.stage import Stage
from thinwire.pipeline.sync import Sync
from thinwire.wire import Ledger

LossFunction = Callable[[Tensor, Tensor], Tensor]


class Engine(Protocol):
    """What runs a pipeline, in many processes or in one."""

    stages: Sequence[Stage]
    sync: Sync
    ledger: Ledger
    activity: Activity
    loss: LossFunction

    def start(self, ids_BT: Tensor) -> None:
        """Initialise the frames as the codec says, from the activations of `ids_BT`, and send them to the mirrors."""

    def step(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor | None:
        """Run all microbatches forward and backward; returns the summed loss where the last stage is, else None."""

    def evaluate(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor | None:
        """The same, forward only and without gradients."""


class _Base:
    def __init__(
        self, stages: Sequence[Stage], sync: Sync, num_microbatches: int, shape: tuple[int, ...], loss: LossFunction
    ) -> None:
        self.stages = stages
        self.shape = shape
        self.sync = sync
        self.ledger = sync.ledger
        self.num_microbatches = num_microbatches
        self.loss = loss
        self.activity = Activity()

    def _first_pass(self, stage: Stage, received: Tensor, microbatch: int) -> Tensor:
        """Run a stage for the first time: set and publish the frame behind it before anything crosses there."""
        if stage.is_last:
            return received
        x_BTD, ids_BT = stage.hidden(received, microbatch)
        stage.encoder.init_from(x_BTD, ids_BT, stage.sending_anchors)
        self.sync.publish(everything=True, boundary=stage.index)
        return stage.send(x_BTD, ids_BT, microbatch)

    def _chunks(self, batch: Tensor) -> tuple[Tensor, ...]:
        return batch.chunk(self.num_microbatches)

    def _check_shapes(self, *batches: Tensor) -> None:
        """Refuse batches of another shape than the engine was built for, before anything is sent."""
        expected = (self.shape[0] * self.num_microbatches, *self.shape[1:])
        for batch in batches:
            if not batch.dim() or tuple(batch.shape) != expected[: batch.dim()]:
                raise ConfigError(
                    f"batch of shape {tuple(batch.shape)}",
                    f"{expected}: {self.num_microbatches} microbatches of {self.shape}, as the pipeline was built",
                    "build another pipeline for other shapes",
                )


class Twin(_Base):
    """All stages in one process, through the same encoders, wires and decoders, microbatch by microbatch."""

    @torch.no_grad()
    def start(self, ids_BT: Tensor) -> None:
        received = ids_BT
        for stage in self.stages:
            received = self._first_pass(stage, received, 0)
        self.sync.publish(everything=True, boundary=self.stages[0].num_stages - 1)  # what crosses no boundary

    def step(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        self._check_shapes(ids_BT, targets_BT)
        total = torch.zeros((), device=ids_BT.device)
        for number, (ids, targets) in enumerate(zip(self._chunks(ids_BT), self._chunks(targets_BT), strict=True)):
            loss = self.loss(self.forward(ids, number), targets)
            with self.activity.timed("B", -1, number):
                loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        self._check_shapes(ids_BT, targets_BT)
        total = torch.zeros((), device=ids_BT.device)
        for number, (ids, targets) in enumerate(zip(self._chunks(ids_BT), self._chunks(targets_BT), strict=True)):
            total += self.loss(self.forward(ids, number), targets)
        return total

    def forward(self, ids_BT: Tensor, microbatch: int = 0) -> Tensor:
        """Return the logits `(B, T, V)` of one microbatch."""
        received = ids_BT
        for stage in self.stages:
            timer = self.activity.timed("F", stage.index, microbatch) if torch.is_grad_enabled() else nullcontext()
            with timer:
                received = stage(received, microbatch)
        return received


class _WatchedStage(PipelineStage):
    """torch's stage, which also says what it is doing, for errors and for the account of time."""

    def __init__(self, stage: Stage, activity: Activity, **options: Any) -> None:
        super().__init__(stage, stage.index, stage.num_stages, **options)
        self.activity = activity
        self.ours = stage

    def _timed(self, kind: str, microbatch: int) -> Any:
        return self.activity.timed(kind, self.stage_index, microbatch, list(self.ours.ports()))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed("F", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.activity.in_flight(self.stage_index, len(self.fwd_cache))
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        kind = "B" if kwargs.get("full_backward", True) else "I"
        with self._timed(kind, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._timed("W", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        if not self.is_first:
            self.activity.set("waiting for an activation", self.stage_index, fwd_chunk_id, self.stage_index - 1)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if not self.is_last:
            self.activity.set("waiting for a gradient", self.stage_index, bwd_chunk_id, self.stage_index + 1)
        return super().get_bwd_recv_ops(bwd_chunk_id)


class Pipeline(_Base):
    """This process's stages, run by a schedule of `torch.distributed.pipelining`.

    Args:
        stages: the stages that `stage_rank` puts on this rank, in order.
        schedule: a name that `orders.check_schedule` knows.
        shape: `(B, T)` of one microbatch; every batch must consist of such, the wires' buffers are allocated once.
        group: the pipeline's process group.

    Raises:
        ConfigError: a schedule that does not take these counts.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        sync: Sync,
        *,
        schedule: str,
        num_microbatches: int,
        shape: tuple[int, int],
        loss: LossFunction,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(stages, sync, num_microbatches, shape, loss)
        self.group = group
        self.device = next(stages[0].parameters()).device
        num_ranks, num_stages = dist.get_world_size(group), stages[0].num_stages
        check_schedule(schedule, num_ranks, num_stages // num_ranks, num_microbatches)
        self.stage_rank = stage_rank(schedule, num_ranks, num_stages // num_ranks)
        watched = [self._watch(stage) for stage in stages]
        kind: Any = get_schedule_class(schedule)
        single = issubclass(kind, PipelineScheduleSingle)
        # The loss function scales; the schedule must not divide gradients that accumulate over several steps.
        self.schedule = kind(watched[0] if single else watched, num_microbatches, loss_fn=loss, scale_grads=False)

    def _watch(self, stage: Stage) -> _WatchedStage:
        batch, tokens = self.shape
        numbers = stage.codec.wire_bytes((batch, tokens, stage.dim)) // 4
        carrier = torch.empty(numbers, device="meta").requires_grad_()
        ids = torch.empty(self.shape, dtype=torch.int64, device="meta")
        logits = torch.empty((*self.shape, stage.vocab_size), device="meta").requires_grad_()
        return _WatchedStage(
            stage,
            self.activity,
            device=self.device,
            group=self.group,
            input_args=(ids if stage.is_first else carrier,),
            output_args=(logits if stage.is_last else carrier,),
        )

    @torch.no_grad()
    def start(self, ids_BT: Tensor) -> None:
        self._sweep([ids_BT], self._first_pass, before=self._receive_frame)
        self.sync.publish(everything=True, boundary=self.stages[0].num_stages - 1)  # what crosses no boundary

    def step(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor | None:
        self._check_shapes(ids_BT, targets_BT)
        losses: list[Tensor] = []
        inputs = (ids_BT,) if self.stages[0].is_first else ()
        target = targets_BT if self.stages[-1].is_last else None
        numbers = torch.arange(self.num_microbatches)
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False, microbatch=numbers)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    @torch.no_grad()
    def evaluate(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor | None:
        self._check_shapes(ids_BT, targets_BT)
        targets = self._chunks(targets_BT)

        def visit(stage: Stage, received: Tensor, microbatch: int) -> Tensor:
            output: Tensor = stage(received, microbatch)
            return self.loss(output, targets[microbatch]) if stage.is_last else output  # logits are not kept

        losses = self._sweep(self._chunks(ids_BT), visit)
        return torch.stack(losses).sum() if self.stages[-1].is_last else None

    def _sweep(
        self,
        inputs: Sequence[Tensor],
        visit: Callable[[Stage, Tensor, int], Tensor],
        before: Callable[[Stage], None] = lambda stage: None,
    ) -> list[Tensor]:
        """Bring microbatches forward through all stages, without a schedule; returns the last local stage's outputs.

        torch's own `eval` fails for V schedules, which hand gradients over inside a rank even when there are none.
        Every rank runs all microbatches of one stage, then of its next; sends are waited for at the end, so no order
        of ranks can block.
        """
        sends: list[tuple[Any, Tensor]] = []
        outputs = list(inputs)
        for stage in self.stages:
            elsewhere = not stage.is_first and self.stage_rank[stage.index - 1] != self.stage_rank[stage.index]
            if elsewhere:
                before(stage)
            received, outputs = outputs, []
            for number, one in enumerate(received):
                arrived = self._receive(stage, inputs[number].shape, number) if elsewhere else one
                outputs.append(visit(stage, arrived, number))
                if not stage.is_last and self.stage_rank[stage.index + 1] != self.stage_rank[stage.index]:
                    peer = self.stage_rank[stage.index + 1]
                    sends.append((dist.isend(outputs[-1], group=self.group, group_dst=peer), outputs[-1]))
        for work, _ in sends:
            work.wait()
        return outputs

    def _receive(self, stage: Stage, shape: torch.Size, microbatch: int) -> Tensor:
        numbers = stage.codec.wire_bytes((shape[0], shape[1], stage.dim)) // 4
        carrier = torch.empty(numbers, dtype=torch.float32, device=self.device)
        self.activity.set("waiting for an activation", stage.index, microbatch, stage.index - 1)
        dist.recv(carrier, group=self.group, group_src=self.stage_rank[stage.index - 1])
        return carrier

    def _receive_frame(self, stage: Stage) -> None:
        self.sync.publish(everything=True, boundary=stage.index - 1)
