"""Which values every option of every optimizer takes: one table, for defaults, groups, loaded states and every step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, get_args

import torch

from thinwire.bits import MAX_VOTERS
from thinwire.collectives import TIES, AnyTransport
from thinwire.errors import ConfigError
from thinwire.link import Link
from thinwire.optim.signs import SCALES
from thinwire.polar import NAMED
from thinwire.wire import Ledger

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Kind:
    """What an option takes, in words and as a test that any object can be given to."""

    allowed: str
    holds: Callable[[Any], bool]


def _is_number(value: Any, low: float = 0.0, high: float = sys.float_info.max) -> bool:
    is_real = type(value) in (float, int) or (isinstance(value, Real) and not isinstance(value, bool))
    return is_real and bool(low <= value <= high)


def _is_fraction(value: Any) -> bool:
    return _is_number(value) and value < 1


def _is_series(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(holds(one) for one in value)


def _are_coefficients(value: Any) -> bool:
    largest = sys.float_info.max
    return (isinstance(value, str) and value in NAMED) or (
        _is_series(value, lambda abc: _is_series(abc, lambda x: _is_number(x, -largest)) and len(abc) == 3)
        and len(value) > 0
    )


def _whole(low: int, high: int, allowed: str) -> Kind:
    return Kind(allowed, lambda value: type(value) is int and low <= value <= high)


def _words(*words: str) -> Kind:
    allowed = ", ".join(words) if len(words) > 2 else " or ".join(words)
    return Kind(allowed, lambda value: isinstance(value, str) and value in words)


def _optional(kind: type) -> Kind:
    return Kind(f"a {kind.__name__} or None", lambda value: value is None or isinstance(value, kind))


_RATE = Kind("a finite number of 0 or more", _is_number)
_FRACTION = Kind("a number in [0, 1)", _is_fraction)
_BETAS = Kind("two numbers in [0, 1)", lambda value: _is_series(value, _is_fraction) and len(value) == 2)
_FLAG = Kind("True or False", lambda value: isinstance(value, bool))
_FLOAT = Kind(
    ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS),
    lambda value: isinstance(value, torch.dtype) and value in FLOATS,
)

KINDS: dict[str, Kind] = {
    **dict.fromkeys(("lr", "base_lr", "weight_decay", "aux_decay", "eps"), _RATE),
    **dict.fromkeys(("momentum", "frame_momentum", "aux_momentum"), _FRACTION),
    **dict.fromkeys(("betas", "lion_betas"), _BETAS),
    **dict.fromkeys(("nesterov", "local_polar", "feedback"), _FLAG),
    **dict.fromkeys(("wire_dtype", "aux_dtype"), _FLOAT),
    "average": _words("ema", "heavy_ball"),
    "decay": _words("coupled", "decoupled"),
    "scale": _words(*SCALES),
    "coefficients": Kind(f"{', '.join(NAMED)}, or (a, b, c) per iteration", _are_coefficients),
    "aux": _words("adamw", "vote"),
    "transport": _words(*get_args(AnyTransport)),
    "ties": _words(*TIES),
    "seed": _whole(0, (1 << 63) - 1, "a whole number from 0 to 2^63 - 1"),
    "steps": _whole(0, (1 << 63) - 1, "a whole number of 0 or more"),
    "virtual_workers": _whole(1, MAX_VOTERS, f"a whole number from 1 to {MAX_VOTERS}"),
    "bucket_elements": _whole(1, (1 << 63) - 1, "a whole number of 1 or more"),
    "ledger": _optional(Ledger),
    "link": _optional(Link),
}


def check_options(owner: str, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first of these options, by name, that has a value it does not take."""
    for name, value in values.items():
        if name in KINDS and not KINDS[name].holds(value):
            shown = name.removeprefix("lion_")  # as its user spells it
            raise ConfigError(f"{owner} with {shown}={value!r}", KINDS[name].allowed)
