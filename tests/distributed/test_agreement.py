"""M processes, M virtual workers and the dense reference take the same steps, bit for bit."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.harness import run_ranks
from tests.reference import dense
from thinwire.collectives import TIES, TRANSPORTS
from thinwire.errors import ConfigError
from thinwire.optim import METHODS, DataParallel, SignMuon, param_groups

WORLDS = [1, 2, 3, 4, 5]
STEPS, FEWER_STEPS = 50, 13
LR, AUX_LR, SEED = 0.02, 0.05, 11
ONE_POISONED, ALL_POISONED = 7, 11  # steps at which gradients are not finite: of the last worker, of all

CASES: dict[str, dict[str, Any]] = {
    "signmuon": {},
    "signmuon nesterov": {"nesterov": True, "weight_decay": 0.1, "scale": "fan_in", "aux": "vote"},
    "signmuon heavy": {"average": "heavy_ball", "weight_decay": 0.1, "decay": "decoupled", "scale": "rms"},
    "signmuon polar": {"local_polar": True, "scale": "sqrt_mn", "aux": "vote"},
    "signmuon feedback": {"feedback": True, "scale": "fan_in"},
    "signum": {"weight_decay": 0.1, "aux": "vote"},
    "signum feedback": {"feedback": True},
    "signsgd": {"aux": "vote"},
    "lion": {"aux": "vote"},
    "muon": {},
    "adamw": {"weight_decay": 0.1},
    "sgd": {"aux": "vote"},
}  # fmt: skip
EXCHANGES = dict(zip(CASES, cycle(product(TRANSPORTS, TIES)), strict=False))


LONG = ("signmuon nesterov", "signmuon heavy")  # these go on for all the steps


class Model(nn.Module):
    """Rows that stay unused, a fused projection, filters, a norm, biases, a branch not always taken, an idle matrix."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 6, dtype=dtype)
        self.fused = nn.Linear(6, 8, dtype=dtype)
        self.filters = nn.Conv1d(8, 7, 2, dtype=dtype)
        self.norm = nn.LayerNorm(7, dtype=dtype)
        self.branch = nn.Linear(7, 9, dtype=dtype)
        self.idle = nn.Linear(4, 4, dtype=dtype)

    def fused_splits(self) -> dict[str, Sequence[int]]:
        return {"fused.weight": (5, 3)}

    def forward(self, ids_BT: Tensor, branches: bool) -> Tensor:
        x = self.norm(self.filters(self.fused(self.table(ids_BT)).tanh().mT).mT)
        return (x.square().sum() + (self.branch(x).tanh().sum() if branches else x.sum())) / 100


def model_of(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(5)
    return Model(dtype)


def backward(model: Model, step: int, worker: int, poisoned: bool, accumulation: int = 1) -> None:
    """One worker's gradients; those of the branch exist on some workers, at some steps on none."""
    ids = torch.randint(20, (4, 5), generator=torch.Generator().manual_seed(1000 * step + worker))
    for number, some in enumerate(ids.chunk(accumulation)):
        branches = (step + worker) % 3 == 0 and number == accumulation - 1
        model(some, branches if accumulation > 1 else (step + worker) % 3 == 0).backward()
    if poisoned:
        model.norm.weight.grad[1] = torch.nan


def digest(tensors: Iterable[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def optimizer_of(case: str, model: nn.Module, **more: Any) -> DataParallel:
    transport, ties = EXCHANGES[case]
    made = METHODS[case.split()[0]](
        param_groups(model, LR, adamw_lr=AUX_LR), transport=transport, ties=ties, seed=SEED, **CASES[case], **more
    )
    return made


def poisoned_workers(step: int, world: int) -> list[int]:
    return list(range(world)) if step == ALL_POISONED else [world - 1] if step == ONE_POISONED else []


def cases_of(world: int) -> list[str]:
    """All for few workers; four and five share them, and time."""
    return list(CASES) if world < 4 else list(CASES)[world % 2 :: 2]


def steps_of(case: str) -> range:
    return range(STEPS if case in LONG else FEWER_STEPS)


def in_processes(rank: int, case: str, dtype: torch.dtype) -> list[str]:
    """The digest after every step; several buckets, so that some are in flight together."""
    model, world = model_of(dtype), dist.get_world_size()
    optimizer = optimizer_of(case, model, group=dist.group.WORLD, bucket_elements=150)
    digests = []
    for step in steps_of(case):
        poisoned = rank in poisoned_workers(step, world)
        backward(model, step, rank, poisoned)
        voted = [p for p in model.parameters() if optimizer.is_worker_state(p)]
        before = copy.deepcopy([optimizer.state[p] for p in voted]) if poisoned else []
        optimizer.step()
        for p, old in zip(voted if poisoned else [], before, strict=True):
            assert all(torch.equal(value, old[name]) for name, value in optimizer.state[p].items())
        optimizer.zero_grad()
        digests.append(digest(model.parameters()))
    return digests


def in_this_process(case: str, world: int, dtype: torch.dtype) -> list[str]:
    model = model_of(dtype)
    optimizer = optimizer_of(case, model, virtual_workers=world)
    digests = []
    for step in steps_of(case):
        for worker in range(world):
            backward(model, step, worker, worker in poisoned_workers(step, world))
            optimizer.next_worker()
        optimizer.step()
        digests.append(digest(model.parameters()))
    return digests


def weights_of(case: str, model: Model, world: int) -> tuple[list[nn.Parameter], list[dense.Weight]]:
    method, options = case.split()[0], dict(CASES[case])
    aux = options.pop("aux", "adamw")
    parameters, weights = [], []
    for group in param_groups(model, LR, adamw_lr=AUX_LR):
        for p, splits in zip(group["params"], group["splits"], strict=True):
            if group["rule"] == "muon":
                rule = "signum" if method == "signsgd" else method
                momentum = {"signmuon": 0.95, "muon": 0.95, "signsgd": 0.0}.get(method, 0.9)
                betas = (0.9, 0.95) if method == "adamw" else (0.9, 0.99)
                decay = "coupled" if method in ("signmuon", "adamw") else "decoupled"
                own = {"momentum": momentum, "betas": betas, "wire_dtype": torch.float32, "decay": decay, **options}
                lr = LR
            elif aux == "vote":
                rule, lr, own = "signum", 0.2 * AUX_LR, {"momentum": 0.95}
            else:
                rule, lr, own = "adamw", AUX_LR, {"betas": (0.9, 0.95), "wire_dtype": torch.bfloat16}
            parameters.append(p)
            weights.append(dense.Weight(p, rule, lr, splits, world, dense.DEFAULTS | own))
    return parameters, weights


def by_the_reference(case: str, world: int) -> list[str]:
    model = model_of()
    parameters, weights = weights_of(case, model, world)
    digests, number = [], 0
    for step in steps_of(case):
        gradients = []
        for worker in range(world):
            backward(model, step, worker, worker in poisoned_workers(step, world))
            gradients.append([p.grad for p in parameters])
            model.zero_grad()
        number += dense.step(weights, gradients, EXCHANGES[case][1], SEED, number)
        for p, weight in zip(parameters, weights, strict=True):
            p.data = weight.value.detach().clone()
        digests.append(digest(model.parameters()))
    return digests


def accumulated(rank: int) -> list[list[str]]:
    """Digests with one backward pass per step, and with four: equal signs, equal steps."""
    runs = []
    for accumulation in (1, 4):
        model = model_of()
        optimizer = SignMuon(param_groups(model, LR), aux="vote", group=dist.group.WORLD)
        digests = []
        for step in range(8):
            ids = torch.randint(20, (4, 5), generator=torch.Generator().manual_seed(1000 * step + rank))
            for some in ids.chunk(accumulation):
                model(some, bool(step % 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(model.parameters()))
        runs.append(digests)
    return runs


def told(attempt: Any) -> str:
    try:
        attempt()
    except ConfigError as error:
        return str(error)
    return "nothing"


def disagreements(rank: int) -> dict[str, str]:
    """What this rank is told where the last one has another rate, or another layout."""
    last = rank == dist.get_world_size() - 1
    found = {}
    for what, rate, columns in (("options", 0.5 if last else 0.25, 4), ("tensors", 0.25, 5 if last else 4)):
        p = nn.Parameter(torch.ones(3, columns))
        p.grad = torch.ones_like(p)
        found[what] = told(SignMuon([p], lr=rate, group=dist.group.WORLD).step)
    return found


def added_apart(rank: int) -> str:
    """What is told of parameters that were added after a step and start with other values on every rank."""
    p, q = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.full((3, 4), float(rank)))
    optimizer = SignMuon([p], lr=0.1, group=dist.group.WORLD)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.add_param_group({"params": [q]})
    return told(optimizer.step)


def under_ddp(rank: int) -> list[str]:
    module = nn.Linear(3, 3)
    model = DistributedDataParallel(module)
    optimizer = SignMuon(param_groups(module), group=dist.group.WORLD)
    model(torch.ones(2, 3)).sum().backward()
    outside = told(optimizer.step)
    with model.no_sync():
        F.mse_loss(model(torch.ones(2, 3)), torch.zeros(2, 3)).backward()
    inside = told(optimizer.step)
    model(torch.ones(2, 3)).sum().backward()
    with torch.no_grad(), model.no_sync():
        model(torch.ones(2, 3))
    validated = told(optimizer.step)
    module(torch.ones(2, 3)).sum().backward()
    return [outside, inside, wrapped_later(), validated, told(optimizer.step)]


def wrapped_later() -> str:
    """What an optimizer that has stepped already is told of a wrapper made afterwards, around a part of its model."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = SignMuon(param_groups(module), group=dist.group.WORLD)
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    wrapper = DistributedDataParallel(module[1])
    wrapper(torch.ones(2, 3)).sum().backward()
    return told(optimizer.step)


def everything(rank: int) -> dict[str, Any]:
    runs: dict[Any, list[str]] = {
        case: in_processes(rank, case, torch.float64) for case in cases_of(dist.get_world_size())
    }
    single = in_processes(rank, "signmuon", torch.float32)
    return {
        "runs": runs, "float32": single, "accumulated": accumulated(rank), "disagreements": disagreements(rank),
        "added": added_apart(rank), "ddp": under_ddp(rank) if dist.get_world_size() > 1 else [],
    }  # fmt: skip


@pytest.fixture(scope="module", params=WORLDS)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, everything)


@pytest.mark.filterwarnings("ignore:worker . abstained from a step:RuntimeWarning")
def test_processes_virtual_workers_and_the_reference_agree(results: Any) -> None:
    for case in cases_of(len(results)):
        wanted = in_this_process(case, len(results), torch.float64)
        assert wanted[ALL_POISONED] == wanted[ALL_POISONED - 1] and len(set(wanted)) >= len(wanted) - 2, case
        for rank, result in enumerate(results):
            assert result["runs"][case] == wanted, (case, rank)
        assert by_the_reference(case, len(results)) == wanted, case


@pytest.mark.filterwarnings("ignore:worker . abstained from a step:RuntimeWarning")
def test_they_agree_in_float32(results: Any) -> None:
    wanted = in_this_process("signmuon", len(results), torch.float32)
    assert all(result["float32"] == wanted for result in results)


def test_accumulation_over_four_passes_is_that_of_one(results: Any) -> None:
    once, four_times = results[0]["accumulated"]
    assert once == four_times and all(result["accumulated"][1] == once for result in results)


def test_a_disagreement_is_told_to_all_alike(results: Any) -> None:
    last = f"worker {len(results) - 1}"
    for result in results if len(results) > 1 else []:
        tensors, options = (result["disagreements"][what] for what in ("tensors", "options"))
        assert tensors.startswith(f"tensors of {last} differ from those of worker 0: entry 0 is parameter 0 (3, 5)")
        assert options.startswith(f"options of {last} differ") and "lr=0.5" in options and "lr=0.25" in options


def test_what_is_added_has_to_start_alike(results: Any) -> None:
    for result in results:
        assert ("values" in result["added"]) == (len(results) > 1), result["added"]


def test_gradients_that_ddp_has_averaged_are_refused(results: Any) -> None:
    for result in results if len(results) > 1 else []:
        outside, inside, later, validated, bare = result["ddp"]
        assert "averaged" in validated and bare == "nothing"
        assert "averaged" in outside and "no_sync" in outside and inside == "nothing" and "averaged" in later
