"""Cutting a model into stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.pipeline.stage import Stage


class Splittable(Protocol):
    """What a model must offer to be cut: its sizes, and slices that share its parameters."""

    config: Any  # with `dim`, `vocab_size`, `num_layers`

    def slice(self, layers: range, *, embedding: bool, head: bool) -> nn.Module:
        """Return a model of these layers, sharing their parameters under their own names."""


def balance_by_parameters(layer_sizes: Sequence[int], first: int, last: int, num_stages: int) -> list[int]:
    """Return how many consecutive layers each stage gets, so that the largest stage is as small as possible.

    Args:
        layer_sizes: parameters of each layer.
        first: parameters that come with the first stage (embedding).
        last: parameters that come with the last stage (norm, head).

    Every stage gets at least one layer. Among the best cuts the one with the smallest sum of squares is taken.
    """
    extra = [0] * num_stages
    extra[0] += first
    extra[-1] += last
    before = [0]
    for size in layer_sizes:
        before.append(before[-1] + size)
    bottleneck = _best_cut(before, extra, lambda largest, size: max(largest, size))[0]
    return _best_cut(before, extra, lambda sum_, size: sum_ + size * size if size <= bottleneck else math.inf)[1]


def _best_cut(
    before: Sequence[int], extra: Sequence[int], cost: Callable[[float, int], float]
) -> tuple[float, list[int]]:
    """Return the least cost and its counts; `cost(so_far, size)` adds a stage and never decreases."""
    num_layers, num_stages = len(before) - 1, len(extra)
    best: dict[int, tuple[float, list[int]]] = {0: (0, [])}  # layers so far -> cost, counts
    for stage in range(num_stages):
        after: dict[int, tuple[float, list[int]]] = {}
        for start, (so_far, counts) in best.items():
            for end in range(start + 1, num_layers - (num_stages - 1 - stage) + 1):
                candidate = (cost(so_far, before[end] - before[start] + extra[stage]), [*counts, end - start])
                if end not in after or candidate < after[end]:
                    after[end] = candidate
        best = after
    return best[num_layers]


def layer_counts(model: Splittable, num_stages: int, balance: Sequence[int] | None = None) -> list[int]:
    """Return the number of layers per stage: `balance` after a check, or a balance by parameter count.

    Raises:
        ConfigError: more stages than layers, or a balance that does not add up.
    """
    num_layers = model.config.num_layers
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{num_stages} stages for a model of {num_layers} layers", f"1 to {num_layers} stages",
            "use fewer stages or a deeper model",
        )  # fmt: skip
    if balance is not None and len(balance) > 0:
        if len(balance) != num_stages or sum(balance) != num_layers or min(balance) < 1:
            raise ConfigError(
                f"balance {list(balance)}",
                f"{num_stages} numbers of at least 1 that add up to {num_layers}",
                "leave it out to balance by parameter count",
            )
        return list(balance)
    sizes = [_size(model.slice(range(i, i + 1), embedding=False, head=False)) for i in range(num_layers)]
    first = _size(model.slice(range(0), embedding=True, head=False))
    last = _size(model.slice(range(0), embedding=False, head=True))
    return balance_by_parameters(sizes, first, last, num_stages)


def split(
    model: Splittable, num_stages: int, codec: Codec, *, balance: Sequence[int] | None = None, seed: int = 0
) -> list[Stage]:
    """Return the stages of `model`, sharing its parameters, with the ends of `codec` at every boundary.

    Frames and anchors are drawn from `seed` on the model's device; a model on the meta device gives stages on the
    meta device, to be brought to life one by one with `to_empty` and `init_weights`.

    Args:
        balance: layers per stage; by parameter count when left out.

    Raises:
        ConfigError: the model cannot be cut so, or the codec cannot work at its width or vocabulary.
    """
    if not isinstance(codec, Codec):
        raise ConfigError(f"codec {codec!r}", "a Codec", "make one with thinwire.codecs.get(name, ...)")
    if not isinstance(model, nn.Module) or not hasattr(model, "slice"):
        raise ConfigError(f"model {type(model).__name__}", "a module with `config` and `slice`, as models.Llama")
    counts = layer_counts(model, num_stages, balance)
    device = next(iter(_parameters(model))).device
    stages: list[Stage] = []
    start = 0
    for index, count in enumerate(counts):
        layers = range(start, start + count)
        part = model.slice(layers, embedding=index == 0, head=index == num_stages - 1)
        with torch.device(device):
            stages.append(Stage(index, num_stages, part, codec, model.config.dim, model.config.vocab_size))
        start += count
    if device.type != "meta":
        for stage in stages:
            stage.init_ends(seed)
        _copy_frames(stages)
    return stages


def _copy_frames(stages: Sequence[Stage]) -> None:
    """Give every receiver in this process its sender's frame."""
    for sender, receiver in pairwise(stages):
        receiver.decoder.load_state_dict(sender.encoder.state_dict(), strict=False)


def _parameters(model: Splittable) -> list[nn.Parameter]:
    assert isinstance(model, nn.Module)
    return list(model.parameters())


def _size(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())
