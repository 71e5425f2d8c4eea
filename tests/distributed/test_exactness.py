"""A pipeline computes what one process computes: every schedule, losses and all gradients, frames included."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.distributed.harness import run_ranks
from thinwire import codecs
from thinwire.models import Llama, LlamaConfig
from thinwire.optim import build_optimizers, param_groups
from thinwire.pipeline import Pipeline, Stage, connect, split
from thinwire.pipeline.orders import SCHEDULES, stages_per_rank_of

VOCAB, TOKENS, ROWS = 67, 13, 3  # odd on purpose
CODECS: dict[str, dict[str, Any]] = {
    "identity-fp32": {"name": "identity", "wire_format": "fp32"},
    "mapl-fp32": {"name": "mapl", "wire_format": "fp32", "rank": 11, "anchor_rank": 5, "id_bytes": 1},
    "mapl-bf16": {"name": "mapl", "wire_format": "bf16", "rank": 11, "anchor_rank": 5, "id_bytes": 2},
    "mapl-int4": {
        "name": "mapl", "wire_format": "had-int4-clip", "gradient_format": "had-int4-sr", "rank": 11, "anchor_rank": 5,
    },
    "cut": {"name": "cut", "anchor_rank": 5},
    "top32": {"name": "identity", "wire_format": "top32"},
    "fixed-fp16": {"name": "fixed", "wire_format": "fp16", "rank": 8},
}  # fmt: skip


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 100


def _stages(num_stages: int, codec: str, tied: bool = True) -> list[Stage]:
    model = Llama(LlamaConfig(vocab_size=VOCAB, dim=32, num_layers=8, num_heads=2, max_seq_len=TOKENS, tied_head=tied))
    model.init_weights(1)
    options = dict(CODECS[codec])
    return split(model, num_stages, codecs.get(options.pop("name"), **options), seed=3)


def _batch(num_microbatches: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCAB, (num_microbatches * ROWS, TOKENS + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _engine(num_stages: int, codec: str, group: Any = None, schedule: str = "1F1B", tied: bool = True) -> Any:
    """The pipeline over `group`, or the twin; as many microbatches as stages; frames initialised."""
    made = connect(
        _stages(num_stages, codec, tied), _loss, num_microbatches=num_stages, shape=(ROWS, TOKENS), schedule=schedule,
        group=group,
    )  # fmt: skip
    made.start(_batch(num_stages, 0)[0])
    return made


@dataclass
class Reference:
    """What the twin gives after 1 and after 4 accumulation steps: losses, all gradients, an evaluation."""

    losses: list[float]
    gradients: dict[int, dict[str, torch.Tensor | None]]
    evaluation: float


@cache
def _reference(num_stages: int, codec: str, backwards: bool) -> Reference:
    """With `backwards` the microbatches come last to first, as LoopedBFS adds up their gradients."""
    twin = _engine(num_stages, codec)
    evaluation = float(twin.evaluate(*_batch(num_stages, 0)))
    losses: list[float] = []
    gradients = {}
    for number in range(4):
        batch = _batch(num_stages, number)
        if backwards:
            batch = tuple(torch.cat(part.chunk(num_stages)[::-1]) for part in batch)
        losses.append(float(twin.step(*batch)))
        if len(losses) in (1, 4):
            twin.sync.collect()
            named = [pair for stage in twin.stages for pair in stage.named_parameters()]
            gradients[len(losses)] = {n: None if p.grad is None else p.grad.clone() for n, p in named}
    return Reference(losses, gradients, evaluation)


def _worst_gradient_error(pipeline: Pipeline, wanted: dict[str, torch.Tensor | None], *, cut: bool = False) -> float:
    """Relative, and absolute where nothing comes back over a cut, which is zeros or no gradient at all."""
    worst = 0.0
    for name, parameter in [pair for stage in pipeline.stages for pair in stage.named_parameters()]:
        if name in pipeline.sync.mirrors():
            continue  # its owner has the sum
        expected, got = wanted[name], parameter.grad
        assert (expected is None) == (got is None) or cut, name
        if expected is not None:
            norm = float(expected.norm())
            assert norm > 0 or cut, name
            worst = max(worst, float(((0 if got is None else got) - expected).norm() / (norm or 1.0)))
    return worst


def _compare_gradients(rank: int) -> dict[tuple[str, str], dict[str, float]]:
    """For every schedule and codec: errors against the twin, after 1 and after 4 accumulation steps."""
    world = dist.get_world_size()
    results = {}
    for schedule, codec in product(SCHEDULES, CODECS):
        num_stages = world * stages_per_rank_of(schedule, 2)
        reference = _reference(num_stages, codec, backwards=schedule == "LoopedBFS")
        pipeline = _engine(num_stages, codec, dist.group.WORLD, schedule)
        evaluated = pipeline.evaluate(*_batch(num_stages, 0))
        errors = {"evaluation": 0.0 if evaluated is None else abs(float(evaluated) / reference.evaluation - 1)}
        for number, expected in enumerate(reference.losses):
            loss = pipeline.step(*_batch(num_stages, number))
            errors[f"loss {number}"] = 0.0 if loss is None else abs(float(loss) / expected - 1)
            if number + 1 in reference.gradients:
                pipeline.sync.collect()
                gradients = reference.gradients[number + 1]
                errors[f"gradients after {number + 1}"] = _worst_gradient_error(pipeline, gradients, cut=codec == "cut")
        results[schedule, codec] = errors
    return results


@pytest.fixture(scope="module", params=[2, 3, 4])
def errors(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], dict[str, float]]]:
    return run_ranks(request.param, _compare_gradients)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_twins_losses_and_gradients(errors: Any, schedule: str, codec: str) -> None:
    for rank, result in enumerate(errors):
        for what, error in result[schedule, codec].items():
            assert error <= 1e-6, (rank, what, error)


def _optimizers(stages: Any) -> list[torch.optim.Optimizer]:
    return build_optimizers(param_groups(stages, 0.02, adamw_lr=0.002))


def _train(engine: Any, optimizers: list[torch.optim.Optimizer], steps: int, microbatches: int) -> None:
    for number in range(steps):
        engine.step(*_batch(microbatches, number))
        engine.sync.collect()
        for optimizer in optimizers:
            optimizer.step()
        engine.sync.publish()
        for stage in engine.stages:
            stage.zero_grad(set_to_none=True)


def _train_both(rank: int, schedule: str, tied: bool) -> dict[str, Any]:
    num_stages = dist.get_world_size() * stages_per_rank_of(schedule, 2)
    twin = _engine(num_stages, "mapl-fp32", None, schedule, tied)
    pipeline = _engine(num_stages, "mapl-fp32", dist.group.WORLD, schedule, tied)
    for engine in (twin, pipeline):
        _train(engine, _optimizers(engine.stages), 20, num_stages)
    error = 0.0
    ends = {}
    for stage in pipeline.stages:
        wanted = dict(twin.stages[stage.index].named_parameters())
        for name, parameter in stage.named_parameters():
            error = max(error, float((parameter - wanted[name]).detach().abs().max()))
            if name.endswith("frame_DK") or name in ("model.embedding.weight", "model.head.weight"):
                ends[name] = parameter.detach().numpy().tobytes()
    return {"error": error, "ends": ends, "bytes": pipeline.ledger.total(), "twin_bytes": twin.ledger.total()}


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_after_twenty_steps_parameters_agree_and_both_ends_hold_the_same_bits(schedule: str, tied: bool) -> None:
    results = run_ranks(3, _train_both, schedule, tied)
    ends = {name: value for result in results for name, value in result["ends"].items()}
    num_stages = 3 * stages_per_rank_of(schedule, 2)
    for p in range(num_stages - 1):
        assert ends[f"outbound.{p}.frame_DK"] == ends[f"inbound.{p}.frame_DK"]
    assert sum(result["bytes"] for result in results) == results[0]["twin_bytes"]
    if tied:  # the halves of its gradient are added in another order, which AdamW's first steps magnify
        assert ends["model.embedding.weight"] == ends["model.head.weight"]
    else:
        assert max(result["error"] for result in results) <= 1e-5


def _count_transport(rank: int, codec: str) -> dict[str, int]:
    """Bytes in the tensors handed to the transport, beside the ledger's and the codec's word."""
    handed = 0
    make = dist.P2POp.__init__

    def counting(self: Any, op: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal handed
        if op is dist.isend:
            handed += tensor.numel() * tensor.element_size()
        make(self, op, tensor, *args, **kwargs)

    pipeline = _engine(3, codec, dist.group.WORLD)
    dist.P2POp.__init__ = counting  # type: ignore[method-assign]
    before = pipeline.ledger.total()
    pipeline.step(*_batch(3, 0))
    pipeline.sync.collect()
    pipeline.sync.publish()
    billed = pipeline.ledger.total() - before
    ledger = pipeline.ledger
    expected = pipeline.stages[0].codec.wire_bytes((ROWS, TOKENS, 32))
    sends = 3 * ((rank < 2) + (rank > 0))
    carriers = ledger.total(kind="activation") + ledger.total(kind="gradient")
    return {"handed": handed, "billed": billed, "carriers": carriers, "expected": sends * expected}


@pytest.mark.parametrize("codec", CODECS)
def test_wire_bytes_are_the_bytes_handed_to_the_transport(codec: str) -> None:
    for result in run_ranks(3, _count_transport, codec):
        assert result["handed"] == result["billed"]
        assert result["carriers"] == result["expected"]
