"""Validation on held-out documents: loss, perplexity and bits per byte."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.data import TokenData, bits_per_byte, validation_windows
from thinwire.pipeline import Engine
from thinwire.train.build import IGNORED
from thinwire.train.config import Config
from thinwire.train.place import Place


class Validation:
    """The held-out windows of a run, cut into batches of the size that its engine takes."""

    def __init__(self, config: Config, data: TokenData, place: Place) -> None:
        self.place = place
        self.num_replicas = 1 if config.dp.emulate else config.dp.replicas
        self.scale = config.tokens_per_step / config.dp.replicas  # the engine divides by this
        windows = validation_windows(data.validation, config.model.seq_len, config.data.val_tokens)
        self.num_targets = windows[:, 1:].numel()
        self.num_bytes = int(torch.as_tensor(data.tokenizer.token_bytes)[windows[:, 1:]].sum())
        rows = config.train.batch_size // (config.train.accumulation * config.dp.replicas)
        missing = -len(windows) % rows
        padding = windows[:1].expand(missing, -1)
        self.inputs = torch.cat([windows[:, :-1], padding[:, :-1]]).split(rows)
        self.targets = torch.cat([windows[:, 1:], torch.full_like(padding[:, 1:], IGNORED)]).split(rows)

    def run(self, engine: Engine) -> dict[str, float]:
        """Return `val_loss` (nats per token), `val_perplexity` and `val_bits_per_byte`, the same on every rank."""
        total = torch.zeros((), dtype=torch.float64)
        for number, (ids, targets) in enumerate(zip(self.inputs, self.targets, strict=True)):
            if number % self.num_replicas != self.place.replica:
                continue  # another replica's
            part = engine.evaluate(self._here(ids), self._here(targets))
            total += 0 if part is None else part.double().cpu()
        if self.place.group is not None:
            dist.all_reduce(total, group=self.place.group)
        nats = float(total) * self.scale
        loss = nats / self.num_targets
        return {
            "val_loss": loss,
            "val_perplexity": math.exp(min(loss, 100.0)),
            "val_bits_per_byte": bits_per_byte(nats, self.num_bytes),
        }

    def _here(self, batch: Tensor) -> Tensor:
        return batch.contiguous().to(self.place.device)
