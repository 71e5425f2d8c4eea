"""Plain models. Nothing in here imports Thinwire, so the same file serves every method."""

from __future__ import annotations

from thinwire.models.llama import (
    SIZES,
    Llama,
    LlamaConfig,
    end_parameter_counts,
    layer_parameter_counts,
    llama,
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
