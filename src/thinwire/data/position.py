"""Where a run stands in its data: an order drawn from the seed alone, and the check before it is taken up again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of `count` samples in one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def check_state(state: Mapping[str, Any], own: Mapping[str, Any], position: set[str]) -> None:
    """Refuses the position of another order of the data: all but the names in `position` must be equal."""
    if set(state) != set(own):
        raise ConfigError(f"data position with {sorted(state)}", f"{sorted(own)}", "resume from this run's checkpoint")
    for name in sorted(set(own) - position):
        if state[name] != own[name]:
            given = f"data position of {name}={state[name]}, but this run has {own[name]}"
            raise ConfigError(given, "a checkpoint of the same data", "restore the configuration")


def check_sizes(**sizes: int) -> None:
    """Refuses a size below one."""
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name}={value}", "a positive integer", "raise it")
