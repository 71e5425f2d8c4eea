"""Parameters in groups, each trained by a rule, and their state; the step is somebody else's."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.optim.agreement import check_loadable, fill_state
from thinwire.optim.options import check_options
from thinwire.optim.parameters import check_any_trained, check_parameters, copied_group, listed
from thinwire.optim.rule import Group, Rule, has_feedback, state_names

_log = logging.getLogger("thinwire")


class RuledGroups(torch.optim.Optimizer):
    """An optimizer without a step. What it refuses, at any time, leaves it as it was.

    Args:
        params: parameters, or groups of them, as `param_groups` makes them: `rule` says which rule trains a group.
        rules: by the name in a group's `rule`; a group without one gets that of "muon", the hidden matrices.
        defaults: options, by group.
        num_workers: of which this process keeps the state.
    """

    def __init__(self, params: Any, rules: dict[str, Rule], defaults: dict[str, Any], *, num_workers: int) -> None:
        self.rules, self.num_workers = rules, num_workers
        super().__init__(listed(params) or [{"params": []}], defaults)
        check_any_trained(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its state is made at once, so that a checkpoint finds it. A refused group leaves no trace."""
        before = len(self.param_groups)
        group = self._completed(copied_group(param_group, self.rules))
        if self.param_groups:
            group.setdefault("steps", self.param_groups[0]["steps"])
        group.setdefault("splits", [() for _ in group["params"]])
        try:
            self._append(group)
            check_parameters(group)
            self._check_group(group)
            for p, splits in zip(group["params"], group["splits"], strict=True):
                self._rule(group).check(p, splits)
            self.state.update({p: self._new_state(self._rule(group), p, group) for p in group["params"]})
        except BaseException:
            del self.param_groups[before:]
            raise

    def _completed(self, group: Group) -> Group:
        """A group with the options that a method derives from its rule."""
        return group

    def _append(self, group: Group) -> None:
        try:
            super().add_param_group(group)
        except (TypeError, ValueError) as error:
            allowed = "leaf tensors, each in one group, all with names or none"
            raise ConfigError(f"parameters that torch refuses ({error})", allowed) from None

    def _check_group(self, group: Group) -> None:
        """Raise ConfigError for options that the method or the group's rule does not take."""
        check_options(type(self).__name__, group)
        self._rule(group).check_group(group)

    def _rule(self, group: Group) -> Rule:
        return self.rules[group.get("rule", "muon")]

    def _new_state(self, rule: Rule, p: Tensor, group: Group) -> dict[str, Tensor]:
        state = rule.state(p, group)
        if has_feedback(rule, group):
            state["feedback"] = torch.zeros_like(p, dtype=torch.float32)
        # Alike for one worker here and for many: the order of numbers in memory decides the last bits of a sum.
        state = {key: value.contiguous() for key, value in state.items()} if rule.wire == "vote" else state
        copies = self.num_workers if rule.wire == "vote" else 1
        return state if copies == 1 else {key: torch.stack([value] * copies) for key, value in state.items()}

    def worker_state(self, p: Tensor, here: int) -> dict[str, Tensor]:
        """Views of a parameter's state that belongs to one of the workers here (counted among them)."""
        state: dict[str, Tensor] = self.state[p]
        return state if self.num_workers == 1 else {key: value[here] for key, value in state.items()}

    def is_worker_state(self, p: Tensor) -> bool:
        """Whether the state of this parameter differs between workers (momenta of a vote) or is everybody's."""
        return any(self._rule(g).wire == "vote" and any(p is q for q in g["params"]) for g in self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch would round the float32 state of bfloat16 parameters.

        A state saved with another number of virtual workers is taken over by the rule for another M: every worker
        starts with the mean of the saved workers' momenta and feedback. It is announced in the log.
        """
        check_loadable(self, state_dict)
        for saved in state_dict["param_groups"]:
            self._check_group(saved)
        fresh = dict(self.state)
        super().load_state_dict(state_dict)
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        resized = False
        for key, p in zip(keys, self._parameters(), strict=True):
            self.state[p] = fresh[p]
            resized |= fill_state(fresh[p], state_dict["state"].get(key, {}), p.dim())
        if resized:
            _log.warning("state of another number of workers: every worker starts with the mean of the saved ones")

    def _check_groups(self) -> None:
        """Raise ConfigError for options that have been changed to what cannot be stepped with."""
        for group in self.param_groups:
            self._check_group(group)
            wanted = state_names(self._rule(group), group)
            if any(self.state[p].keys() != wanted for p in group["params"][:1]):
                raise ConfigError(
                    f"options changed so that a state of {sorted(wanted)} is needed",
                    f"{sorted(self.state[group['params'][0]])}, with which the optimizer was built", "build another",
                )  # fmt: skip

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]
