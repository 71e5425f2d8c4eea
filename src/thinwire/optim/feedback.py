"""Error feedback: what the signs left out is added to the next step's direction (Karimireddy et al., arXiv 1901.09847).

    p = u + e        s = mean |p| over the entries of a logical matrix that vote        e <- p - s sign(p)

The vote is on sign(p). An entry without a direction has no vote and keeps its error. The step is as long as the mean
of s over the workers that vote in the matrix: those that abstain, have no gradient or only zeros there do not shorten
it. For that s and whether there is a vote, 1 or 0, travel beside the vote, two numbers per matrix. Costs one float32
number per parameter and worker. Plain Sign-Muon can ascend on a linear objective: its 4 x 4 counterexample is a test;
with feedback the sum of all steps follows the sum of all directions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.optim.matrices import row_blocks


def add_feedback(direction: Tensor, error: Tensor, splits: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Return `(p, sizes)`: p in the shape of `direction`, and `(2, number of logical matrices)`: s, and whether there
    is a vote. Updates `error` in place.
    """
    total = torch.where(direction != 0, direction.float() + error, 0.0)
    sizes = []
    for part, left in zip(row_blocks(total, splits), row_blocks(error, splits), strict=True):
        voting = part.count_nonzero()
        size = (part.abs().sum(dtype=torch.float64) / voting.clamp(min=1)).float()
        left.copy_(torch.where(part != 0, part - size * part.sign(), left))
        sizes.append(torch.stack([size, (voting > 0).to(size.dtype)]))
    return total, torch.stack(sizes, dim=1)


def mean_size(means: Tensor) -> Tensor:
    """Return s `(number of logical matrices,)`, the mean over those who vote, from the means `(2, ...)` over all."""
    return means[0] / torch.where(means[1] > 0, means[1], 1.0)
