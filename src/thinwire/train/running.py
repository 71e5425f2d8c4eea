"""Running statistics of batch norms: only the first replica's follow its batches, and all evaluate with them.

Each replica normalises its own share of a batch by that share alone, so what it trains does not depend on these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def follow(stages: Sequence[nn.Module], is_first: bool) -> None:
    """Update running statistics in the passes to come, or leave them: as if replicas were processes of their own."""
    for norm in _norms(stages):
        norm.track_running_stats = is_first


def share(stages: Sequence[nn.Module], replica_group: dist.ProcessGroup | None) -> None:
    """Give every replica the first one's, which a checkpoint has too."""
    if replica_group is not None:
        for norm in _norms(stages):
            for buffer in norm.buffers():
                dist.broadcast(buffer, group=replica_group, group_src=0)


def _norms(stages: Sequence[nn.Module]) -> Iterator[_BatchNorm]:
    return (module for stage in stages for module in stage.modules() if isinstance(module, _BatchNorm))
