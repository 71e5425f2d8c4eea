"""Gradients must still be each worker's own: DistributedDataParallel may have averaged them already."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ConfigError

_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # all that live in this process
_watching: list[Any] = []


def watch_wrappers() -> None:
    """Know every wrapper, without a search at every step: those alive from a search, later ones as they are made."""
    if not _watching:
        _watching.append(register_module_module_registration_hook(_note))
        _wrappers.update(o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel))


def check_local(parameters: Iterable[Tensor]) -> None:
    """Raise ConfigError where a DistributedDataParallel around any of these parameters has synchronised gradients.

    Under its `no_sync()` it leaves them alone. Which of both happened in the last forward pass it records in
    `require_forward_param_sync`.
    """
    watch_wrappers()
    synchronising = [wrapper for wrapper in _wrappers if getattr(wrapper, "require_forward_param_sync", False)]
    ours = {id(p) for p in parameters} if synchronising else set()
    if any(id(p) in ours for wrapper in synchronising for p in wrapper.parameters()):
        raise ConfigError(
            "gradients that DistributedDataParallel has averaged: every worker would vote the same, at full cost",
            "each worker's own gradients",
            "run forward and backward under `with model.no_sync():`, or train the module without the wrapper",
        )


def _note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """A wrapper registers what it wraps as a module of its own."""
    if isinstance(parent, DistributedDataParallel):
        _wrappers.add(parent)
