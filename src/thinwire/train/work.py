"""What a run learns from: text, whose next token is to be predicted, or pictures, whose class is.

Batches are pairs `(inputs, targets)`: ids `(B, T)` and `(B, T)`, or pixels `(B, 3, 32, 32)` and classes `(B,)`. Where a
run counts tokens, it counts pictures here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.data import (
    ImageBatches,
    Images,
    TokenData,
    bits_per_byte,
    evaluation_batches,
    prepare,
    prepare_cifar10,
    validation_windows,
)
from thinwire.errors import ConfigError
from thinwire.train.config import Config

IGNORED = -100  # a target that does not count
Batch = tuple[Tensor, Tensor]


class Work(Protocol):
    """Data and what is measured on it."""

    @property
    def digest(self) -> str:
        """Changes with the data; all ranks must agree on it."""

    def batches(self, config: Config) -> Any:
        """The global batches of a run, resumable."""

    def pair(self, batch: Any) -> Batch:
        """Inputs and targets of a global batch."""

    def held_out(self, config: Config) -> Batch:
        """All inputs and targets to evaluate on."""

    def save(self, run: Path) -> None:
        """Write into a run's folder what its model is useless without."""

    def measures(self, nats: float, targets: Tensor, hits: float) -> dict[str, float]:
        """What an evaluation says, of the summed loss and the number of right answers."""


@dataclass(frozen=True)
class Text:
    """Prediction of the next token."""

    data: TokenData

    @property
    def digest(self) -> str:
        return self.data.digest

    def batches(self, config: Config) -> Any:
        return self.data.batches(config.model.seq_len, config.train.batch_size, config.train.seed)

    def pair(self, batch: Tensor) -> Batch:
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    def held_out(self, config: Config) -> Batch:
        return self.pair(validation_windows(self.data.validation, config.model.seq_len, config.data.val_tokens))

    def save(self, run: Path) -> None:
        self.data.tokenizer.save(run / "tokenizer.json")

    def measures(self, nats: float, targets: Tensor, hits: float) -> dict[str, float]:
        """`val_loss` (nats per token), `val_perplexity`, `val_bits_per_byte`."""
        loss = nats / targets.numel()
        num_bytes = int(torch.as_tensor(self.data.tokenizer.token_bytes)[targets].sum())
        perplexity = math.exp(min(loss, 100.0))
        return {"val_loss": loss, "val_perplexity": perplexity, "val_bits_per_byte": bits_per_byte(nats, num_bytes)}


@dataclass(frozen=True)
class Pictures:
    """Classification of CIFAR-10."""

    train: Images
    test: Images

    @property
    def digest(self) -> str:
        return self.train.digest

    def batches(self, config: Config) -> Any:
        return ImageBatches(self.train, config.train.batch_size, config.train.seed)

    def pair(self, batch: Batch) -> Batch:
        return batch

    def held_out(self, config: Config) -> Batch:
        """The test pictures, at most `data.val_tokens` of them."""
        number = min(config.data.val_tokens, len(self.test))
        (pixels, labels), *_ = evaluation_batches(self.test, number)
        return pixels, labels

    def save(self, run: Path) -> None:
        """Nothing is needed."""

    def measures(self, nats: float, targets: Tensor, hits: float) -> dict[str, float]:
        """`val_loss` (nats per picture), `val_accuracy` (per cent)."""
        return {"val_loss": nats / targets.numel(), "val_accuracy": 100 * hits / targets.numel()}


def load(config: Config) -> Work:
    """Tokenise or map text, or read pictures.

    Raises:
        ConfigError: pictures for a model of text, or the other way round; or data that cannot be read.
    """
    if config.is_pictures:
        if config.data.source == "stdlib":
            raise ConfigError(
                f"data.source=stdlib for a {config.model.family}", "CIFAR-10: a folder of parquet files, or an archive",
                "set data.source",
            )  # fmt: skip
        return Pictures(*prepare_cifar10(config.data.source))
    return Text(prepare(config.data.source, config.vocab_size, text_column=config.data.text_column))


@dataclass
class Loss:
    """Cross-entropy summed over the targets that count, times `scale`: microbatches and stages add up to the mean.

    Without gradients, in evaluations, it also counts right answers.
    """

    scale: float
    hits: float = field(default=0.0)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat, wanted = logits.flatten(0, -2).float(), targets.flatten()
        if not torch.is_grad_enabled():
            self.hits += float((flat.argmax(-1) == wanted).sum())
        return self.scale * F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")
