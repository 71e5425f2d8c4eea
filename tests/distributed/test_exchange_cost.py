"""The bytes that a step is predicted to send, against the ledger, for every method."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import run_ranks
from thinwire.collectives.cost import step_bytes
from thinwire.optim import build_optimizers, param_groups
from thinwire.optim.methods import METHODS, VOTING
from thinwire.train.replicas import numbers_sent
from thinwire.wire import Ledger

SHARE = 0.02  # of the bytes: words that are partly filled, a header for every bucket and message
CASES = [(method, aux, False) for method in METHODS for aux in ("adamw", "vote")]
CASES += [(method, "adamw", True) for method in VOTING]


def _bytes(rank: int) -> list[tuple[int, float]]:
    """Sent by this worker in one step and predicted, case by case."""
    found = []
    for method, aux, feedback in CASES:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 64), torch.nn.Embedding(64, 128))
        ledger = Ledger()
        options = {"feedback": True} if feedback else {}
        optimizers = build_optimizers(
            param_groups(model, lr=1e-3), method, aux=aux, ties="random", group=dist.group.WORLD, ledger=ledger,
            **options,
        )  # fmt: skip
        torch.manual_seed(rank)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for optimizer in optimizers:
            optimizer.step()
        numbers: dict[str, float] = {**numbers_sent(optimizers)}
        numbers["packed"] = numbers.pop("vote", 0)
        found.append((ledger.total(), step_bytes(numbers, 2, "random")))
    return found


@pytest.fixture(scope="module")
def measured() -> list[list[tuple[int, float]]]:
    return run_ranks(2, _bytes)


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_predicted_bytes_are_those_that_travel(measured: list[list[tuple[int, float]]], case: int) -> None:
    for sent, predicted in (rank[case] for rank in measured):
        assert sent == pytest.approx(predicted, rel=SHARE)
