"""Validation on held-out documents or pictures."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.pipeline import Engine
from thinwire.train import running
from thinwire.train.config import Config
from thinwire.train.place import Place
from thinwire.train.work import IGNORED, Loss, Work


class Validation:
    """What is held out, cut into batches of the size that a run's engine takes. Replicas share them out."""

    def __init__(self, config: Config, work: Work, place: Place) -> None:
        self.work, self.place = work, place
        self.num_replicas = 1 if config.dp.emulate else config.dp.replicas
        self.scale = config.tokens_per_step / config.dp.replicas  # the engine divides by this
        inputs, self.wanted = work.held_out(config)
        rows = config.train.batch_size // (config.train.accumulation * config.dp.replicas)
        missing = -len(inputs) % rows
        self.inputs = torch.cat([inputs, inputs[:1].expand(missing, *inputs.shape[1:])]).split(rows)
        ignored = torch.full((missing, *self.wanted.shape[1:]), IGNORED)
        self.targets = torch.cat([self.wanted, ignored]).split(rows)

    def run(self, engine: Engine) -> dict[str, float]:
        """Return the work's measures, the same on every rank."""
        loss = engine.loss
        assert isinstance(loss, Loss)
        loss.hits = 0.0
        running.share(engine.stages, self.place.replica_group)
        nats = 0.0
        for stage in engine.stages:
            stage.eval()
        for number, (inputs, targets) in enumerate(zip(self.inputs, self.targets, strict=True)):
            if number % self.num_replicas == self.place.replica:
                part = engine.evaluate(self._here(inputs), self._here(targets))
                nats += 0.0 if part is None else float(part)
        for stage in engine.stages:
            stage.train()
        total = torch.tensor([nats * self.scale, loss.hits], dtype=torch.float64, device=self.place.device)
        if self.place.group is not None:
            dist.all_reduce(total, group=self.place.group)
        return self.work.measures(float(total[0]), self.wanted, float(total[1]))

    def _here(self, batch: Tensor) -> Tensor:
        return batch.contiguous().to(self.place.device)
