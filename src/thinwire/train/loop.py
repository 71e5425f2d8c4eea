"""The training loop, the same in every process of a run."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import __version__
from thinwire.errors import ConfigError
from thinwire.link import Link
from thinwire.optim import clip_gradients, gradient_square_sum, lr_factor, set_lr
from thinwire.pipeline import frames
from thinwire.stiefel import orthogonality_error
from thinwire.train import checkpoint, replicas, running
from thinwire.train.build import build
from thinwire.train.config import Config
from thinwire.train.evaluate import Validation
from thinwire.train.metrics import Journal, TrafficMeter, write_atomically
from thinwire.train.place import Place, agree, gather_json
from thinwire.train.stored import layout_digest, run_digest, to_dict
from thinwire.train.summary import routing_table, summarise
from thinwire.train.work import Batch

_log = logging.getLogger("thinwire")
_MAX_SKIPPED = 10  # steps in a row whose loss or gradient is not finite


class Trainer:
    """One process's part of a run."""

    def __init__(self, config: Config, place: Place) -> None:
        self.config, self.place = config, place
        self.run = Path(config.folder) / config.name
        self.parts = build(config, place)
        self._agree_on_the_run()
        self.engine = self.parts.engine
        self.batches = self._batches()
        self.validation = Validation(config, self.parts.work, place)
        self.meter = TrafficMeter(self.engine.ledger)
        counted = config.tokens_per_step, config.unit
        self.journal = Journal(self.run, place, config.name, config.train.steps, *counted)
        self.parameters = [p for stage in self.parts.stages for p in stage.parameters()]
        self.step = 0
        self.skipped = 0
        self.elapsed_s = 0.0

    def fit(self) -> dict[str, Any]:
        """Train to the last step; returns the summary (on the main process; elsewhere an empty one).

        Raises:
            ConfigError: the loss is not finite for ten steps in a row, or a checkpoint does not fit.
        """
        train = self.config.train
        self._begin()  # may refuse a checkpoint: nothing has been written yet
        self._prepare_folder()
        self.journal.open(self.step, routing_table(self.config, self.parts.routes, self.place))
        first_step = self.step
        exchange = replicas.plan(self.config, self.parts, self.place)
        self.journal.say(exchange.lines() if exchange else [])
        self.meter.read()
        evaluation: dict[str, float] = {}
        try:
            while self.step < train.steps:
                self._train_step()
                done = self.step == train.steps
                if done or _due(self.step, train.eval_every):
                    evaluation = self._evaluate()
                if done or _due(self.step, train.checkpoint_every):
                    self._save()
        finally:
            self.journal.close()
        evaluation = evaluation or self.validation.run(self.engine)
        summary = summarise(self.config, self.place, self.parts, self.journal.records, evaluation, exchange, first_step)
        self.journal.say(replicas.lines(summary))
        return summary

    def _batches(self) -> Any:
        return self.parts.work.batches(self.config)

    def _agree_on_the_run(self) -> None:
        facts = {"version": __version__, "configuration": run_digest(self.config), "data": self.parts.work.digest}
        if any(Link.parse(link) is not None for link in (self.config.pipeline.link, self.config.dp.link)):
            facts["machine (links are emulated inside one only)"] = socket.gethostname()
        agree(facts, self.place)

    # --- the start ---------------------------------------------------------------------------------------------

    def _prepare_folder(self) -> None:
        if self.place.is_main:
            if self.config.overwrite:
                shutil.rmtree(self.run, ignore_errors=True)
            self.run.mkdir(parents=True, exist_ok=True)
            write_atomically(self.run / "config.json", json.dumps(to_dict(self.config), indent=2))
            self.parts.work.save(self.run)
        processes = gather_json([self._process()], self.place)
        if self.place.is_main:
            write_atomically(self.run / "processes.json", json.dumps([row for part in processes for row in part]))

    def _process(self) -> dict[str, Any]:
        stages = [stage.index for stage in self.parts.stages]
        return {
            "rank": self.place.rank,
            "replica": self.place.replica,
            "stages": stages,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }

    def _begin(self) -> None:
        """Resume, or initialise the frames from the first batch; either way every mirror gets its owner's value."""
        newest = checkpoint.latest(self.run) if self.config.resume else None
        if newest is None:
            first, _ = self._pair(self._batches().next())
            self.engine.start(first)
        else:
            self._resume(newest)
        self._equalise()
        self.meter.read()

    def _resume(self, path: Path) -> None:
        state = checkpoint.read_state(path)
        checkpoint.check_resumable(path, state, self.config, self.parts.work.digest)
        values = self._tensors()
        if state["replicas"] == self.config.dp.replicas:
            checkpoint.load(path, values, self.place)
            torch.set_rng_state(values[f"rng/{self.place.rank}"])
        else:
            checkpoint.load(path, checkpoint.without_workers(values), self.place)
            self._take_over(path, values, state["replicas"])
        for optimizer in self.parts.optimizers:
            for group in optimizer.param_groups:
                group["steps"] = state["optimizer_steps"]
        self.batches.load_state_dict(state["data"])
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        self.engine.sync.publish(everything=True)

    def _equalise(self) -> None:
        """Every replica starts with the first one's values: what machines compute alike may differ in the last bits."""
        if self.place.replica_group is not None:
            for tensor in [*self.parameters, *(b for stage in self.parts.stages for b in stage.buffers())]:
                dist.broadcast(tensor.detach(), group=self.place.replica_group, group_src=0)

    # --- a step ------------------------------------------------------------------------------------------------

    def _train_step(self) -> None:
        config = self.config
        self.engine.activity.step = self.step + 1
        seconds: dict[str, float] = {"sync_s": 0.0}
        began = time.perf_counter()
        inputs, targets = self._pair(self._timed(seconds, "data_s", "reading data", self.batches.next))
        shares = list(zip(inputs.chunk(config.dp.replicas), targets.chunk(config.dp.replicas), strict=True))
        all_replicas: list[tuple[float, float]] = []
        for replica, share in enumerate(self._mine(shares), self.place.replica):
            running.follow(self.parts.stages, replica == 0)
            all_replicas += self._gradients(share, seconds)
        total = sum(loss for loss, _ in all_replicas) / len(all_replicas)
        norm = sum(norm for _, norm in all_replicas) / len(all_replicas)
        factor = lr_factor(self.step, config.train.steps, warmup=config.optim.warmup_steps, decay=config.optim.decay)
        self._timed(seconds, "optimizer_s", "the optimizer's step", lambda: self._update(all_replicas, factor))
        self._timed(seconds, "sync_s", "sending shared tensors", self.engine.sync.publish)
        self.step += 1
        seconds["step_s"] = time.perf_counter() - began
        self.elapsed_s += seconds["step_s"]
        record = {
            "step": self.step, "tokens": self.step * config.tokens_per_step, "loss": total,
            "lr": factor * config.optim.lr, "grad_norm": norm, "skipped": self.skipped > 0,
        }  # fmt: skip
        self.journal.step(self.meter.read() | seconds | self._compute_seconds() | self._orthogonality(), record)

    def _pair(self, batch: Any) -> Batch:
        inputs, targets = self.parts.work.pair(batch)
        return inputs.to(self.place.device), targets.to(self.place.device)

    def _mine(self, shares: Sequence[Batch]) -> Sequence[Batch]:
        """The shares of the batch that this process computes: its replica's, or all of them one after another."""
        return shares if self.config.dp.emulate else [shares[self.place.replica]]

    def _gradients(self, share: Batch, seconds: dict[str, float]) -> list[tuple[float, float]]:
        """Compute one replica's gradients here; returns loss and gradient norm of the replicas computed meanwhile."""
        loss = torch.zeros((), device=self.place.device)
        chunks = (part.chunk(self.config.train.accumulation) for part in share)
        for inputs, targets in zip(*chunks, strict=True):
            part = self.engine.step(inputs.contiguous(), targets.contiguous())
            loss = loss if part is None else loss + part
        self._timed(seconds, "sync_s", "bringing shared gradients together", self.engine.sync.collect)
        computed = self._agree(loss)
        own_loss, own_norm = computed[self.place.replica]
        if math.isfinite(own_loss) and math.isfinite(own_norm):
            if self.config.optim.grad_clip:
                clip_gradients(self.parameters, own_norm, self.config.optim.grad_clip)
        else:  # on all stages of the replica alike
            for optimizer in self.parts.optimizers:
                optimizer.abstain()
        if self.config.dp.emulate:
            for optimizer in self.parts.optimizers:
                optimizer.next_worker()
        return computed

    def _agree(self, loss: Tensor) -> list[tuple[float, float]]:
        """Every rank learns each replica's loss and the norm of the whole model's gradient there."""
        mine = torch.stack([loss.double().cpu(), gradient_square_sum(self.parameters)]).to(self.place.device)
        ranks = [mine]
        if self.place.group is not None:
            self.engine.activity.set("adding up the loss", None, None)
            ranks = [torch.empty_like(mine) for _ in range(self.place.world)]
            dist.all_gather(ranks, mine, group=self.place.group)
        sums = torch.stack(ranks).view(-1, self.config.pipeline_ranks, 2).sum(1)
        return [(loss, math.sqrt(square)) for loss, square in sums.tolist()]

    def _update(self, computed: Sequence[tuple[float, float]], factor: float) -> None:
        """Step; where no replica's loss and gradient are finite all of them abstain, and no state is touched."""
        finite = [math.isfinite(loss) and math.isfinite(norm) for loss, norm in computed]
        self.skipped = 0 if any(finite) else self.skipped + 1
        set_lr(self.parts.optimizers, factor)
        for optimizer in self.parts.optimizers:
            optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        if self.skipped == _MAX_SKIPPED:
            loss, norm = computed[0]
            raise ConfigError(
                f"loss {loss} and gradient norm {norm} for {_MAX_SKIPPED} steps in a row", "finite ones",
                f"lower optim.lr (now {self.config.optim.lr}) or warm up for longer",
            )  # fmt: skip

    def _timed(self, seconds: dict[str, float], key: str, doing: str, action: Callable[[], Any]) -> Any:
        self.engine.activity.set(doing, None, None)
        began = time.perf_counter()
        result = action()
        seconds[key] = seconds.get(key, 0.0) + time.perf_counter() - began
        return result

    def _compute_seconds(self) -> dict[str, float]:
        activity = self.engine.activity
        ports = [port for stage in self.parts.stages for port in stage.ports()]
        waited_s = sum(port.waited_s for port in ports)
        for port in ports:
            port.waited_s = 0.0
        exchange_s = sum(optimizer.workers.waited_s for optimizer in self.parts.optimizers)
        for optimizer in self.parts.optimizers:
            optimizer.workers.waited_s = 0.0
        compute = {"forward_s": activity.take("F"), "backward_s": activity.take("BIW")}
        return {**compute, "link_wait_s": waited_s, "exchange_s": exchange_s}

    def _orthogonality(self) -> dict[str, float]:
        errors = [orthogonality_error(frame) for frame in frames(self.parts.stages).values()]
        return {"orthogonality_error": max(errors, default=0.0)}

    # --- evaluations and checkpoints -----------------------------------------------------------------------------

    def _evaluate(self) -> dict[str, float]:
        self.journal.flush()
        evaluation = self.validation.run(self.engine)
        self._compute_seconds()  # none of it belongs to a step
        tokens = self.step * self.config.tokens_per_step
        self.journal.evaluation({"step": self.step, "tokens": tokens, **evaluation, "elapsed_s": self.elapsed_s})
        return evaluation

    def _tensors(self) -> dict[str, Tensor]:
        return checkpoint.tensors(self.parts.stages, self.engine.sync, self.parts.optimizers, self.place)

    def _take_over(self, path: Path, values: dict[str, Tensor], saved: int) -> None:
        """The rule for another number of replicas: every worker starts with the mean of the saved workers' state."""
        checkpoint.load_mean_of_workers(path, values, saved, self.place)
        if self.place.is_main:
            _log.warning(
                "checkpoint of %d replicas, now %d: each starts with the mean of the saved momenta and feedback",
                saved, self.config.dp.replicas,
            )  # fmt: skip

    def _save(self) -> None:
        self.journal.flush()
        self.engine.activity.set("saving a checkpoint", None, None)
        state = {
            "step": self.step, "tokens": self.step * self.config.tokens_per_step, "elapsed_s": self.elapsed_s,
            "data": self.batches.state_dict(), "data_digest": self.parts.work.digest,
            "replicas": self.config.dp.replicas, "optimizer_steps": self.parts.optimizers[0].param_groups[0]["steps"],
            "digest": layout_digest(self.config), "config": to_dict(self.config),
        }  # fmt: skip
        keep = self.config.train.keep_checkpoints
        checkpoint.save(self.run, self.step, state, self._tensors(), self.place, keep=keep)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
