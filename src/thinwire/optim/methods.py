"""The optimizers that users name. All share `DataParallel`'s arguments, groups and exchange; they differ in one rule.

Groups of `param_groups` carry the rule of what is no hidden matrix: AdamW on averaged gradients (`aux="adamw"`) or a
vote (`aux="vote"`), SPEL for frames. So a comparison of methods changes one word.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any, Literal

import torch

from thinwire.errors import ConfigError
from thinwire.optim.data_parallel import DataParallel
from thinwire.optim.means import AdamWRule, MuonRule, SgdRule, SpelRule
from thinwire.optim.options import KINDS, check_options
from thinwire.optim.parameters import listed
from thinwire.optim.rule import Group, Rule
from thinwire.optim.signs import AuxiliaryVote, LionRule, Scale, SignMuonRule, SignumRule
from thinwire.polar import POLAR_EXPRESS, Coefficients, named

_GROUP_OPTIONS = ("base_lr", "steps", "wire_dtype")  # besides those of the method

Aux = Literal["adamw", "vote"]
Betas = tuple[float, float]
_AUX_OPTIONS: dict[str, Any] = {
    "betas": (0.9, 0.95), "eps": 1e-10, "aux_decay": 0.0, "frame_momentum": 0.9, "aux_momentum": 0.95,
}  # fmt: skip
_SHARED: dict[str, Any] = {"aux": "adamw", "wire_dtype": torch.float32, "aux_dtype": torch.bfloat16, **_AUX_OPTIONS}


class _Method(DataParallel):
    """A main rule for hidden matrices, and the rules of everything else. `LR`: the rate where none is given."""

    LR = 1e-3

    def __init__(self, params: Iterable[Any], main: Rule, options: dict[str, Any], rest: dict[str, Any]) -> None:
        check_takes(type(self), rest)
        shared = {name: rest.pop(name, default) for name, default in _SHARED.items()}
        given = options["lr"]
        options["lr"] = self.LR if given is None else given
        check_options(type(self).__name__, {**shared, **options})
        if "coefficients" in options:
            options["coefficients"] = named(options["coefficients"])
        params = listed(params)
        if given is not None:
            _check_one_rate(params, given)
        self._dtypes = {"muon": shared["wire_dtype"]}, shared["aux_dtype"]
        auxiliary: Rule = AuxiliaryVote() if shared["aux"] == "vote" else AdamWRule("aux_decay")
        rules: dict[str, Rule] = {"muon": main, "adamw": auxiliary, "spel": SpelRule()}
        super().__init__(params, rules, {**{name: shared[name] for name in _AUX_OPTIONS}, **options}, **rest)

    def _completed(self, group: Group) -> Group:
        check_takes(type(self), [name for name in group if name in KINDS], (*self.defaults, *_GROUP_OPTIONS))
        by_rule, other = self._dtypes
        return {"wire_dtype": by_rule.get(group.get("rule", "muon"), other), **group}


def options_of(method: type[DataParallel]) -> list[str]:
    """The names of all options of a method: its own, those of the other rules, those of the exchange."""
    own = [name for name, one in signature(method).parameters.items() if one.kind is not one.VAR_KEYWORD]
    exchange = [name for name, one in signature(DataParallel).parameters.items() if one.kind is one.KEYWORD_ONLY]
    shared = _SHARED if issubclass(method, _Method) else {}
    return list(dict.fromkeys([*own[1:], *shared, *exchange]))  # the first are the parameters


def check_takes(method: type[DataParallel], given: Iterable[str], allowed: Iterable[str] | None = None) -> None:
    """Raises ConfigError for the first option that the method (or what of it is allowed) does not have."""
    ours = list(options_of(method) if allowed is None else allowed)
    for name in given:
        if name not in ours:
            having = [one.__name__ for one in (*METHODS.values(), Spel) if name in options_of(one)]
            who = f"it is an option of {', '.join(having)}" if having else "no method has it"
            raise ConfigError(f"{method.__name__} with {name}", ", ".join(ours), who)


def _check_one_rate(groups: Iterable[Any], lr: float) -> None:
    """A rate of the optimizer beside another one of its groups would be ignored, as torch's optimizers do."""
    for group in groups:
        if isinstance(group, dict) and group.get("rule", "muon") == "muon" and group.get("lr", lr) != lr:
            raise ConfigError(
                f"lr={lr} beside groups with lr={group['lr']}", "one of them",
                "give the rate to param_groups(model, lr=...) and leave it out here",
            )  # fmt: skip


class SignMuon(_Method):
    """Sign-Muon (arXiv 2605.16311): the defaults are its Algorithm 1, with `group` its form for M workers.

    With one worker and `momentum=0.9` a step is `m = 0.9 m + 0.1 g; w -= lr * sign(polar(m))`.

    Args:
        params: see `DataParallel`.
        lr: the distance that every entry moves, times its scale; 1e-3 where no group has a rate of its own.
        momentum: beta.
        average: `ema`, or `heavy_ball` (m <- beta m + g).
        nesterov: orthogonalise beta m + (1 - beta) g.
        weight_decay, decay: `coupled` (added to the gradient: the paper's) or `decoupled`.
        scale: `none` (the paper's), `fan_in` (1 / sqrt(I)), `sqrt_mn` (1 / sqrt(O I)) or `rms` (0.2, AdamW's size).
        local_polar: step along the polar factor of the vote.
        feedback: error feedback, see `optim.feedback`: one float32 number more per parameter and worker.
        coefficients: of the polar iteration.
        aux: the rule of what is no hidden matrix, in groups of `param_groups`.
        rest: of `DataParallel` (`group`, `virtual_workers`, `transport`, `ties`, ...) and of the other rules (`betas`,
            `eps`, `aux_decay`, `aux_momentum`, `frame_momentum`, `aux_dtype`).

    Promise nothing unconditional: sign(polar(m)) is not always a descent direction; `feedback` cures that.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0.95,
        *,
        average: Literal["ema", "heavy_ball"] = "ema",
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decay: Literal["coupled", "decoupled"] = "coupled",
        scale: Scale = "none",
        local_polar: bool = False,
        feedback: bool = False,
        coefficients: Coefficients | str = POLAR_EXPRESS,
        **rest: Any,
    ) -> None:
        options = {
            "lr": lr, "momentum": momentum, "average": average, "nesterov": nesterov, "weight_decay": weight_decay,
            "decay": decay, "scale": scale, "local_polar": local_polar, "feedback": feedback,
            "coefficients": coefficients,
        }  # fmt: skip
        super().__init__(params, SignMuonRule(), options, rest)


class Signum(_Method):
    """Signum with majority vote (Bernstein et al., arXiv 1810.05291). With feedback its steps have the gradient's size.

    Args: as `SignMuon`'s.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        decay: Literal["coupled", "decoupled"] = "decoupled",
        feedback: bool = False,
        **rest: Any,
    ) -> None:
        options = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "decay": decay, "feedback": feedback,
        }  # fmt: skip
        super().__init__(params, SignumRule(), options, rest)


class SignSGD(_Method):
    """Signum without momentum: the majority vote of arXiv 1802.04434.

    Args: as `SignMuon`'s.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        *,
        weight_decay: float = 0.0,
        decay: Literal["coupled", "decoupled"] = "decoupled",
        feedback: bool = False,
        **rest: Any,
    ) -> None:
        options = {"lr": lr, "momentum": 0.0, "weight_decay": weight_decay, "decay": decay, "feedback": feedback}
        super().__init__(params, SignumRule(), options, rest)


class DistributedLion(_Method):
    """Lion with a majority vote (Liu et al., arXiv 2404.00438)."""

    LR = 1e-4

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: Betas = (0.9, 0.99),
        *,
        weight_decay: float = 0.0,
        feedback: bool = False,
        **rest: Any,
    ) -> None:
        options = {"lr": lr, "lion_betas": betas, "weight_decay": weight_decay, "feedback": feedback}
        super().__init__(params, LionRule(), options, rest)


class Muon(_Method):
    """Muon on the mean of the workers' gradients; frames and everything else as their groups say.

    Args:
        lr: step in spectral norm; a square matrix moves by `lr` in every direction it moves in. Default 0.02.
        weight_decay: decoupled.
        wire_dtype: in which gradients of hidden matrices travel.
        rest: see `SignMuon`.
    """

    LR = 0.02

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        coefficients: Coefficients | str = POLAR_EXPRESS,
        **rest: Any,
    ) -> None:
        options = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "coefficients": coefficients,
        }  # fmt: skip
        super().__init__(params, MuonRule(), options, rest)


class AdamW(_Method):
    """torch's AdamW on the mean of the workers' gradients."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: Betas = (0.9, 0.95),
        *,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        **rest: Any,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, AdamWRule(), options, rest)


class SGD(_Method):
    """SGD with momentum on the mean of the workers' gradients."""

    LR = 0.1

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        **rest: Any,
    ) -> None:
        super().__init__(params, SgdRule(), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, rest)


class Spel(DataParallel):
    """Trains frames; they stay orthonormal to 1e-6. Float32, no weight decay.

    Args:
        params: `(D, K)` orthonormal matrices, or groups of them.
        lr: step in spectral norm, at most 0.05; MAPL uses 0.1 times the main rate.
        momentum: beta.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.002, momentum: float = 0.9, **rest: Any) -> None:
        check_takes(type(self), rest)
        defaults = {"lr": lr, "momentum": momentum, "wire_dtype": torch.float32}
        rule = SpelRule("momentum")
        super().__init__(params, {"muon": rule, "spel": rule}, defaults, **rest)

    def orthogonality_error(self) -> float:
        """The largest `max |A^T A - I|` over all frames."""
        from thinwire.stiefel import orthogonality_error

        return max((orthogonality_error(p) for group in self.param_groups for p in group["params"]), default=0.0)


METHODS: dict[str, type[_Method]] = {
    "signmuon": SignMuon, "signum": Signum, "signsgd": SignSGD, "lion": DistributedLion, "muon": Muon,
    "adamw": AdamW, "sgd": SGD,
}  # fmt: skip
VOTING = ("signmuon", "signum", "signsgd", "lion")  # methods that send signs
WITH_MOMENTUM = ("muon", "signmuon", "signum", "sgd")  # methods of which `momentum` is an option
