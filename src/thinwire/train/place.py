"""Where a process stands: its rank, its group, its device."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from thinwire.errors import ConfigError, PeerError, one_line
from thinwire.train.config import Config


@dataclass(frozen=True)
class Place:
    """`group` are all processes of the run; None for one process alone.

    `pipe_rank` counts within this process's pipeline, whose group is `pipe_group` (axis `pp` of the mesh, None for one
    process); `replica` says which pipeline it is, `replica_group` (axis `dp`) are the processes that hold the same
    stages in all of them.
    """

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    pipe_rank: int = 0
    pipe_group: dist.ProcessGroup | None = None
    replica: int = 0
    replica_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0


def under_launcher() -> bool:
    """Whether a launcher such as torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(config: Config) -> Place:
    """Join the run's other processes and lay out the mesh (axes `dp` and `pp`).

    Raises:
        ConfigError: the launcher started another number of processes than the pipeline needs.
        PeerError: the others cannot be reached.
    """
    torch.set_num_threads(config.train.threads)
    try:
        world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    except ValueError as error:
        raise ConfigError(f"RANK or WORLD_SIZE in the environment ({error})", "what a launcher sets") from None
    wanted, depth = config.num_processes, config.pipeline_ranks
    if wanted == 1:
        if world > 1:
            raise ConfigError(f"{world} processes for a run in one process", "1", "start it without torchrun")
        return Place(0, 1, _device(0))
    if world != wanted:
        raise ConfigError(
            f"{world} processes for {config.pipeline.stages} stages with {config.pipeline.per_rank} per process"
            + (f" in {config.dp.replicas} replicas" if config.dp.replicas > 1 else ""),
            f"{wanted} processes",
            f"start torchrun with --nproc-per-node so that nodes x processes = {wanted}",
        )
    device = _device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl", timeout=timedelta(seconds=config.pipeline.timeout_s)
        )
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise PeerError(f"rank {rank} cannot meet the others at {address}: {one_line(error)}") from error
    mesh = init_device_mesh(device.type, (world // depth, depth), mesh_dim_names=("dp", "pp"))
    return Place(
        rank, world, device, dist.group.WORLD, rank % depth, mesh["pp"].get_group() if depth > 1 else None,
        rank // depth, mesh["dp"].get_group(),
    )  # fmt: skip


def gather_json(value: Any, place: Place) -> list[Any]:
    """Return every rank's `value`, by rank, on every rank. As JSON: no pickle crosses a wire."""
    if place.group is None:
        return [value]
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=place.device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=place.device) for _ in range(place.world)]
    dist.all_gather(sizes, torch.tensor([text.numel()], device=place.device), group=place.group)
    longest = max(int(size) for size in sizes)
    texts = [torch.zeros(longest, dtype=torch.uint8, device=place.device) for _ in sizes]
    dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - text.numel())), group=place.group)
    return [json.loads(bytes(t[: int(size)].tolist())) for t, size in zip(texts, sizes, strict=True)]


def agree(facts: dict[str, str], place: Place) -> None:
    """Check that all ranks hold the same facts, before anything else is exchanged.

    Raises:
        ConfigError: names the first rank that differs from rank 0, and in what.
    """
    everyone = gather_json(facts, place)
    for rank, theirs in enumerate(everyone):
        for what, value in everyone[0].items():
            if theirs.get(what) != value:
                raise ConfigError(
                    f"{what} of rank {rank} is {theirs.get(what)}, of rank 0 {value}", "the same on all ranks",
                    "start every process with the same command, code and data",
                )  # fmt: skip


def leave() -> None:
    """Leave the process group, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
