"""The number formats by name."""

from __future__ import annotations

import torch

from thinwire.codecs.formats import Format, PlainFormat, ScaledHalf
from thinwire.codecs.integers import GRAMMAR, INTEGERS, parse
from thinwire.errors import ConfigError

_WHOLE: dict[str, Format] = {
    "fp32": PlainFormat("fp32", torch.float32),
    "bf16": PlainFormat("bf16", torch.bfloat16),
    "fp16": ScaledHalf(),
}
FORMATS = (*_WHOLE, *INTEGERS)  # and what the grammar of the integers makes of them


def get_format(name: str) -> Format:
    """Return a format by name.

    Raises:
        ConfigError: unknown name.
    """
    found = _WHOLE.get(name) or (parse(name) if isinstance(name, str) else None)
    if found is None:
        raise ConfigError(f"wire format {name!r}", f"{', '.join(_WHOLE)}, or {GRAMMAR}", "choose one of these")
    return found
