"""Plain models. Nothing in here imports Thinwire, so the same file serves every method."""

from __future__ import annotations

from thinwire.models.gpt import GPT, GPT_SIZES, GPTConfig, gpt, gpt_config
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
from thinwire.models.resnet import ResNet, ResNetConfig, resnet18, resnet50

__all__ = [
    "GPT",
    "GPT_SIZES",
    "SIZES",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "ResNet",
    "ResNetConfig",
    "end_parameter_counts",
    "gpt",
    "gpt_config",
    "layer_parameter_counts",
    "llama",
    "llama_config",
    "num_parameters",
    "resnet18",
    "resnet50",
]
