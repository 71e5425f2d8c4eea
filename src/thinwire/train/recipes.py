"""Recipes: named configurations. Each is a function; the command line overrides what it returns."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from thinwire.errors import ConfigError
from thinwire.train.config import (
    CodecConfig,
    Config,
    DataConfig,
    DataParallelConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    TrainConfig,
)

_RECIPES: dict[str, Callable[[], Config]] = {}


def recipe(function: Callable[[], Config]) -> Callable[[], Config]:
    """Register a recipe under its name, with dashes."""
    _RECIPES[function.__name__.replace("two_d", "2d").replace("_", "-")] = function
    return function


def names() -> tuple[str, ...]:
    """All recipes."""
    return tuple(_RECIPES)


def get(name: str) -> Config:
    """Return a recipe's configuration.

    Raises:
        ConfigError: unknown name.
    """
    if name not in _RECIPES:
        near = difflib.get_close_matches(name, _RECIPES, 1)
        raise ConfigError(f"recipe {name!r}", ", ".join(_RECIPES), f"did you mean {near[0]}?" if near else "")
    return replace(_RECIPES[name](), name=name)


def describe() -> list[tuple[str, str]]:
    """Name and first line of every recipe."""
    return [(name, (function.__doc__ or "").strip().splitlines()[0]) for name, function in _RECIPES.items()]


@recipe
def demo_uncompressed() -> Config:
    """Four stages over an emulated home connection, bf16 activations; the slow half of `make demo`."""
    return Config(
        model=ModelConfig(size="tiny", seq_len=128, vocab_size=2048),
        data=DataConfig(val_tokens=16_384),
        pipeline=PipelineConfig(stages=4, schedule="GPipe", microbatches=8, link="5mbit,10ms"),
        optim=OptimConfig(lr=0.02, warmup_steps=10),
        train=TrainConfig(steps=56, batch_size=16, eval_every=28, checkpoint_every=0),
    )


@recipe
def demo_mapl() -> Config:
    """The same run with MAPL at 8x; the fast half of `make demo`."""
    return replace(demo_uncompressed(), codec=CodecConfig(name="mapl", factor=8, anchor_rank=16))


@recipe
def tiny() -> Config:
    """3M parameters over four stages, no link: a first run on a laptop."""
    return Config(
        train=TrainConfig(steps=500, batch_size=32), optim=OptimConfig(warmup_steps=25), pipeline=PipelineConfig()
    )


@recipe
def tiny_mapl() -> Config:
    """`tiny` with MAPL at 8x."""
    return replace(tiny(), codec=CodecConfig(name="mapl", factor=8, anchor_rank=16))


@recipe
def llama_10m_mapl() -> Config:
    """10M parameters, four stages of two layers, MAPL at 8x."""
    return Config(
        model=ModelConfig(size="10m", seq_len=256),
        codec=CodecConfig(name="mapl", factor=8, anchor_rank=32),
        train=TrainConfig(steps=2000, batch_size=64, eval_every=200, checkpoint_every=500),
        optim=OptimConfig(warmup_steps=100),
    )


@recipe
def signmuon_llama() -> Config:
    """10M parameters, four replicas that vote on the signs of their orthogonalised momenta; no pipeline."""
    return Config(
        model=ModelConfig(size="10m", seq_len=256),
        pipeline=PipelineConfig(stages=1, microbatches=1),
        dp=DataParallelConfig(replicas=4, ties="random"),
        optim=OptimConfig(method="signmuon", lr=1e-3, adamw_ratio=5.0, warmup_steps=100, decay="cosine"),
        train=TrainConfig(steps=1500, batch_size=64, eval_every=250, checkpoint_every=500),
    )


@recipe
def signmuon_nanogpt() -> Config:
    """nanoGPT's small model (384 wide, 6 layers, context 256), 1,500 steps at lr 1e-3 as in Sign-Muon's paper."""
    same = signmuon_llama()
    return replace(
        same,
        model=ModelConfig(family="gpt", size="10m", seq_len=256, tied_head=True),
        optim=replace(same.optim, warmup_steps=75),
    )


@recipe
def tiny_gpt() -> Config:
    """1M parameters, two replicas, for a laptop."""
    return replace(
        signmuon_nanogpt(),
        model=ModelConfig(family="gpt", size="tiny", seq_len=128, vocab_size=1024, tied_head=True),
        dp=DataParallelConfig(replicas=2, ties="random"),
        train=TrainConfig(steps=300, batch_size=16),
    )


@recipe
def signmuon_cifar10() -> Config:
    """ResNet-50 on CIFAR-10, four replicas, as far as Sign-Muon's paper is known (no decay). Set data.source."""
    return Config(
        model=ModelConfig(family="resnet50"),
        data=DataConfig(val_tokens=10_000),
        pipeline=PipelineConfig(stages=1, microbatches=1),
        dp=DataParallelConfig(replicas=4, ties="random"),
        optim=OptimConfig(
            method="signmuon", lr=1e-3, momentum=0.9, adamw_ratio=3.0, warmup_steps=200, decay="cosine", grad_clip=0.0
        ),
        train=TrainConfig(steps=19_500, batch_size=512, eval_every=500, checkpoint_every=2000),
    )


@recipe
def tiny_resnet() -> Config:
    """A ResNet-18 eight channels wide, two replicas, for a laptop. Set data.source to CIFAR-10."""
    return replace(
        signmuon_cifar10(),
        model=ModelConfig(family="resnet18", width=8),
        data=DataConfig(val_tokens=2_000),
        dp=DataParallelConfig(replicas=2, ties="random"),
        train=TrainConfig(steps=400, batch_size=64, eval_every=100),
    )


@recipe
def two_d_llama() -> Config:
    """3M parameters, four stages x two replicas: MAPL between the stages, one-bit votes between the replicas."""
    return Config(
        model=ModelConfig(size="tiny", seq_len=128, vocab_size=2048),
        pipeline=PipelineConfig(stages=4, microbatches=8, link="50mbit,20ms"),
        dp=DataParallelConfig(replicas=2, ties="random", aux="vote", link="50mbit,20ms"),
        codec=CodecConfig(name="mapl", factor=8, anchor_rank=16),
        optim=OptimConfig(method="signmuon", lr=1e-3, adamw_ratio=10.0, frame_ratio=2.0, warmup_steps=20),
        train=TrainConfig(steps=300, batch_size=32, eval_every=50),
    )


@recipe
def two_d_llama_uncompressed() -> Config:
    """The same with neither compressor: bf16 activations, and Muon on averaged gradients."""
    return replace(
        two_d_llama(),
        codec=CodecConfig(),
        dp=DataParallelConfig(replicas=2, link="50mbit,20ms"),
        optim=OptimConfig(lr=0.02, warmup_steps=20),
    )


def _paper(size: str, factor_rank: int, steps: int, lr: float) -> Config:
    """MAPL's setting (methods 1.6): context 2,048, 512 sequences a step, 20 tokens per parameter, K = K' = 256."""
    return Config(
        model=ModelConfig(size=size, seq_len=2048, dtype="bf16"),
        pipeline=PipelineConfig(stages=4, microbatches=64),
        codec=CodecConfig(name="mapl", rank=factor_rank, anchor_rank=256),
        optim=OptimConfig(lr=lr, warmup_steps=steps // 50, decay="cosine"),
        train=TrainConfig(steps=steps, batch_size=512, eval_every=500, checkpoint_every=500),
    )


@recipe
def llama_150m_mapl() -> Config:
    """150M at 4x as in MAPL's paper; for GPUs. Set data.source to your text."""
    return _paper("150m", 256, 3000, 0.02)


@recipe
def llama_500m_mapl() -> Config:
    """500M at 6x as in MAPL's paper; for GPUs."""
    return _paper("500m", 256, 10000, 0.02)


@recipe
def llama_1b_mapl() -> Config:
    """1B at 8x as in MAPL's paper; for GPUs."""
    return _paper("1b", 256, 20000, 0.01)
