"""Gradients must still be each worker's own: DistributedDataParallel may have averaged them already."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.errors import ConfigError

_synchronised = WeakTensorKeyDictionary()  # parameters that a wrapper's forward pass has prepared for averaging
_watching: list[Any] = []


def watch_wrappers() -> None:
    """From now on note what is averaged: by wrappers that there are, found once, and by later ones as they are made."""
    if not _watching:
        _watching.append(register_module_module_registration_hook(_watch_new))
        for wrapper in [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]:
            wrapper.register_forward_pre_hook(_note)


def check_local(parameters: Sequence[Tensor]) -> None:
    """Raise ConfigError where a DistributedDataParallel has averaged gradients of any of these since the last call.

    It does so after a forward pass with gradients, unless that was under its `no_sync()`.
    """
    averaged = [p for p in parameters if _synchronised.pop(p, False)] if len(_synchronised) else []
    if averaged:
        raise ConfigError(
            "gradients that DistributedDataParallel has averaged: every worker would vote the same, at full cost",
            "each worker's own gradients",
            "run forward and backward under `with model.no_sync():`, or train the module without the wrapper",
        )


def _watch_new(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """A wrapper registers what it wraps as a module of its own."""
    if isinstance(parent, DistributedDataParallel) and name == "module":
        parent.register_forward_pre_hook(_note)


def _note(wrapper: nn.Module, inputs: Any) -> None:
    if torch.is_grad_enabled() and getattr(wrapper, "require_backward_grad_sync", False):
        for p in wrapper.parameters():
            _synchronised[p] = True
