"""What one worker refuses, or has otherwise than the others, is told to all of them: nobody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.harness import run_ranks
from thinwire.errors import ConfigError


def said(action: Callable[[], Any]) -> str:
    try:
        action()
    except ConfigError as error:
        return str(error)
    return "nothing"


def work(rank: int) -> dict[str, str]:
    import torch.distributed as dist

    import thinwire

    group = dist.group.WORLD
    words = {"complex": said(lambda: thinwire.majority_vote(torch.ones(3) * (1j if rank else 1), group))}

    def stepped(p: nn.Parameter, **options: Any) -> str:
        return said(thinwire.Signum([p], group=group, **options).step)

    p = nn.Parameter(torch.ones(5, 3))
    p.grad = torch.ones(5, 3).to_sparse() if rank else torch.ones(5, 3)
    words["sparse"] = stepped(p)
    p.grad = torch.ones(5, 3)
    words["buckets"] = stepped(p, bucket_elements=1 if rank else 9)
    words["rates"] = stepped(p, lr=0.1 if rank else 0.2)
    words["alike"] = stepped(p)
    apart = nn.Parameter(torch.full((5, 3), float(rank)))
    apart.grad = torch.ones(5, 3)
    optimizer = thinwire.Signum([apart], group=group)
    words["values"], words["values again"] = said(optimizer.step), said(optimizer.step)
    words["changed"], words["changed back"] = changed(rank, group)
    words["skipped"] = skipped(rank, group)
    p.grad = torch.full((5, 3), 2e38)
    thinwire.Muon([p], group=group).step()
    words["large"] = "finite" if bool(p.isfinite().all()) else "not finite"
    before = threading.active_count()
    for _ in range(5):
        thinwire.majority_vote(torch.ones(3), group)
    words["threads"] = str(threading.active_count() - before)
    return words


def changed(rank: int, group: Any) -> tuple[str, str]:
    """A schedule gives one worker a rate that is not a number; then it gets a good one."""
    import thinwire

    p = nn.Parameter(torch.ones(2))
    optimizer = thinwire.Signum([p], lr=0.1, group=group)
    p.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = float("nan") if rank else 0.1
    refused = said(optimizer.step)
    optimizer.param_groups[0]["lr"] = 0.1
    return refused, said(optimizer.step)


def skipped(rank: int, group: Any) -> str:
    """One worker leaves out a step of the first of two optimizers that are alike."""
    import thinwire

    pair = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [thinwire.Signum([p], group=group) for p in pair]
    for p, optimizer in zip(pair, optimizers, strict=True):
        p.grad = torch.ones(2)
        optimizer.step()
    return said(optimizers[rank].step)


@pytest.fixture(scope="module")
def words() -> list[dict[str, str]]:
    return run_ranks(2, work, deadline_s=60)


@pytest.mark.parametrize(
    ("what", "ours", "theirs"),
    [
        ("complex", "input that worker 1 refused", "a vote on torch.strided torch.complex64"),
        ("sparse", "input that worker 1 refused", "sparse gradients"),
        ("buckets", "bucket_elements=1, there bucket_elements=9", "bucket_elements=1"),
        ("rates", "entry 1 is lr=0.1, there lr=0.2", "lr=0.1"),
        ("values", "values", "values"),
        ("values again", "values", "values"),
        ("alike", "nothing", "nothing"),
        ("rates", "worker 1 is at step 0, worker 0 at step 0", "let none leave out a step"),
        ("changed", "input that worker 1 refused", "Signum with lr=nan"),
        ("changed back", "nothing", "nothing"),
        ("skipped", "worker 1 is at step 1, worker 0 at step 1", "entry 0 is optimizer "),
        ("large", "finite", "finite"),
        ("threads", "0", "0"),
    ],
)
def test_all_workers_are_told(words: list[dict[str, str]], what: str, ours: str, theirs: str) -> None:
    assert ours in words[0][what] and theirs in words[1][what], [one[what] for one in words]
