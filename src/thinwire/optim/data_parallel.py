"""One optimizer for one worker and for M: local directions, an exchange, and the step that follows from it.

roll call    step, layout, options; a worker whose gradients are not finite abstains before any state is touched
directions   every worker alone (`Rule.directions`), bucket by bucket; a bucket's vote travels while the next
             bucket is computed
exchange     `collectives.vote` or `collectives.mean`
apply        the same on every worker (`Rule.apply`)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.bits import num_words
from thinwire.collectives import (
    TIES,
    AnyTransport,
    Moment,
    Pending,
    Subject,
    Ties,
    Transport,
    Workers,
    choose,
    mean,
    number,
    vote,
)
from thinwire.errors import ConfigError
from thinwire.link import Link
from thinwire.optim.feedback import add_feedback
from thinwire.optim.local_gradients import check_local
from thinwire.optim.rule import Group, Rule, Slot
from thinwire.wire import Ledger

T = TypeVar("T")
Gradients = list[Tensor | None]
_NOT_OPTIONS = ("params", "names", "splits", "base_lr", "rule")
_log = logging.getLogger("thinwire")


@dataclass
class Bucket:
    """Parameters of one group that are exchanged together. `indices` count over all groups, `first_word` all votes."""

    group: Group
    rule: Rule
    indices: list[int]
    first_word: int = 0


class DataParallel(torch.optim.Optimizer):
    """Base of the optimizers here.

    Args:
        params: parameters, or groups of them, as `param_groups` makes them: `rule` says which rule trains a group.
        rules: by the name in a group's `rule`; a group without one gets that of "muon", the hidden matrices.
        defaults: options, by group.
        group: of torch.distributed: the workers. None: this process alone.
        virtual_workers: M workers in this process: call `next_worker` after each one's backward pass, `step` after
            the last. Bit for bit what M processes do.
        transport, ties, seed: of the vote, see `collectives.majority_vote`.
        ledger, link: see `collectives.Workers`.
        bucket_elements: numbers per exchange; smaller ones overlap better, larger ones need fewer messages.

    `p.grad` is read only. Parameters that have a gradient nowhere do not move.

    Raises:
        ConfigError: parameters or options that a rule does not take.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rules: dict[str, Rule],
        defaults: dict[str, Any],
        *,
        group: dist.ProcessGroup | None = None,
        virtual_workers: int = 1,
        transport: AnyTransport = "packed",
        ties: Ties = "zero",
        seed: int = 0,
        ledger: Ledger | None = None,
        link: Link | None = None,
        bucket_elements: int = 1 << 23,
    ) -> None:
        if bucket_elements < 1:
            raise ConfigError(f"bucket_elements={bucket_elements}", "1 or more")
        number(transport, ties)
        self.workers = Workers(group, virtual=virtual_workers, ledger=ledger, link=link)
        self.rules, self.transport, self.ties, self.seed = rules, transport, ties, seed
        self.bucket_elements = bucket_elements
        self.recorded: list[Gradients] = []
        self._chosen: Transport | None = None
        super().__init__(params, {**defaults, "steps": 0})

    # --- parameters and state --------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its state is made at once, so that a checkpoint finds it."""
        if param_group.get("rule", "muon") not in self.rules:
            raise ConfigError(f"a group with rule {param_group['rule']!r}", ", ".join(self.rules), "use param_groups")
        if self.param_groups:
            param_group.setdefault("steps", self.param_groups[0]["steps"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("splits", [() for _ in group["params"]])
        rule = self._rule(group)
        for p, splits in zip(group["params"], group["splits"], strict=True):
            if type(p) not in (torch.nn.Parameter, Tensor):
                raise ConfigError(f"a parameter of type {type(p).__name__}", "plain parameters, whole on every worker")
            rule.check(p, splits, group)
            self.state[p] = self._new_state(rule, p, group)

    def _rule(self, group: Group) -> Rule:
        return self.rules[group.get("rule", "muon")]

    def _copies(self, rule: Rule) -> int:
        """How many workers' state this process holds."""
        return len(self.workers.here) if rule.wire == "vote" else 1

    def _new_state(self, rule: Rule, p: Tensor, group: Group) -> dict[str, Tensor]:
        state = rule.state(p, group)
        if rule.wire == "vote" and group.get("feedback"):
            state["feedback"] = torch.zeros_like(p, dtype=torch.float32)
        copies = self._copies(rule)
        return state if copies == 1 else {key: torch.stack([value] * copies) for key, value in state.items()}

    def worker_state(self, p: Tensor, here: int) -> dict[str, Tensor]:
        """Views of a parameter's state that belongs to one of the workers here (counted among them)."""
        state: dict[str, Tensor] = self.state[p]
        return state if len(self.workers.here) == 1 else {key: value[here] for key, value in state.items()}

    def is_worker_state(self, p: Tensor) -> bool:
        """Whether the state of this parameter differs between workers (momenta of a vote) or is everybody's."""
        return any(self._rule(g).wire == "vote" and any(p is q for q in g["params"]) for g in self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch would round the float32 state of bfloat16 parameters.

        A state saved with another number of virtual workers is taken over by the rule for another M: every worker
        starts with the mean of the saved workers' momenta and feedback. It is announced in the log.
        """
        fresh = {p: state for p, state in self.state.items()}
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        resized = False
        for key, p in zip(keys, parameters, strict=True):
            saved = state_dict["state"].get(key, {})
            if saved.keys() != fresh[p].keys():
                raise ConfigError(
                    f"a state with {sorted(saved)}", f"{sorted(fresh[p])}", "use the options it was saved with"
                )
            for name, mine in fresh[p].items():
                value = saved[name].to(mine.device, mine.dtype)
                if value.shape != mine.shape:
                    resized = True
                    value = mean_state(list(value) if value.dim() > p.dim() else [value]).expand(mine.shape)
                mine.copy_(value)
            self.state[p] = fresh[p]
        if resized:
            _log.warning("state of another number of workers: every worker starts with the mean of the saved ones")

    # --- a step ----------------------------------------------------------------------------------------------------

    def next_worker(self) -> None:
        """Record the gradients of a virtual worker, and make room for those of the next."""
        if len(self.recorded) == len(self.workers.here):
            raise ConfigError(
                f"gradients of worker {len(self.recorded) + 1}", f"{len(self.workers.here)}", "call step()"
            )
        parameters = self._parameters()
        self.recorded.append([p.grad for p in parameters])
        for p in parameters:
            p.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step, together with all workers; nobody steps where all abstain.

        Raises:
            ConfigError: workers that disagree about parameters, options or the step (on all of them), gradients that
                DistributedDataParallel has averaged already, or sparse gradients.
            PeerError: a worker or the network failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._gradients()
        parameters = self._parameters()
        device = parameters[0].device
        present = [[g is not None for g in worker] for worker in gradients]
        abstaining = [not _is_finite(worker) for worker in gradients]
        roll = self.workers.call(self._subject(), abstaining, present, device)
        if not roll.voters:
            return loss
        moving = [roll.anybody(i) for i in range(len(parameters))]
        buckets = self._buckets(moving)
        means = [(b, mean(self.workers, roll, self._raw(b, gradients), b.group["wire_dtype"])) for b in buckets["mean"]]
        votes: list[tuple[Bucket, Pending[list[Tensor]], Pending[list[Tensor]] | None]] = []
        for bucket in buckets["vote"]:
            directions, sizes = self._directions(bucket, gradients, roll.voters)
            moment = Moment(self.seed, bucket.group["steps"], bucket.first_word)
            pending = vote(
                self.workers, roll, directions, transport=self._transport(parameters), ties=self.ties, moment=moment
            )
            votes.append((bucket, pending, mean(self.workers, roll, sizes, torch.float32) if sizes[0] else None))
            for _, earlier in means:
                earlier.advance()
            for _, earlier, _ in votes[:-1]:
                earlier.advance()
        for bucket, pending, sized in votes:
            self._apply(bucket, pending.result(), sized.result() if sized else [])
        for bucket, averaged in means:
            self._apply(bucket, averaged.result(), [])
        for group in self.param_groups:
            group["steps"] += 1
        return loss

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _gradients(self) -> list[Gradients]:
        """Of every worker here, in the order of the parameters; forgets what was recorded."""
        parameters = self._parameters()
        if len(self.workers.here) == 1 and not self.recorded:
            gradients: list[Gradients] = [[p.grad for p in parameters]]
        else:
            if len(self.recorded) < len(self.workers.here):
                self.next_worker()
            if len(self.recorded) != len(self.workers.here):
                raise ConfigError(
                    f"gradients of {len(self.recorded)} workers", f"of all {len(self.workers.here)} virtual workers",
                    "call next_worker() after each one's backward pass",
                )  # fmt: skip
            gradients, self.recorded = self.recorded, []
        if any(g is not None and g.is_sparse for worker in gradients for g in worker):
            raise ConfigError("sparse gradients", "dense ones", "build the embedding with sparse=False")
        if self.workers.is_networked:
            check_local(parameters)
        return gradients

    def _subject(self) -> Subject:
        layout, options, elements = [], [], 0
        for group in self.param_groups:
            names = group.get("names") or [f"parameter {i}" for i in range(len(group["params"]))]
            for name, p, splits in zip(names, group["params"], group["splits"], strict=True):
                layout.append(f"{name} {tuple(p.shape)} {p.dtype} {tuple(splits)} {self._rule(group).name}")
                elements += p.numel()
            options.append(", ".join(f"{key}={group[key]}" for key in sorted(group) if key not in _NOT_OPTIONS))
        return Subject(
            tuple(layout), elements, tuple(options), step=self.param_groups[0]["steps"], seed=self.seed,
            transport=number(self.transport, self.ties), ties=TIES.index(self.ties), kind=1,
        )  # fmt: skip

    def _transport(self, parameters: Sequence[Tensor]) -> Transport:
        if self._chosen is None:
            elements = sum(p.numel() for p in parameters)
            self._chosen = choose(self.workers, self.transport, elements, self.ties, parameters[0])
        return self._chosen

    def _buckets(self, moving: Sequence[bool]) -> dict[Literal["vote", "mean"], list[Bucket]]:
        """Parameters by wire, at most `bucket_elements` together unless one alone is larger."""
        buckets: dict[Literal["vote", "mean"], list[Bucket]] = {"vote": [], "mean": []}
        start = first_word = 0
        for group in self.param_groups:
            rule = self._rule(group)
            size, made = math.inf, buckets[rule.wire]
            for i, p in enumerate(group["params"], start):
                if moving[i]:
                    if size + p.numel() > self.bucket_elements:
                        made.append(Bucket(group, rule, [], first_word))
                        size = 0
                    made[-1].indices.append(i)
                    size += p.numel()
                    first_word += num_words(p.numel()) if rule.wire == "vote" else 0
            start += len(group["params"])
        return buckets

    def _slots(self, bucket: Bucket, here: int | None) -> list[Slot]:
        parameters = self._parameters()
        splits = {id(p): rows for p, rows in zip(bucket.group["params"], bucket.group["splits"], strict=True)}
        chosen = [parameters[i] for i in bucket.indices]
        states = [self.state[p] if here is None else self.worker_state(p, here) for p in chosen]
        return [Slot(p, splits[id(p)], state) for p, state in zip(chosen, states, strict=True)]

    def _raw(self, bucket: Bucket, gradients: Sequence[Gradients]) -> list[list[Tensor]]:
        parameters = self._parameters()
        return [[_or_zero(worker[i], parameters[i]) for i in bucket.indices] for worker in gradients]

    def _directions(
        self, bucket: Bucket, gradients: Sequence[Gradients], voters: Sequence[int]
    ) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Every worker's directions, zero where it has none, and with error feedback the sizes of its matrices."""
        directions, sizes = [], []
        for here, (worker, own) in enumerate(zip(self.workers.here, gradients, strict=True)):
            slots = self._slots(bucket, here)
            having = [k for k, i in enumerate(bucket.indices) if own[i] is not None and worker in voters]
            found = bucket.rule.directions(
                [slots[k] for k in having],
                [own[bucket.indices[k]] for k in having],
                bucket.group,  # type: ignore[misc]
            )
            mine = [torch.zeros_like(slot.parameter, dtype=torch.float32) for slot in slots]
            size = [torch.zeros(max(1, len(slot.splits)), device=slot.parameter.device) for slot in slots]
            for k, direction in zip(having, found, strict=True):
                mine[k] = direction
                if bucket.group.get("feedback"):
                    mine[k], size[k] = add_feedback(direction, slots[k].state["feedback"], slots[k].splits)
            directions.append(mine)
            sizes.append(size if bucket.group.get("feedback") else [])
        return directions, sizes

    def _apply(self, bucket: Bucket, decided: Sequence[Tensor], sizes: Sequence[Tensor]) -> None:
        here = None if bucket.rule.wire == "mean" else 0
        bucket.rule.apply(self._slots(bucket, here), decided, bucket.group, sizes)


def mean_state(states: Sequence[Tensor]) -> Tensor:
    """The rule for another number of workers: everyone continues with the mean of what the saved ones had."""
    return torch.stack([state.float() for state in states]).mean(0).to(states[0].dtype)


def _or_zero(gradient: Tensor | None, p: Tensor) -> Tensor:
    return torch.zeros_like(p) if gradient is None else gradient


def _is_finite(gradients: Gradients) -> bool:
    held = [g for g in gradients if g is not None and g.numel()]
    return not held or math.isfinite(float(torch.nn.utils.get_total_norm(held, math.inf)))
