"""Real processes and a real gloo group for tests. Processes fork from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_PATIENCE = float(os.environ.get("THINWIRE_TEST_PATIENCE", "1"))
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.distributed.harness", "thinwire.train.loop"])


def run_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, deadline_s: float = 240.0, dying: Collection[int] = ()
) -> list[Any]:
    """Run `function(rank, *arguments)` in `world` processes that form a gloo group; returns what each returned.

    Ranks in `dying` are to die, and return None.

    Raises:
        AssertionError: a rank raised (with its traceback), died, or the deadline passed. No process is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        readers: list[Connection] = []
        processes = []
        for rank in range(world):
            reader, writer = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_main, args=(rank, world, f"{folder}/rendezvous", writer, function, arguments, not dying)
            )
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        try:
            results = _collect(readers, time.monotonic() + deadline_s * _PATIENCE, dying)
            for process in processes:
                process.join(10)
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(readers: list[Connection], until: float, dying: Collection[int]) -> list[Any]:
    results: list[Any] = [None] * len(readers)
    missing = dict(enumerate(readers))
    while missing:
        ready = wait(list(missing.values()), timeout=max(0.0, until - time.monotonic()))
        assert ready, (
            f"ranks {sorted(missing)} passed the deadline: a hang, or a busy machine; there "
            "THINWIRE_TEST_PATIENCE=3 make test ARGS='--timeout 1000' waits longer"
        )
        for rank in [rank for rank, reader in missing.items() if reader in ready]:
            try:
                good, results[rank] = missing.pop(rank).recv()
            except EOFError:
                assert rank in dying, f"rank {rank} died"
                continue
            assert rank not in dying, f"rank {rank} survived"
            assert good, f"rank {rank}:\n{results[rank]}"
    return results


def _main(
    rank: int,
    world: int,
    rendezvous: str,
    writer: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    all_live: bool,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        writer.send((True, function(rank, *arguments)))
    except BaseException:
        writer.send((False, traceback.format_exc()))
    writer.close()
    if not all_live:
        return
    dist.barrier()  # nobody closes a connection that another still reads from
    dist.destroy_process_group()
