"""Hivemind's averaging of the same gradients with its uniform 8-bit compression, where hivemind is installed.

Only the exchange is timed: the group has found itself before. Peers know each other from the start, on one rank each.
"""

from __future__ import annotations

import time
from pathlib import Path

import hivemind
import torch
import torch.distributed as dist
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.compression import Uniform8BitQuantization
from network import address

_FIND_GROUP_S = 60.0
_TOLERANCE = 0.05  # mean, in standard deviations: 8 bits cover three to each side, what lies further out is cut


class Averaging:
    """One peer, whose vector is overwritten by `prepare` and averaged by `run`."""

    def __init__(self, flat: torch.Tensor, folder: str) -> None:
        self.flat = flat
        self.averager = hivemind.DecentralizedAverager(
            [flat.clone()],
            _join(folder),
            start=True,
            prefix="exchange",
            target_group_size=dist.get_world_size(),
            min_group_size=dist.get_world_size(),
            min_matchmaking_time=2.0,
            request_timeout=1.0,
            compression=Uniform8BitQuantization(),
        )
        self.step: StepControl | None = None

    def prepare(self) -> None:
        """Fill in the gradients and find the group."""
        with self.averager.get_tensors() as tensors:
            tensors[0].copy_(self.flat)
        self.step = self.averager.step(wait=False, require_trigger=True, timeout=_FIND_GROUP_S)
        while self.step.stage != AveragingStage.AWAITING_TRIGGER:
            if self.step.done():
                self.step.result()  # raises what went wrong
            time.sleep(0.01)

    def run(self) -> None:
        assert self.step is not None
        self.step.allow_allreduce()
        peers = self.step.result()
        if len(peers) != dist.get_world_size():
            raise RuntimeError(f"hivemind averaged over {len(peers)} of {dist.get_world_size()} peers")

    def check(self) -> None:
        """The averages are averages: hivemind goes on with what it has when a peer fails."""
        mean = self.flat[:: max(1, self.flat.numel() // 10_000)].clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        with self.averager.get_tensors() as tensors:
            error = (tensors[0][:: max(1, self.flat.numel() // 10_000)] - mean).abs().mean().item()
        if error > _TOLERANCE:
            raise RuntimeError(f"hivemind's average is off by {error:.3f} on average, more than {_TOLERANCE}")


def _join(folder: str) -> hivemind.DHT:
    """The peers' directory; rank 0 starts it and leaves its address in a file."""
    here = [f"/ip4/{address(dist.get_rank())}/tcp/0"]
    known = Path(folder, "first_peer")
    if dist.get_rank() == 0:
        dht = hivemind.DHT(host_maddrs=here, start=True)
        known.write_text("\n".join(str(place) for place in dht.get_visible_maddrs()))
    dist.barrier()
    if dist.get_rank() > 0:
        dht = hivemind.DHT(initial_peers=known.read_text().splitlines(), host_maddrs=here, start=True)
    dist.barrier()
    return dht
