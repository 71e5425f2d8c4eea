"""The rules that vote on signs: Sign-Muon and the sign methods it is compared with.

Sign-Muon (arXiv 2605.16311, Algorithm 1 and its extension to M workers), worker j, per hidden matrix W:

    g_j <- g_j + wd W                       coupled decay; decoupled: W <- (1 - lr wd) W instead
    m_j <- beta m_j + (1 - beta) g_j        average="ema"; "heavy_ball": m_j <- beta m_j + g_j
    u_j  = polar(m_j)                       with Nesterov: polar(beta m_j + (1 - beta) g_j), of the heavy ball without
                                            the factor 1 - beta
    v    = sign(sum_j sign(u_j))            the vote: all that is sent
    W   <- W - lr scale v                   local polar step: polar(v) in the place of v

Signum (Bernstein et al., arXiv 1810.05291) leaves out the polar factor, SignSGD the momentum as well. Distributed Lion
(Liu et al., arXiv 2404.00438) votes on sign(b1 m_j + (1 - b1) g_j), then m_j <- b2 m_j + (1 - b2) g_j.

A worker votes only where it has a gradient: an entry whose gradient is exactly zero, as in the row of a token that did
not occur, gets no vote and keeps its momentum. (The polar factor mixes entries: Sign-Muon is
silent only where a matrix has no gradient at all, `None`; an all-zero gradient leaves the vote to the momentum.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.optim.matrices import check_matrix, logical_matrices, polar_factors, row_blocks
from thinwire.optim.rule import Group, Slot, Unchecked, Wire, state_dtype, zeros_like

Scale = Literal["none", "fan_in", "sqrt_mn", "rms"]
SCALES: tuple[Scale, ...] = ("none", "fan_in", "sqrt_mn", "rms")
RMS = 0.2  # of the entries of a typical AdamW update (J. Liu et al., "Muon is scalable", arXiv 2502.16982)


def shape_factor(scale: Scale, rows: int, columns: int, *, is_polar: bool) -> float:
    """What a signed matrix `(O, I)`, or its polar factor, is multiplied by: 1, I^-1/2, (O I)^-1/2, or to an RMS of 0.2.

    Raises:
        ConfigError: unknown scale.
    """
    if scale not in SCALES:
        raise ConfigError(f"scale {scale!r}", ", ".join(SCALES))
    if scale == "rms":
        return RMS * (math.sqrt(max(rows, columns)) if is_polar else 1.0)
    return {"none": 1.0, "fan_in": 1 / math.sqrt(columns), "sqrt_mn": 1 / math.sqrt(rows * columns)}[scale]


def decayed(gradient: Tensor, p: Tensor, group: Group) -> Tensor:
    """The gradient in the momentum's dtype, with coupled decay where the group has it."""
    g = gradient.to(state_dtype(gradient))
    return g.add(p.to(g.dtype), alpha=group["weight_decay"]) if _couples(group) else g


def _couples(group: Group) -> bool:
    return bool(group["weight_decay"]) and group.get("decay", "decoupled") == "coupled"


def take_vote(
    slots: Sequence[Slot], updates: Sequence[Tensor], group: Group, factors: Sequence[Sequence[Tensor | float]]
) -> None:
    """W <- (1 - lr wd) W - lr f v for every logical matrix, f its factor."""
    lr = group["lr"]
    for slot, update, factor in zip(slots, updates, factors, strict=True):
        p = slot.parameter
        if group["weight_decay"] and not _couples(group) and bool(update.any()):  # nobody voted: it stays
            p.mul_(1 - lr * group["weight_decay"])
        for part, move, f in zip(row_blocks(p, slot.splits), row_blocks(update, slot.splits), factor, strict=True):
            part.sub_((move * f if isinstance(f, Tensor) or f != 1 else move).to(p.dtype), alpha=lr)


class _Voted(Unchecked):
    """A momentum in every worker; the table of options says all about their values."""

    wire: Wire = "vote"

    def state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        return {"momentum": zeros_like(p)}


class SignMuonRule(_Voted):
    """Vote on the signs of the polar factor of the momentum."""

    name = "signmuon"

    def check(self, p: Tensor, splits: Sequence[int]) -> None:
        check_matrix(p, splits, "SignMuon")

    def directions(self, slots: Sequence[Slot], gradients: Sequence[Tensor], group: Group) -> list[Tensor]:
        beta = group["momentum"]
        new = 1 - beta if group["average"] == "ema" else 1.0
        averaged = []
        for slot, gradient in zip(slots, gradients, strict=True):
            g, m = decayed(gradient, slot.parameter, group), slot.state["momentum"]
            m.mul_(beta).add_(g, alpha=new)
            averaged.append(m.mul(beta).add_(g, alpha=new) if group["nesterov"] else m)
        return polar_factors(averaged, [slot.splits for slot in slots], group["coefficients"])

    def apply(self, slots: Sequence[Slot], decided: Sequence[Tensor], group: Group, sizes: Sequence[Tensor]) -> None:
        updates = list(decided)
        if group["local_polar"]:
            signs = [vote.to(torch.float32) for vote in decided]
            updates = polar_factors(signs, [slot.splits for slot in slots], group["coefficients"])
        factors: list[list[Tensor | float]] = []
        for i, slot in enumerate(slots):
            shapes = [matrix.shape for matrix in logical_matrices(slot.parameter, slot.splits)]
            row: list[Tensor | float] = [
                shape_factor(group["scale"], *shape, is_polar=group["local_polar"]) for shape in shapes
            ]
            if sizes:  # in units of the root mean square entry of a polar factor
                row = [f * size * max(shape) ** 0.5 for f, size, shape in zip(row, sizes[i], shapes, strict=True)]
            factors.append(row)
        take_vote(slots, updates, group, factors)


class SignumRule(_Voted):
    """Vote on the signs of the momentum; without momentum this is SignSGD."""

    name = "signum"

    def state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        return {"momentum": zeros_like(p)} if group["momentum"] else {}

    def directions(self, slots: Sequence[Slot], gradients: Sequence[Tensor], group: Group) -> list[Tensor]:
        result = []
        for slot, gradient in zip(slots, gradients, strict=True):
            g = decayed(gradient, slot.parameter, group)
            if group["momentum"]:
                m = slot.state["momentum"]
                _where(gradient, m, m.mul(group["momentum"]).add_(g, alpha=1 - group["momentum"]))
                result.append(m.masked_fill(gradient == 0, 0))
            else:
                result.append(g.masked_fill(gradient == 0, 0))
        return result

    def apply(self, slots: Sequence[Slot], decided: Sequence[Tensor], group: Group, sizes: Sequence[Tensor]) -> None:
        take_vote(slots, decided, group, sign_factors(slots, sizes))


class LionRule(_Voted):
    """Distributed Lion."""

    name = "lion"

    def directions(self, slots: Sequence[Slot], gradients: Sequence[Tensor], group: Group) -> list[Tensor]:
        beta1, beta2 = group["lion_betas"]
        result = []
        for slot, gradient in zip(slots, gradients, strict=True):
            g, m = decayed(gradient, slot.parameter, group), slot.state["momentum"]
            result.append(m.mul(beta1).add_(g, alpha=1 - beta1).masked_fill_(gradient == 0, 0))
            _where(gradient, m, m.mul(beta2).add_(g, alpha=1 - beta2))
        return result

    def apply(self, slots: Sequence[Slot], decided: Sequence[Tensor], group: Group, sizes: Sequence[Tensor]) -> None:
        take_vote(slots, decided, group, sign_factors(slots, sizes))


class AuxiliaryVote(SignumRule):
    """Signum for what is no hidden matrix: steps of 0.2 lr, the size of AdamW's, and no decay."""

    name = "aux_vote"

    def state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        return {"momentum": zeros_like(p)}

    def directions(self, slots: Sequence[Slot], gradients: Sequence[Tensor], group: Group) -> list[Tensor]:
        return super().directions(slots, gradients, {"momentum": group["aux_momentum"], "weight_decay": 0.0})

    def apply(self, slots: Sequence[Slot], decided: Sequence[Tensor], group: Group, sizes: Sequence[Tensor]) -> None:
        take_vote(slots, decided, {"lr": RMS * group["lr"], "weight_decay": 0.0}, sign_factors(slots, sizes))


def sign_factors(slots: Sequence[Slot], sizes: Sequence[Tensor]) -> list[list[Tensor | float]]:
    """1 for every logical matrix, or with error feedback its mean size."""
    if sizes:
        return [list(size) for size in sizes]
    return [[1.0] * max(1, len(slot.splits)) for slot in slots]


def _where(gradient: Tensor, target: Tensor, values: Tensor) -> None:
    """Overwrite `target` where there is a gradient."""
    target.copy_(torch.where(gradient != 0, values, target))
