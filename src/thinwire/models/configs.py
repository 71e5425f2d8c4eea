"""What the configurations of all models share: checks that say what to do, and named sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

Config = TypeVar("Config")


def require(holds: bool, given: str, allowed: str, remedy: str) -> None:
    """Raises ValueError, in one line, unless `holds`."""
    if not holds:
        raise ValueError(f"{given}; allowed: {allowed}; {remedy}")


def require_positive(config: object, names: Iterable[str]) -> None:
    """Raises ValueError unless every named count of `config` is at least 1."""
    for name in names:
        value = getattr(config, name)
        require(value >= 1, f"model: {name}={value}", "a positive integer", "raise it")


def configure(
    config_type: type[Config], sizes: Mapping[str, Mapping[str, Any]], size: str, overrides: Mapping[str, Any]
) -> Config:
    """The configuration of a named size, with fields overridden. ValueError for an unknown size or field."""
    require(size in sizes, f"model size {size!r}", ", ".join(sizes), "choose one and override its fields")
    known = [field.name for field in fields(config_type)]  # type: ignore[arg-type]
    unknown = [name for name in overrides if name not in known]
    require(not unknown, f"model field {', '.join(unknown)}", ", ".join(known), "correct the name")
    return config_type(**{**sizes[size], **overrides})
