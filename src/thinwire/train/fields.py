"""The parts of a run's configuration: frozen dataclasses, whose docstrings are the command's help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinwire.collectives import AnyTransport, Ties
from thinwire.optim.build import Decay
from thinwire.optim.methods import Aux
from thinwire.optim.signs import Scale
from thinwire.pipeline.orders import stages_per_rank_of


@dataclass(frozen=True)
class ModelConfig:
    """A LLaMA, a GPT or a ResNet. Zeros (and empty text) mean: as the size has it."""

    family: Literal["llama", "gpt", "resnet18", "resnet50"] = "llama"
    """resnets (with a stem for CIFAR-10's small pictures) have `width` and nothing else of what follows"""
    width: int = 64
    """of a resnet: channels of its first layer"""
    size: str = "tiny"
    """tiny, 10m, 150m, 500m or 1b; of the family gpt tiny or 10m"""
    seq_len: int = 128
    """tokens per sequence"""
    vocab_size: int = 0
    """tokens of the vocabulary; a BPE of this size is trained on the data"""
    dim: int = 0
    """width D"""
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    """key and value heads, fewer than num_heads for grouped queries"""
    ffn_dim: int = 0
    tied_head: bool = False
    """share the embedding's matrix with the head"""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """of the layers' arithmetic (bf16: autocast; parameters and frames stay fp32)"""


@dataclass(frozen=True)
class DataConfig:
    """Text, or pictures for a resnet, to train on. What counts tokens counts pictures there."""

    source: str = "stdlib"
    """stdlib (Python's own standard library), a .txt, .jsonl or .parquet file, a folder or glob of them, or hub:NAME;
    for a resnet CIFAR-10: a folder of parquet files, or the original batches as a folder or archive"""
    text_column: str = "text"
    """of .jsonl, .parquet and hub sources"""
    val_tokens: int = 65_536
    """tokens of held-out documents (pictures of the test set) to evaluate on"""


@dataclass(frozen=True)
class PipelineConfig:
    """Stages, their schedule, and the link between them."""

    stages: int = 4
    """P; over one process each, or fewer processes where the schedule puts several stages on a rank"""
    schedule: str = "1F1B"
    """GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV"""
    microbatches: int = 8
    """per forward and backward pass; at least as many as stages"""
    stages_per_rank: int = 0
    """for schedules that leave the choice; 0: one for GPipe and 1F1B, else two"""
    balance: tuple[int, ...] = ()
    """layers per stage; empty: by parameter count"""
    emulate: bool = False
    """all stages in one process, through the same encoders and decoders (the twin)"""
    link: str = "none"
    """emulated between stages of different processes, as in 20mbit,20ms; the twin predicts with it and does not wait"""
    timeout_s: float = 300.0
    """a rank that hears nothing for so long gives up"""
    port: int = 0
    """of the rendezvous on this machine; 0: a free one"""

    @property
    def ranks(self) -> int:
        """Processes of the pipeline."""
        return max(1, self.stages // self.per_rank)

    @property
    def per_rank(self) -> int:
        """Stages per process."""
        return stages_per_rank_of(self.schedule, self.stages_per_rank)


@dataclass(frozen=True)
class CodecConfig:
    """What crosses a boundary. `rank` or `factor` is needed for every codec but identity and cut."""

    name: str = "identity"
    """identity, mapl, fixed, free or cut"""
    wire_format: str = "bf16"
    """of the numbers: fp32, bf16, fp16, integers like int8, int4-clip, had-int3, or top32 (docs/wire.md)"""
    gradient_format: str = ""
    """of their gradients, where it is another one of the same cost, as in int4-sr beside int4"""
    rank: int = 0
    """K, numbers per token"""
    factor: float = 0.0
    """instead of rank: the largest rank that compresses at least so many times, everything included"""
    anchor_rank: int = 0
    """K', columns of the anchor tables; 0: no anchors"""
    frame_gradient: Literal["both", "sender"] = "both"
    init: Literal["pca", "random"] = "pca"


@dataclass(frozen=True)
class DataParallelConfig:
    """Replicas of the whole pipeline, each on its share of the batch, and what they tell each other."""

    replicas: int = 1
    """M, the workers of a vote"""
    emulate: bool = False
    """all replicas in the same processes, one after another; bit for bit what processes of their own do"""
    transport: AnyTransport = "packed"
    """of votes: packed, gather, sum or auto"""
    ties: Ties = "zero"
    """what an even number of workers does where it disagrees: zero, random or owner"""
    aux: Aux = "adamw"
    """what trains everything but hidden matrices: adamw (on means in bf16) or vote (one bit)"""
    link: str = "none"
    """emulated between replicas of different processes, as in 50mbit,20ms; emulated replicas do not wait"""


@dataclass(frozen=True)
class OptimConfig:
    """One method on hidden matrices, AdamW (or a vote) on the rest, SPEL on frames."""

    method: Literal["muon", "signmuon", "signum", "signsgd", "lion", "adamw", "sgd"] = "muon"
    lr: float = 0.02
    """of the method"""
    scale: Scale = "none"
    """of signmuon's steps: none, fan_in, sqrt_mn or rms"""
    local_polar: bool = False
    """signmuon: step along the polar factor of the vote"""
    feedback: bool = False
    """error feedback, for methods that vote"""
    adamw_ratio: float = 0.5
    """AdamW's rate over lr"""
    frame_ratio: float = 0.1
    """the frames' rate over lr"""
    momentum: float = 0.95
    frame_momentum: float = 0.9
    weight_decay: float = 0.0
    """decoupled, on hidden matrices"""
    warmup_steps: int = 20
    decay: Decay = "wsd"
    """cosine, wsd (constant, then linear to zero over the last fifth) or constant"""
    grad_clip: float = 1.0
    """largest norm of the whole model's gradient; 0: no clipping"""


@dataclass(frozen=True)
class TrainConfig:
    """How long and how often."""

    steps: int = 200
    batch_size: int = 32
    """sequences (pictures) per optimizer step, over all accumulation steps and microbatches"""
    accumulation: int = 1
    """forward and backward passes per optimizer step"""
    seed: int = 1
    eval_every: int = 50
    """steps between evaluations; 0: at the end only"""
    checkpoint_every: int = 100
    """steps between checkpoints; 0: at the end only"""
    keep_checkpoints: int = 2
    threads: int = 1
    """threads per process on the CPU"""
