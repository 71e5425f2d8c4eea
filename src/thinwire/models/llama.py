"""LLaMA (Touvron et al., arXiv 2302.13971): rotary positions, SwiGLU, RMSNorm, optional grouped queries.

Dimension letters: B microbatch, T tokens, D width, V vocabulary, H heads, E head width. Weights are (out, in).
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.models.decoder import Decoder
from thinwire.models.draws import normal_
from thinwire.models.llama_config import (
    SIZES,
    LlamaConfig,
    end_parameter_counts,
    layer_parameter_counts,
    llama_config,
    num_parameters,
)

__all__ = [
    "SIZES",
    "Llama",
    "LlamaConfig",
    "end_parameter_counts",
    "layer_parameter_counts",
    "llama",
    "llama_config",
    "num_parameters",
]

EMBEDDING_STD = 0.02
LINEAR_STD = 0.02


def _wide(x: Tensor) -> torch.dtype:
    """float32, or float64 when x already is: the dtype norms and rotations compute in."""
    return torch.promote_types(x.dtype, torch.float32)


def rope_tables(num_tokens: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, E/2) of RoFormer's angles (Su et al., arXiv 2104.09864) on the device of `like`.

    Computed per forward, in float32 or wider: there is no buffer to leave uninitialised after `to_empty`, nor
    a cache that an inference-mode call could poison.
    """
    dtype = _wide(like)
    exponents = torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim
    positions = torch.arange(num_tokens, device=like.device, dtype=dtype)
    angles = positions[:, None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (B, H, T, E) by position; pairs are (i, i + E/2), the layout of Hugging Face checkpoints."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32 or wider (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = _wide(x)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; `wqkv` stacks the query, key and value matrices by rows."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.wqkv = nn.Linear(config.dim, sum(config.qkv_rows), bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config = self.config
        parts = self.wqkv(x).split(config.qkv_rows, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for part in parts)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = config.kv_heads != config.num_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return cast(Tensor, self.wo(out.transpose(1, 2).flatten(-2)))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202); `w13` stacks the gate and the up matrix by rows."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w13 = nn.Linear(config.dim, 2 * config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return cast(Tensor, self.w2(F.silu(gate) * up))


class Layer(nn.Module):
    """One pre-norm transformer layer, (B, T, D) -> (B, T, D)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return cast(Tensor, x + self.ffn(self.ffn_norm(x)))


class Llama(Decoder):
    """A LLaMA, or a contiguous slice of one: see `Decoder`. `norm` and `head` come together."""

    config: LlamaConfig

    def __init__(
        self, config: LlamaConfig, *, layers: range | None = None, embedding: bool = True, head: bool = True
    ) -> None:
        super().__init__(config, layers=layers, embedding=embedding, head=head)
        layers = range(config.num_layers) if layers is None else layers
        self.embedding = nn.Embedding(config.vocab_size, config.dim) if embedding else None
        self.layers = nn.ModuleDict({str(index): Layer(config) for index in layers})
        self.norm = RMSNorm(config.dim, config.norm_eps) if head else None
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False) if head else None
        self._tie()

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (B, T) or hidden states (B, T, D) -> logits (B, T, V) or hidden states (B, T, D)."""
        self._check_input(x)
        if self.embedding is not None:
            x = self.embedding(x)
        cos, sin = rope_tables(x.shape[1], self.config.head_dim, self.config.rope_theta, x)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def init_weights(self, seed: int) -> None:
        """Draws every parameter anew, each from a generator of its own seeded by (seed, global name).

        So the model is the same however it is split, on whatever device, and after `to_empty`. Standard
        deviations: 0.02 for the embedding and the matrices, divided by sqrt(2 num_layers) for those that
        write into the residual stream (wo, w2), so that its variance does not grow with depth, and 1/sqrt(D)
        for an untied head, which gives logits of unit variance at any width. Norms are one. A tied head has
        the values of the embedding.
        """
        for name, parameter in self.drawn_names():
            std = _initial_std(self.config, name)
            if std is None:
                nn.init.ones_(parameter)
            else:
                normal_(parameter, std, seed, name)

    def fused_splits(self) -> dict[str, tuple[int, ...]]:
        """Fused parameters of this slice: name -> rows of the matrices in it, (q, k, v) or (gate, up)."""
        hidden = self.config.hidden_dim
        splits: dict[str, tuple[int, ...]] = {}
        for index in self.layers:
            splits[f"layers.{index}.attention.wqkv.weight"] = self.config.qkv_rows
            splits[f"layers.{index}.ffn.w13.weight"] = (hidden, hidden)
        return splits


def _initial_std(config: LlamaConfig, name: str) -> float | None:
    """Standard deviation of a parameter's first values; None for norms, which are one."""
    if "norm" in name:
        return None
    if name == "embedding.weight":
        return EMBEDDING_STD
    if name == "head.weight":
        return 1 / math.sqrt(config.dim)
    if name.endswith((".wo.weight", ".w2.weight")):
        return LINEAR_STD / math.sqrt(2 * config.num_layers)
    return LINEAR_STD


def llama(size: str, **overrides: Any) -> Llama:
    """A whole model of a named size on the default device; follow it by `init_weights(seed)`."""
    return Llama(llama_config(size, **overrides))
