"""Error feedback: what the signs left out is added to the next step's direction (Karimireddy et al., arXiv 1901.09847).

    p = u + e        s = mean |p| per logical matrix        e <- p - s sign(p)

The vote is on sign(p), and the step is as long as the mean of the voters' s, one number per matrix that travels beside
the vote. An entry without a direction has no vote and keeps its error. Costs one float32 number per parameter and
worker. Plain Sign-Muon can ascend on a linear objective: its 4 x 4 counterexample is a test; with feedback the sum of
all steps follows the sum of all directions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.optim.matrices import row_blocks


def add_feedback(direction: Tensor, error: Tensor, splits: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Return `(p, s)`, p in the shape of `direction`, s `(number of logical matrices,)`; updates `error` in place."""
    total = torch.where(direction != 0, direction.float() + error, 0.0)
    sizes = []
    for part, left in zip(row_blocks(total, splits), row_blocks(error, splits), strict=True):
        size = part.abs().mean()
        left.copy_(torch.where(part != 0, part - size * part.sign(), left))
        sizes.append(size)
    return total, torch.stack(sizes)
