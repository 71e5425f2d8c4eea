"""The number formats by name."""

from __future__ import annotations

import torch

from thinwire.codecs import integers, top_k
from thinwire.codecs.formats import Format, PlainFormat, ScaledHalf
from thinwire.errors import ConfigError

_WHOLE: dict[str, Format] = {
    "fp32": PlainFormat("fp32", torch.float32),
    "bf16": PlainFormat("bf16", torch.bfloat16),
    "fp16": ScaledHalf(),
}
FORMATS = (*_WHOLE, *integers.INTEGERS, "top32")  # and what the grammars make of them


def get_format(name: str) -> Format:
    """Return a format by name.

    Raises:
        ConfigError: unknown name.
    """
    found = None
    if isinstance(name, str):
        found = _WHOLE.get(name) or integers.parse(name) or top_k.parse(name)
    if found is None:
        allowed = f"{', '.join(_WHOLE)}, {integers.GRAMMAR}, or {top_k.GRAMMAR}"
        raise ConfigError(f"wire format {name!r}", allowed, "choose one of these")
    return found
