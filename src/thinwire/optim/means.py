"""The rules that need the mean of the gradients: Muon, SPEL for frames, AdamW, SGD.

Muon (K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks"):

    m <- beta m + (1 - beta) g
    u  = (1 - beta) g + beta m        with Nesterov, else m
    W <- (1 - lr wd) W - lr sqrt(max(1, O / I)) polar(u)

Each logical matrix is orthogonalised alone: fused projections are cut into their parts, convolution filters are
viewed as (O, I * kh * kw). Matrices of one shape go through the iteration in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from thinwire.optim.matrices import check_matrix, logical_matrices, polar_factors
from thinwire.optim.rule import Group, Slot, Unchecked, Wire, zeros_like
from thinwire.optim.spel import check_frame, check_frame_rates, spel_update


class _Averaged(Unchecked):
    """Every worker contributes its gradients as they are."""

    wire: Wire = "mean"

    def directions(self, slots: Sequence[Slot], gradients: Sequence[Tensor], group: Group) -> list[Tensor]:
        return list(gradients)


class MuonRule(_Averaged):
    """Momentum of the mean gradient, orthogonalised."""

    name = "muon"

    def check(self, p: Tensor, splits: Sequence[int]) -> None:
        check_matrix(p, splits, "Muon")

    def state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        return {"momentum": zeros_like(p)}

    def apply(self, slots: Sequence[Slot], decided: Sequence[Tensor], group: Group, sizes: Sequence[Tensor]) -> None:
        directions = []
        for slot, gradient in zip(slots, decided, strict=True):
            m, g = slot.state["momentum"], gradient.to(slot.state["momentum"].dtype)
            m.lerp_(g, 1 - group["momentum"])
            directions.append(torch.lerp(g, m, group["momentum"]) if group["nesterov"] else m)
        factors = polar_factors(directions, [slot.splits for slot in slots], group["coefficients"])
        for slot, factor in zip(slots, factors, strict=True):
            p = slot.parameter
            p.mul_(1 - group["lr"] * group["weight_decay"])
            parts = logical_matrices(factor, slot.splits)
            update = torch.cat([max(1.0, part.size(0) / part.size(1)) ** 0.5 * part for part in parts])
            p.sub_(update.view(p.shape), alpha=group["lr"])


class SpelRule(_Averaged):
    """Frames on the Stiefel manifold."""

    name = "spel"

    def __init__(self, momentum: str = "frame_momentum") -> None:
        self.momentum = momentum

    def check(self, p: Tensor, splits: Sequence[int]) -> None:
        check_frame(p)

    def check_group(self, group: Group) -> None:
        check_frame_rates(group["lr"], group[self.momentum])

    def state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(p)}

    def apply(self, slots: Sequence[Slot], decided: Sequence[Tensor], group: Group, sizes: Sequence[Tensor]) -> None:
        for slot, gradient in zip(slots, decided, strict=True):
            spel_update(slot.parameter, gradient, slot.state["momentum"], group["lr"], group[self.momentum])


class AdamWRule(_Averaged):
    """torch's AdamW."""

    name = "adamw"

    def __init__(self, decay: str = "weight_decay") -> None:
        self.decay = decay

    def state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        return {"step": torch.zeros((), dtype=torch.float32), "exp_avg": zeros_like(p), "exp_avg_sq": zeros_like(p)}

    def apply(self, slots: Sequence[Slot], decided: Sequence[Tensor], group: Group, sizes: Sequence[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        weights = [slot.parameter.to(slot.state["exp_avg"].dtype) for slot in slots]  # eps would be 0 in float16
        adamw(
            weights,
            [g.to(weight.dtype) for g, weight in zip(decided, weights, strict=True)],
            [slot.state["exp_avg"] for slot in slots],
            [slot.state["exp_avg_sq"] for slot in slots],
            [],
            [slot.state["step"] for slot in slots],
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group[self.decay],
            eps=group["eps"], maximize=False,
        )  # fmt: skip
        for slot, weight in zip(slots, weights, strict=True):
            if weight is not slot.parameter:
                slot.parameter.copy_(weight)


class SgdRule(_Averaged):
    """m <- beta m + g + wd W; W <- W - lr m."""

    name = "sgd"

    def state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        return {"momentum": zeros_like(p)} if group["momentum"] else {}

    def apply(self, slots: Sequence[Slot], decided: Sequence[Tensor], group: Group, sizes: Sequence[Tensor]) -> None:
        for slot, gradient in zip(slots, decided, strict=True):
            p = slot.parameter
            g = gradient.to(p.dtype).add(p, alpha=group["weight_decay"])
            if group["momentum"]:
                g = slot.state["momentum"].mul_(group["momentum"]).add_(g).to(p.dtype)
            p.sub_(g, alpha=group["lr"])
