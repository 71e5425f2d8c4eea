"""Boundary codecs, by name.

| name       | what crosses the boundary                                                        |
|------------|----------------------------------------------------------------------------------|
| `identity` | the activation, in any number format: fp32, bf16, fp16, integers, top-k          |
| `mapl`     | coordinates in a frame learned on the Stiefel manifold, anchors taken out        |
| `fixed`    | the same with a frame that does not learn                                        |
| `free`     | the same with a frame that learns without a constraint                           |
| `cut`      | nothing but token ids: the control that says what the others are worth           |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.codecs.base import Anchors, Boundary, Codec, Decoder, Encoder
from thinwire.codecs.cut import Cut
from thinwire.codecs.identity import Identity
from thinwire.codecs.subspace import Subspace
from thinwire.errors import ConfigError


def _fixed(**options: Any) -> Codec:
    return Subspace(frame="frozen", **options)


def _free(**options: Any) -> Codec:
    return Subspace(frame="free", **options)


def _mapl(**options: Any) -> Codec:
    return Subspace(frame="manifold", **options)


_REGISTRY: dict[str, Callable[..., Codec]] = {
    "identity": Identity,
    "mapl": _mapl,
    "fixed": _fixed,
    "free": _free,
    "cut": Cut,
}


def names() -> tuple[str, ...]:
    """The names that `get` knows."""
    return tuple(_REGISTRY)


def get(name: str, **options: Any) -> Codec:
    """Return the codec `name` with these options (see its class for what they are).

    Raises:
        ConfigError: unknown name, unknown option or a value out of range.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ConfigError(f"codec {name!r}", ", ".join(names()), "choose one of these")
    try:
        return _REGISTRY[name](**options)
    except TypeError as error:
        raise ConfigError(f"codec {name!r} with options {options}", str(error)) from None


__all__ = ["Anchors", "Boundary", "Codec", "Cut", "Decoder", "Encoder", "Identity", "Subspace", "get", "names"]
