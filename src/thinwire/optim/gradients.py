"""The gradients of the workers here: taken from the parameters, kept until the step, and whether they are finite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.errors import ConfigError

Gradients = list[Tensor | None]  # of one worker, in the order of the optimizer's parameters


def first_not_finite(gradients: Gradients, limit: float = math.inf) -> int | None:
    """The first of one worker's gradients with NaN or infinity, or with a number above `limit`."""
    held = [(i, g) for i, g in enumerate(gradients) if g is not None and g.numel()]
    if not held or _is_finite([g for _, g in held], limit):
        return None
    return next(i for i, g in held if not _is_finite([g], limit))


def _is_finite(held: list[Tensor], limit: float) -> bool:
    largest = float(torch.nn.utils.get_total_norm(held, math.inf))
    return math.isfinite(largest) and largest <= limit


def take_gradient(p: Tensor) -> Tensor | None:
    """Return a copy of a parameter's gradient and take the gradient away: somebody may hold it, and overwrite it."""
    g, p.grad = p.grad, None
    return None if g is None else g.clone()


class Recorder:
    """What the workers of this process have computed since the last step, one behind another."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.recorded: list[Gradients] = []
        self.abstaining: set[int] = set()
        self.has_warned = False

    def abstain(self) -> None:
        """The worker whose gradients are there now sits out the next step."""
        self.abstaining.add(len(self.recorded))

    def record(self, parameters: Sequence[Tensor]) -> None:
        """Take the gradients of one worker, and make room for those of the next."""
        if len(self.recorded) == self.num_workers:
            raise ConfigError(f"gradients of worker {len(self.recorded) + 1}", f"{self.num_workers}", "call step()")
        self.recorded.append([take_gradient(p) for p in parameters])

    def collect(self, parameters: Sequence[Tensor]) -> list[Gradients]:
        """Return the gradients of every worker here, and forget them."""
        if self.num_workers == 1 and not self.recorded:
            gradients: list[Gradients] = [[p.grad for p in parameters]]
        else:
            has_more = any(p.grad is not None for p in parameters)
            if len(self.recorded) + has_more == self.num_workers and has_more:
                self.record(parameters)
            if len(self.recorded) != self.num_workers:
                raise ConfigError(
                    f"gradients of {len(self.recorded) + has_more} workers",
                    f"of all {self.num_workers} virtual workers",
                    "call next_worker() after each one's backward pass",
                )
            if any(len(own) != len(parameters) for own in self.recorded):
                raise ConfigError(
                    f"gradients of {[len(own) for own in self.recorded]} parameters", f"{len(parameters)} each",
                    "add groups before the first worker's backward pass",
                )  # fmt: skip
            gradients, self.recorded = self.recorded, []
        if any(g is not None and g.is_sparse for worker in gradients for g in worker):
            raise ConfigError("sparse gradients", "dense ones", "build the embedding with sparse=False")
        return gradients

    def warn(self, spoiled: Mapping[int, str]) -> None:
        """Say once which worker here has abstained because of which parameter.

        Not before the step is over: a warning may be an error, and the other workers would wait.
        """
        if spoiled and not self.has_warned:
            self.has_warned = True
            worker, name = next(iter(spoiled.items()))
            warnings.warn(
                f"worker {worker} abstained from a step: its gradient of {name} is not finite, or too large to be "
                "averaged; later ones are counted in optimizer.abstained without a warning",
                RuntimeWarning, stacklevel=3,
            )  # fmt: skip
