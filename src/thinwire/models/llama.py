"""LLaMA (Touvron et al., arXiv 2302.13971): rotary positions, SwiGLU, RMSNorm, optional grouped queries.

Dimension letters: B microbatch, T tokens, D width, V vocabulary, H heads, E head width. Weights are (out, in).

Parameter names carry the global layer index (`layers.3.attention.wqkv.weight`), so they do not depend on how
the model is cut into stages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.models.llama_config import (
    SIZES,
    LlamaConfig,
    end_parameter_counts,
    layer_parameter_counts,
    llama_config,
    num_parameters,
    require,
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
TIED_NAMES = ("embedding.weight", "head.weight")


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


class Llama(nn.Module):
    """A LLaMA, or a contiguous slice of one.

    A slice without the embedding takes hidden states, one without the head returns them; `embedding`, or
    `norm` and `head`, are then None. Building allocates the chosen parts only, on the default or the meta
    device; call `init_weights` before use (the constructor leaves torch's default values).
    """

    def __init__(
        self, config: LlamaConfig, *, layers: range | None = None, embedding: bool = True, head: bool = True
    ) -> None:
        super().__init__()
        layers = range(config.num_layers) if layers is None else layers
        _check_slice(config, layers, embedding or head)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim) if embedding else None
        self.layers = nn.ModuleDict({str(index): Layer(config) for index in layers})
        self.norm = RMSNorm(config.dim, config.norm_eps) if head else None
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False) if head else None
        self._tie()

    def _tie(self) -> None:
        if self.config.tied_head and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keeps a tied head tied through `to`, `to_empty` and the like, which may replace parameters."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self

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

    def _check_input(self, x: Tensor) -> None:
        dim, longest = self.config.dim, self.config.max_seq_len
        given = f"model input of shape {tuple(x.shape)}, {x.dtype}"
        if self.embedding is not None:
            is_ids = x.dim() == 2 and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
            require(is_ids, given, "integer token ids (B, T)", "this slice has the embedding")
        else:
            is_hidden = x.dim() == 3 and x.shape[-1] == dim and x.is_floating_point()
            require(is_hidden, given, f"hidden states (B, T, {dim})", "this slice has no embedding")
        require(x.shape[1] <= longest, given, f"T <= max_seq_len={longest}", "cut it or raise max_seq_len")

    def slice(self, layers: range, *, embedding: bool, head: bool) -> Llama:
        """The chosen part as a model of its own: the same names, and the same modules, not copies."""
        missing = [f"layer {index}" for index in layers if str(index) not in self.layers]
        missing += ["embedding"] if embedding and self.embedding is None else []
        missing += ["head"] if head and self.head is None else []
        given = f"slice: asks for {', '.join(missing)}"
        require(not missing, given, "parts that this model has", "slice the whole model")
        with torch.device("meta"):
            part = Llama(self.config, layers=layers, embedding=embedding, head=head)
        part.embedding = self.embedding if embedding else None
        part.layers = nn.ModuleDict({str(index): self.layers[str(index)] for index in layers})
        part.norm, part.head = (self.norm, self.head) if head else (None, None)
        part.training = self.training
        return part

    def init_weights(self, seed: int) -> None:
        """Draws every parameter anew, each from a generator of its own seeded by (seed, global name).

        So the model is the same however it is split, on whatever device, and after `to_empty`. Standard
        deviations: 0.02 for the embedding and the matrices, divided by sqrt(2 num_layers) for those that
        write into the residual stream (wo, w2), so that its variance does not grow with depth, and 1/sqrt(D)
        for an untied head, which gives logits of unit variance at any width. Norms are one. A tied head has
        the values of the embedding.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                name = TIED_NAMES[0] if self.config.tied_head and name == TIED_NAMES[1] else name
                std = _initial_std(self.config, name)
                if std is None:
                    parameter.fill_(1.0)
                else:
                    values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                    parameter.copy_(values.normal_(0.0, std, generator=_generator(seed, name)))

    def fused_splits(self) -> dict[str, tuple[int, ...]]:
        """Fused parameters of this slice: name -> rows of the matrices in it, (q, k, v) or (gate, up)."""
        hidden = self.config.hidden_dim
        splits: dict[str, tuple[int, ...]] = {}
        for index in self.layers:
            splits[f"layers.{index}.attention.wqkv.weight"] = self.config.qkv_rows
            splits[f"layers.{index}.ffn.w13.weight"] = (hidden, hidden)
        return splits

    @property
    def tied_parameters(self) -> list[tuple[str, str]]:
        """Pairs of global names that are one parameter of the whole model, wherever the slices put them."""
        return [TIED_NAMES] if self.config.tied_head else []


def _check_slice(config: LlamaConfig, layers: range, has_end: bool) -> None:
    given = f"slice: layers={layers}"
    inside = not layers or (layers.step == 1 and layers[0] >= 0 and layers[-1] < config.num_layers)
    require(inside, given, f"consecutive layers within 0..{config.num_layers - 1}", "choose another range")
    require(bool(layers) or has_end, given, "a layer, the embedding or the head", "use fewer stages")


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


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
