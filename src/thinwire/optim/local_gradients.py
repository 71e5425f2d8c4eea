"""Gradients must still be each worker's own: DistributedDataParallel may have averaged them already."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from thinwire.errors import ConfigError

_known: dict[int, list[Any]] = {}


def check_local(parameters: Sequence[Tensor]) -> None:
    """Raise ConfigError where a DistributedDataParallel around these parameters has synchronised their gradients.

    Under its `no_sync()` it leaves them alone. Which of both happened in the last forward pass it records in
    `require_forward_param_sync`.
    """
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None or not parameters:
        return
    for wrapper in _wrappers(parameters[0], parallel.DistributedDataParallel):
        if wrapper.require_forward_param_sync:
            raise ConfigError(
                "gradients that DistributedDataParallel has averaged: every worker would vote the same, at full cost",
                "each worker's own gradients",
                "run forward and backward under `with model.no_sync():`, or train the module without the wrapper",
            )


def _wrappers(first: Tensor, kind: Any) -> list[Any]:
    """All wrappers that hold a parameter; looked up once per parameter, among all objects alive."""
    if id(first) not in _known:
        found = [o for o in gc.get_objects() if type(o) is kind and any(p is first for p in o.parameters())]
        _known[id(first)] = [weakref.ref(wrapper) for wrapper in found]
        weakref.finalize(first, _known.pop, id(first), None)
    return [wrapper for ref in _known[id(first)] if (wrapper := ref()) is not None]
