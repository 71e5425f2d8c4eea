"""Thinwire trains neural networks over thin wires. Public names; importing this loads nothing heavy."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "AdamW": "thinwire.optim",
    "DistributedLion": "thinwire.optim",
    "Muon": "thinwire.optim",
    "SGD": "thinwire.optim",
    "SignMuon": "thinwire.optim",
    "SignSGD": "thinwire.optim",
    "Signum": "thinwire.optim",
    "majority_vote": "thinwire.collectives",
    "Spel": "thinwire.optim",
    "build_optimizers": "thinwire.optim",
    "mean_of_workers": "thinwire.optim",
    "param_groups": "thinwire.optim",
    "orthogonality_error": "thinwire.stiefel",
    "Link": "thinwire.link",
    "Ledger": "thinwire.wire",
    "codecs": "",
    "collectives": "",
    "optim": "",
    "pipeline": "",
}

__all__ = [*_EXPORTS, "polar"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    home = _EXPORTS[name]
    value = getattr(import_module(home), name) if home else import_module(f"thinwire.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Lets `thinwire.polar` be the function although `thinwire/polar.py` is a module of the same name."""

    @property
    def polar(self) -> Any:
        return import_module("thinwire.polar").polar

    @polar.setter
    def polar(self, module: ModuleType) -> None:
        """Python binds a submodule to its package on import: not this one."""


sys.modules[__name__].__class__ = _Package
