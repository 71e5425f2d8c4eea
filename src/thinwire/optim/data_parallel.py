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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import (
    BUCKET,
    TIES,
    AnyTransport,
    Flights,
    Moment,
    Pending,
    Roll,
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
from thinwire.optim.agreement import assign_number, describe_options, describe_parameters, next_number, parameter_names
from thinwire.optim.buckets import Bucket, directions, make_buckets
from thinwire.optim.feedback import mean_size
from thinwire.optim.gradients import Gradients, Recorder, first_not_finite
from thinwire.optim.local_gradients import check_local, watch_wrappers
from thinwire.optim.options import check_options
from thinwire.optim.rule import Rule, Slot, has_feedback
from thinwire.optim.ruled_groups import RuledGroups
from thinwire.wire import Ledger

_log = logging.getLogger("thinwire")


class DataParallel(RuledGroups):
    """Base of the optimizers here.

    Args:
        params: parameters, or groups of them, as `param_groups` makes them: `rule` says which rule trains a group.
        rules: by the name in a group's `rule`; a group without one gets that of "muon", the hidden matrices.
        defaults: options, by group.
        group: of torch.distributed: the workers. None: this process alone, with a warning where there are others.
        virtual_workers: M workers in this process: call `next_worker` after each one's backward pass, `step` after
            the last. Bit for bit what M processes do.
        transport, ties, seed: of the vote, see `collectives.majority_vote`.
        ledger, link: see `collectives.Workers`.
        bucket_elements: numbers per exchange; smaller ones overlap better, larger ones need fewer messages.

    `p.grad` is read only. Parameters that have a gradient nowhere do not move. `abstained` counts how often workers
    have abstained from a step since the optimizer was built; it is the same on all of them.

    Raises:
        ConfigError: parameters or options that a rule does not take; nothing is changed then.
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
        bucket_elements: int = BUCKET,
    ) -> None:
        exchange = {
            "virtual_workers": virtual_workers, "transport": transport, "ties": ties, "seed": seed, "ledger": ledger,
            "link": link, "bucket_elements": bucket_elements,
        }  # fmt: skip
        check_options(type(self).__name__, {**exchange, **defaults})
        self.workers = Workers(group, virtual=virtual_workers, ledger=ledger, link=link)
        self._is_told_alone = group is not None
        self.transport, self.ties, self.seed = transport, ties, seed
        self.bucket_elements = bucket_elements
        self.abstained = 0
        self._recorder = Recorder(len(self.workers.here))
        self._chosen: Transport | None = None
        self._compared = 0  # groups whose parameters' values the workers have compared
        self._number = 0  # among the group's optimizers, once the workers have compared their parameters
        if self.workers.is_networked:
            watch_wrappers()
        super().__init__(params, rules, {**defaults, "steps": 0}, num_workers=len(self.workers.here))

    def __getstate__(self) -> dict[str, Any]:
        """For copies. Those of an optimizer with a group cannot be made: use `state_dict`."""
        if self.workers.group is not None:
            raise ConfigError("a copy of an optimizer with a group", "state_dict()", "build another, load its state")
        own = {
            "rules", "num_workers", "workers", "transport", "ties", "seed", "bucket_elements", "abstained",
            "_recorder", "_chosen", "_number", "_compared", "_dtypes",
            "_is_told_alone",
        }  # fmt: skip
        return {**super().__getstate__(), **{name: value for name, value in self.__dict__.items() if name in own}}

    # --- a step ----------------------------------------------------------------------------------------------------

    def next_worker(self) -> None:
        """Record the gradients of a virtual worker, and make room for those of the next."""
        self._recorder.record(self._parameters())

    def abstain(self) -> None:
        """Let the worker whose gradients are there now sit out the next step: it takes part, but casts no vote."""
        self._recorder.abstain()

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
        parameters = self._parameters()
        self._tell_alone()
        try:
            check_options(type(self).__name__, {"transport": self.transport, "ties": self.ties, "seed": self.seed})
            self._check_groups()
            gradients = self._recorder.collect(parameters)
            if self.workers.is_networked:
                check_local(parameters)
        except ConfigError:
            self.workers.refuse(parameters[0].device)
            raise
        roll, spoiled = self._call(gradients)
        if roll.voters:
            self._follow(gradients, roll)
        self._recorder.warn(spoiled)
        return loss

    def _tell_alone(self) -> None:
        """Not before a step: `dist.group.WORLD` is None, too, until torch.distributed has been started."""
        if not self._is_told_alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            _log.warning(
                "%s trains alone (group=None) in one of %d processes: give it group=dist.group.WORLD, after "
                "init_process_group, to train with the others, or a group of this process to say that it should not",
                type(self).__name__, dist.get_world_size(),
            )  # fmt: skip
            self._is_told_alone = True

    def _call(self, gradients: Sequence[Gradients]) -> tuple[Roll, dict[int, str]]:
        """Call the roll; also returns, for the workers here that have to abstain, because of which parameter."""
        limit, told = self._largest_gradient(), self._recorder.abstaining
        spoiled = [None if here in told else first_not_finite(own, limit) for here, own in enumerate(gradients)]
        abstaining = [here in told or index is not None for here, index in enumerate(spoiled)]
        told.clear()
        number = self._number or next_number(self.workers.group)
        present = [[g is not None for g in own] for own in gradients]
        roll = self.workers.call(self._subject(number), abstaining, present, self._parameters()[0].device)
        self._number, self._compared = number, len(self.param_groups)
        assign_number(self.workers.group, number)
        self.abstained += self.workers.size - len(roll.voters)
        found = {w: index for w, index in zip(self.workers.here, spoiled, strict=True) if index is not None}
        names = [name for group in self.param_groups for name in parameter_names(group)] if found else []
        return roll, {worker: names[index] for worker, index in found.items()}

    def _follow(self, gradients: Sequence[Gradients], roll: Roll) -> None:
        """Exchange, and take the step that follows."""
        moving = [roll.anybody(i) for i in range(len(roll.present[0]))]
        rules = [(group, self._rule(group)) for group in self.param_groups]
        buckets = make_buckets(rules, moving, self.bucket_elements)
        started, flights = [], Flights()
        for bucket in buckets:
            started.append(self._contribute(bucket, gradients, roll))
            flights.add(started[-1])
        flights.complete()
        for bucket, exchanged in zip(buckets, started, strict=True):
            self._apply(bucket, exchanged)
        for group in self.param_groups:
            group["steps"] += 1

    def _largest_gradient(self) -> float:
        """What still can be added up over all workers in the dtypes in which gradients travel."""
        if self.workers.size == 1:
            return math.inf
        dtypes = [g["wire_dtype"] for g in self.param_groups if self._rule(g).wire == "mean"]
        dtypes += [torch.float32 for g in self.param_groups if has_feedback(self._rule(g), g)]  # the sizes
        return min((torch.finfo(dtype).max / self.workers.size for dtype in dtypes), default=math.inf)

    def _subject(self, optimizer: int) -> Subject:
        checks_values = self.workers.is_networked and self._compared != len(self.param_groups)
        rules = [(group, self._rule(group)) for group in self.param_groups]
        layout, options = describe_parameters(rules, checks_values), describe_options(self.param_groups)
        elements = sum(p.numel() for p in self._parameters())
        return Subject(
            layout, elements, (f"optimizer {optimizer}; bucket_elements={self.bucket_elements}", *options),
            step=self.param_groups[0]["steps"], seed=self.seed, transport=number(self.transport, self.ties),
            ties=TIES.index(self.ties), kind=1,
        )  # fmt: skip

    def _transport(self) -> Transport:
        if self._chosen is None:
            parameters = self._parameters()
            elements = sum(p.numel() for p in parameters)
            self._chosen = choose(self.workers, self.transport, elements, self.ties, parameters[0])
        return self._chosen

    def _slots(self, bucket: Bucket, here: int) -> list[Slot]:
        """The bucket's parameters with the state of one worker here, or everybody's."""
        shared = bucket.rule.wire == "mean"
        states = [self.state[p] if shared else self.worker_state(p, here) for p in bucket.parameters]
        return [Slot(p, rows, state) for p, rows, state in zip(bucket.parameters, bucket.splits, states, strict=True)]

    def _contribute(self, bucket: Bucket, gradients: Sequence[Gradients], roll: Roll) -> list[Pending[list[Tensor]]]:
        """Start the exchange of the directions of the workers here, with error feedback also of their sizes."""
        silent: Gradients = [None] * len(roll.present[0])
        computed = [
            directions(bucket, self._slots(bucket, here), own if worker in roll.voters else silent)
            for here, (worker, own) in enumerate(zip(self.workers.here, gradients, strict=True))
        ]
        found, sizes = [mine for mine, _ in computed], [size for _, size in computed]
        if bucket.rule.wire == "mean":
            return [mean(self.workers, roll, found, bucket.group["wire_dtype"])]
        moment = Moment(self.seed, bucket.group["steps"], bucket.first_word)
        started = [vote(self.workers, roll, found, transport=self._transport(), ties=self.ties, moment=moment)]
        return [*started, mean(self.workers, roll, sizes, torch.float32)] if sizes[0] else started

    def _apply(self, bucket: Bucket, exchanged: Sequence[Pending[list[Tensor]]]) -> None:
        decided, *sizes = [pending.result() for pending in exchanged]
        own = [mean_size(means) for means in sizes[0]] if sizes else []
        bucket.rule.apply(self._slots(bucket, 0), decided, bucket.group, own)
