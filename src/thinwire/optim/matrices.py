"""A weight as the matrices it consists of, and their polar factors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.polar import POLAR_EXPRESS, Coefficients, batch_size, polar


def row_blocks(tensor: Tensor, splits: Sequence[int] = ()) -> list[Tensor]:
    """View a tensor of any dimension as the blocks of rows fused in it; without splits, as one."""
    return list(tensor.split(list(splits))) if splits else [tensor]


def logical_matrices(tensor: Tensor, splits: Sequence[int] = ()) -> list[Tensor]:
    """View a weight (or what belongs to it) as the matrices it consists of: `(O, I)` each.

    `splits` are the row counts of fused matrices; further dimensions (convolutions) count as input.
    """
    return row_blocks(tensor.flatten(1), splits)


def orthogonalise(matrices: Sequence[Tensor], coefficients: Coefficients | str = POLAR_EXPRESS) -> list[Tensor]:
    """Return the polar factor of each matrix; those of equal shape are computed together, `batch_size` at a time."""
    by_shape: dict[tuple[torch.Size, torch.device], list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        by_shape[matrix.shape, matrix.device].append(i)
    result: list[Tensor] = [torch.empty(0)] * len(matrices)
    for indices in by_shape.values():
        size = batch_size(matrices[indices[0]])
        for start in range(0, len(indices), size):
            some = indices[start : start + size]
            batch = torch.stack([matrices[i] for i in some]) if len(some) > 1 else matrices[some[0]].unsqueeze(0)
            for i, factor in zip(some, polar(batch, coefficients), strict=True):
                result[i] = factor
    return result


def polar_factors(
    tensors: Sequence[Tensor], splits: Sequence[Sequence[int]], coefficients: Coefficients | str = POLAR_EXPRESS
) -> list[Tensor]:
    """Return each weight-like tensor with all of its logical matrices replaced by their polar factors."""
    parts = [logical_matrices(t, rows) for t, rows in zip(tensors, splits, strict=True)]
    factors = iter(orthogonalise([matrix for some in parts for matrix in some], coefficients))
    joined = [torch.cat([next(factors) for _ in some]) for some in parts]
    return [factor.view(t.shape) for factor, t in zip(joined, tensors, strict=True)]


def check_matrix(p: Tensor, splits: Sequence[int], rule: str) -> None:
    """Raises ConfigError unless `p` is a real matrix (or more dimensions) whose rows the splits add up to."""
    if p.dim() < 2 or not p.numel() or not p.is_floating_point():
        raise ConfigError(
            f"{rule} for a parameter of {p.dtype} {tuple(p.shape)}", "real matrices, two dimensions or more",
            "give the optimizer thinwire.param_groups(model), which sends everything else to AdamW",
        )  # fmt: skip
    if any(type(rows) is not int or rows < 1 for rows in splits) or (splits and sum(splits) != p.size(0)):
        raise ConfigError(f"splits {tuple(splits)}", f"row counts that add up to {p.size(0)}")
