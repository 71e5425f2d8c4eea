"""M workers' optimizers, one parameter at a time and everything dense: votes are integer sums, means are sums.

Momenta and weights have the parameters' dtype (tests give float64). Only the polar factor is the package's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.reference import votes
from tests.reference.signs import FACTORS
from thinwire.polar import polar

Gradients = Sequence[Tensor | None]
DEFAULTS: dict[str, Any] = {
    "momentum": 0.9, "average": "ema", "nesterov": False, "weight_decay": 0.0, "decay": "coupled", "scale": "none",
    "local_polar": False, "feedback": False, "betas": (0.9, 0.99),
}  # fmt: skip


@dataclass
class Weight:
    """A parameter, its logical matrices, its rule, and every worker's state."""

    value: Tensor
    rule: str
    lr: float
    splits: Sequence[int]
    workers: int
    options: dict[str, Any]
    momenta: list[Tensor] = field(init=False)
    errors: list[Tensor] = field(init=False)
    shared: torch.optim.Optimizer | Tensor | None = None

    def __post_init__(self) -> None:
        self.value = self.value.detach().clone()
        self.momenta = [torch.zeros_like(self.value) for _ in range(self.workers)]
        self.errors = [torch.zeros_like(self.value, dtype=torch.float32) for _ in range(self.workers)]
        o = self.options
        if self.rule == "adamw":
            self.shared = torch.optim.AdamW([self.value], self.lr, o["betas"], 1e-10, o["weight_decay"], foreach=False)
        if self.rule == "sgd":
            self.shared = torch.optim.SGD([self.value], self.lr, o["momentum"], foreach=False)

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """The logical matrices, or a vector as it is."""
        return list(tensor.split(list(self.splits))) if self.splits else [tensor]

    def polar(self, tensor: Tensor) -> Tensor:
        return torch.cat([polar(part.flatten(1)).view(part.shape) for part in self.parts(tensor)])

    # --- what a worker votes for ----------------------------------------------------------------------------------

    def direction(self, j: int, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Worker j's direction, and with error feedback the sizes of its matrices."""
        d = getattr(self, f"_{self.rule}")(j, gradient)
        if not self.options["feedback"]:
            return d, torch.zeros(0)
        total = d.float() + self.errors[j]
        total = torch.where(d != 0, total, 0.0)
        sizes = [(part.abs().sum(dtype=torch.float64) / part.count_nonzero()).float() for part in self.parts(total)]
        left = [part - size * part.sign() for part, size in zip(self.parts(total), sizes, strict=True)]
        self.errors[j] = torch.cat(left)
        return total, torch.stack(sizes)

    def _signmuon(self, j: int, g: Tensor) -> Tensor:
        o = self.options
        new = 1 - o["momentum"] if o["average"] == "ema" else 1.0
        if o["decay"] == "coupled" and o["weight_decay"]:
            g = torch.add(g, self.value, alpha=o["weight_decay"])
        self.momenta[j] = torch.add(self.momenta[j] * o["momentum"], g, alpha=new)
        ahead = torch.add(self.momenta[j] * o["momentum"], g, alpha=new)
        return self.polar(ahead if o["nesterov"] else self.momenta[j])

    def _signum(self, j: int, g: Tensor) -> Tensor:
        beta = self.options["momentum"]
        m = torch.add(self.momenta[j] * beta, g, alpha=1 - beta)
        self.momenta[j] = torch.where(g != 0, m, self.momenta[j])
        return torch.where(g != 0, m, 0)

    def _lion(self, j: int, g: Tensor) -> Tensor:
        now, later = (torch.add(self.momenta[j] * beta, g, alpha=1 - beta) for beta in self.options["betas"])
        self.momenta[j] = torch.where(g != 0, later, self.momenta[j])
        return torch.where(g != 0, now, 0)

    # --- the step all take ----------------------------------------------------------------------------------------

    def take_vote(self, vote: Tensor, sizes: Tensor) -> None:
        o = self.options
        if o["decay"] == "decoupled":
            self.value = self.value * (1 - self.lr * o["weight_decay"])
        moved = []
        moves = self.parts(self.polar(vote.float()) if o["local_polar"] else vote)
        for k, (part, move) in enumerate(zip(self.parts(self.value), moves, strict=True)):
            factor: Any = 1.0
            if self.rule == "signmuon":
                rows, columns = part.flatten(1).shape
                factor = FACTORS[o["scale"]](rows, columns)
                if o["feedback"]:
                    factor = factor * sizes[k] * max(rows, columns) ** 0.5
            elif o["feedback"]:
                factor = sizes[k]
            moved.append(torch.sub(part, (move * factor).to(part.dtype), alpha=self.lr))
        self.value = torch.cat(moved)

    def take_mean(self, gradient: Tensor) -> None:
        g = gradient.to(self.value.dtype)
        if isinstance(self.shared, torch.optim.Optimizer):
            self.value.grad = g
            self.shared.step()
            return
        beta = self.options["momentum"]  # Muon
        self.momenta[0] = torch.lerp(self.momenta[0], g, 1 - beta)
        factor = self.polar(torch.lerp(g, self.momenta[0], beta))
        parts = [max(1.0, len(part) / part.flatten(1).size(1)) ** 0.5 * part for part in self.parts(factor)]
        self.value = torch.sub(self.value, torch.cat(parts), alpha=self.lr)


def mean(rows: Sequence[Tensor], dtype: torch.dtype, workers: int) -> Tensor:
    """The voters' mean as it travels; one worker alone is not rounded."""
    if workers == 1:
        return rows[0]
    total = rows[0].to(dtype).float()
    for row in rows[1:]:
        total = total + row.to(dtype).float()
    return (total / len(rows)).to(dtype).float()


def step(weights: Sequence[Weight], gradients: Sequence[Gradients], ties: str, seed: int, number: int) -> bool:
    """One step of all workers; `gradients[j][i]` is None where worker j has none. False: nobody steps."""
    workers = len(gradients)
    finite = [all(g is None or bool(g.isfinite().all()) for g in own) for own in gradients]
    voters = [j for j in range(workers) if finite[j]]
    following = 0
    for i, weight in enumerate(weights):
        first_word = following
        following += -(-weight.value.numel() // 64) if weight.rule not in ("muon", "adamw", "sgd") else 0
        own = {j: g for j in voters if (g := gradients[j][i]) is not None}
        if not own:
            continue
        if weight.rule in ("muon", "adamw", "sgd"):
            dtype = weight.options["wire_dtype"]
            weight.take_mean(mean([own.get(j, torch.zeros_like(weight.value)) for j in voters], dtype, workers))
            continue
        nothing = torch.zeros_like(weight.value), torch.zeros(max(1, len(weight.splits)))
        cast = [weight.direction(j, own[j]) if j in own else nothing for j in voters]
        rows = [votes.signs(d.numpy()) for d, _ in cast]
        decided = torch.from_numpy(votes.vote(rows, ties, seed, number, first_word)).view(weight.value.shape)
        sizes = torch.zeros(0)
        if weight.options["feedback"]:  # the mean over those who vote
            sizes = mean([s for _, s in cast], torch.float32, workers)
            sizes = sizes / mean([torch.tensor(float(j in own)) for j in voters], torch.float32, workers)
        weight.take_vote(decided, sizes)
    return bool(voters)
