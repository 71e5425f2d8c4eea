"""The shapes of LLaMA models: configuration, named sizes, parameter counts.

Dimension letters as in `llama.py`: V vocabulary, D width, H query heads, G key/value heads, E head width,
F hidden width of the feed-forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from thinwire.models.configs import configure, require, require_positive


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a LLaMA. Raises ValueError for sizes that do not fit together."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    """Key/value heads, a divisor of num_heads; None means as many as query heads."""
    ffn_dim: int | None = None
    """Hidden width of SwiGLU; None means 8/3 dim, rounded up to a multiple of 64 (of 32 below dim 512)."""
    max_seq_len: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied_head: bool = False

    def __post_init__(self) -> None:
        counts = ("vocab_size", "dim", "num_layers", "num_heads", "kv_heads", "hidden_dim", "max_seq_len")
        require_positive(self, counts)
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            require(value > 0, f"model: {name}={value}", "a positive number", "raise it")
        require(
            self.dim % (2 * self.num_heads) == 0,
            f"model: dim={self.dim} with num_heads={self.num_heads}",
            "heads of equal, even width (rotary positions turn pairs)",
            f"make dim a multiple of {2 * self.num_heads}",
        )
        require(
            self.num_heads % self.kv_heads == 0,
            f"model: num_kv_heads={self.kv_heads} with num_heads={self.num_heads}",
            "a divisor of num_heads",
            "choose another num_kv_heads",
        )

    @property
    def kv_heads(self) -> int:
        """G, the number of key/value heads in use."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """E, the width of one head."""
        return self.dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """F, the hidden width of the feed-forward in use."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        multiple = 32 if self.dim < 512 else 64
        return math.ceil(8 * self.dim / 3 / multiple) * multiple

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of the query, key and value matrices inside the fused projection."""
        kv_rows = self.kv_heads * self.head_dim
        return self.dim, kv_rows, kv_rows


def layer_parameter_counts(config: LlamaConfig) -> list[int]:
    """Parameters of each layer, in order: the weights by which stages are balanced."""
    attention = config.dim * (sum(config.qkv_rows) + config.dim)
    feed_forward = 3 * config.dim * config.hidden_dim
    return [attention + feed_forward + 2 * config.dim] * config.num_layers


def end_parameter_counts(config: LlamaConfig) -> tuple[int, int]:
    """Parameters of the embedding, and of the final norm with the head; a tied head counts in both."""
    table = config.vocab_size * config.dim
    return table, table + config.dim


def num_parameters(config: LlamaConfig) -> int:
    """Parameters of the whole model, a tied table counted once."""
    shared = config.vocab_size * config.dim if config.tied_head else 0
    return sum(layer_parameter_counts(config)) + sum(end_parameter_counts(config)) - shared


def _size(vocab_size: int, dim: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "dim": dim, "num_layers": num_layers, "num_heads": num_heads}


# Depths divide by 4 and, from 10m on, by 8: the pipelines of the paper's tables.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": _size(4096, 192, 4, 6),
    "10m": _size(8192, 256, 8, 4),
    "150m": _size(32000, 1024, 8, 16),
    "500m": _size(32000, 1536, 16, 24),
    "1b": _size(32000, 2048, 16, 32),
}


def llama_config(size: str, **overrides: Any) -> LlamaConfig:
    """The configuration of a named size, with fields overridden. ValueError for an unknown size or field."""
    return configure(LlamaConfig, SIZES, size, overrides)
