"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019), in the form of nanoGPT.

Learned positions, LayerNorm before each block, GELU. Dimension letters: B microbatch, T tokens, D width,
V vocabulary, H heads, E head width. Weights are (out, in).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.models.configs import configure, require, require_positive
from thinwire.models.decoder import Decoder
from thinwire.models.draws import normal_

STD = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT. Raises ValueError for sizes that do not fit together."""

    vocab_size: int
    dim: int = 384
    num_layers: int = 6
    num_heads: int = 6
    max_seq_len: int = 256
    """Number of learned positions: no longer text can be read."""
    dropout: float = 0.0
    """Probability, after the embeddings, on attention weights and on what enters the residual stream."""
    bias: bool = False
    """Whether the matrices of the layers and the LayerNorms have biases, as GPT-2's do."""
    norm_eps: float = 1e-5
    tied_head: bool = True

    def __post_init__(self) -> None:
        require_positive(self, ("vocab_size", "dim", "num_layers", "num_heads", "max_seq_len"))
        heads = f"model: dim={self.dim} with num_heads={self.num_heads}"
        remedy = f"make dim a multiple of {self.num_heads}"
        require(self.dim % self.num_heads == 0, heads, "heads of equal width", remedy)
        require(0 <= self.dropout < 1, f"model: dropout={self.dropout}", "0 <= dropout < 1", "lower it")
        require(self.norm_eps > 0, f"model: norm_eps={self.norm_eps}", "a positive number", "raise it")

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of the query, key and value matrices inside the fused projection."""
        return self.dim, self.dim, self.dim


# "10m" is nanoGPT's model of single characters; "tiny" learns on two CPU cores.
GPT_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"dim": 128, "num_layers": 4, "num_heads": 4, "max_seq_len": 128},
    "10m": {"dim": 384, "num_layers": 6, "num_heads": 6, "max_seq_len": 256},
}


class Attention(nn.Module):
    """Causal self-attention; `wqkv` stacks the query, key and value matrices by rows."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wqkv = nn.Linear(config.dim, sum(config.qkv_rows), bias=config.bias)
        self.wo = nn.Linear(config.dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.wqkv(x).split(self.config.qkv_rows, dim=-1)
        q, k, v = (part.unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2) for part in parts)
        dropout = self.config.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return cast(Tensor, self.wo(out.transpose(1, 2).flatten(-2)))


class FeedForward(nn.Module):
    """GELU between two matrices, the hidden width four times D."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, 4 * config.dim, bias=config.bias)
        self.w2 = nn.Linear(4 * config.dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.w2(F.gelu(self.w1(x))))


class Layer(nn.Module):
    """One pre-norm transformer layer, (B, T, D) -> (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.ffn_norm = _norm(config)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return cast(Tensor, x + self.dropout(self.ffn(self.ffn_norm(x))))


class GPT(Decoder):
    """A GPT, or a contiguous slice of one: see `Decoder`. `positions` and the dropout come with the embedding."""

    FIRST_PARTS = ("embedding", "positions")

    config: GPTConfig

    def __init__(
        self, config: GPTConfig, *, layers: range | None = None, embedding: bool = True, head: bool = True
    ) -> None:
        super().__init__(config, layers=layers, embedding=embedding, head=head)
        layers = range(config.num_layers) if layers is None else layers
        self.embedding = nn.Embedding(config.vocab_size, config.dim) if embedding else None
        self.positions = nn.Embedding(config.max_seq_len, config.dim) if embedding else None
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleDict({str(index): Layer(config) for index in layers})
        self.norm = _norm(config) if head else None
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False) if head else None
        self._tie()

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (B, T) or hidden states (B, T, D) -> logits (B, T, V) or hidden states (B, T, D)."""
        self._check_input(x)
        if self.embedding is not None and self.positions is not None:
            x = self.dropout(self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def init_weights(self, seed: int) -> None:
        """Draws every parameter anew, each from a generator of its own seeded by (seed, global name).

        So the model is the same however it is split, on whatever device, and after `to_empty`. Standard
        deviations: 0.02 for every matrix and table, divided by sqrt(2 num_layers) for those that write into
        the residual stream (wo, w2). Norms are one, biases zero. A tied head has the values of the embedding.
        """
        for name, parameter in self.drawn_names():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                is_residual = name.endswith((".wo.weight", ".w2.weight"))
                std = STD / math.sqrt(2 * self.config.num_layers) if is_residual else STD
                normal_(parameter, std, seed, name)

    def fused_splits(self) -> dict[str, tuple[int, ...]]:
        """Fused matrices of this slice: name -> rows of the query, key and value matrices in it."""
        return {f"layers.{index}.attention.wqkv.weight": self.config.qkv_rows for index in self.layers}


def _norm(config: GPTConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.dim, config.norm_eps, bias=config.bias)


def gpt_config(size: str, **overrides: Any) -> GPTConfig:
    """The configuration of a named size; `vocab_size` must be among `overrides`.

    Raises:
        ValueError: an unknown size or field, or no vocabulary.
    """
    known = f"model size {size!r} without vocab_size"
    require("vocab_size" in overrides, known, "vocab_size=V", "give the vocabulary of the data")
    return configure(GPTConfig, GPT_SIZES, size, overrides)


def gpt(size: str, **overrides: Any) -> GPT:
    """A whole model of a named size on the default device; follow it by `init_weights(seed)`."""
    return GPT(gpt_config(size, **overrides))
