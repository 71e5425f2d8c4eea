"""What a run is: frozen dataclasses, one per part. A recipe gives one; the command line overrides fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from thinwire import codecs
from thinwire.codecs import Codec, Subspace
from thinwire.collectives import AnyTransport, Ties
from thinwire.errors import ConfigError
from thinwire.models import GPT, GPT_SIZES, SIZES, GPTConfig, Llama, LlamaConfig
from thinwire.optim.build import Decay
from thinwire.optim.methods import Aux
from thinwire.optim.signs import Scale
from thinwire.pipeline.orders import stages_per_rank_of
from thinwire.wire import id_width

_GPT_VOCABULARY = 4096  # of GPTs, where the configuration names none


@dataclass(frozen=True)
class ModelConfig:
    """A LLaMA or a GPT. Zeros (and empty text) mean: as the size has it."""

    family: Literal["llama", "gpt"] = "llama"
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
    """Text to train on."""

    source: str = "stdlib"
    """stdlib (Python's own standard library), a .txt, .jsonl or .parquet file, a folder or glob of them, or hub:NAME"""
    text_column: str = "text"
    """of .jsonl, .parquet and hub sources"""
    val_tokens: int = 65_536
    """tokens of held-out documents to evaluate on"""


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
    """What crosses a boundary. `rank` or `factor` is needed for every codec but identity."""

    name: str = "identity"
    """identity, mapl, fixed or free"""
    wire_format: str = "bf16"
    """of the numbers: fp32, bf16 or fp16"""
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
    """emulated between replicas, as in 50mbit,20ms"""


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
    """sequences per optimizer step, over all accumulation steps and microbatches"""
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


@dataclass(frozen=True)
class Config:
    """A run, whole."""

    name: str = "run"
    """folder under `folder`"""
    folder: str = "runs"
    resume: bool = False
    """continue runs/<name> from its last checkpoint"""
    overwrite: bool = False
    """replace what is in runs/<name>"""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    dp: DataParallelConfig = field(default_factory=DataParallelConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def network(self) -> LlamaConfig | GPTConfig:
        """The model's sizes.

        Raises:
            ConfigError: an unknown size or sizes that do not fit together.
        """
        sizes = SIZES if self.model.family == "llama" else GPT_SIZES
        if self.model.size not in sizes:
            raise ConfigError(f"model size {self.model.size!r} of a {self.model.family}", ", ".join(sizes))
        options = {"vocab_size": _GPT_VOCABULARY, **sizes[self.model.size]}
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim"):
            if getattr(self.model, name):
                options[name] = getattr(self.model, name)
        options |= {"max_seq_len": self.model.seq_len, "tied_head": self.model.tied_head}
        try:
            return LlamaConfig(**options) if self.model.family == "llama" else GPTConfig(**options)
        except TypeError:
            raise ConfigError(
                f"model.num_kv_heads={self.model.num_kv_heads}, model.ffn_dim={self.model.ffn_dim} of a GPT",
                "neither", "leave them out, or set model.family=llama",
            ) from None  # fmt: skip
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def make_model(self) -> Llama | GPT:
        """Return the model, with whatever weights its constructor leaves."""
        network = self.network
        return Llama(network) if isinstance(network, LlamaConfig) else GPT(network)

    @property
    def microbatch_shape(self) -> tuple[int, int]:
        """`(B, T)` of one microbatch."""
        parts = self.train.accumulation * self.pipeline.microbatches * self.dp.replicas
        return self.train.batch_size // parts, self.model.seq_len

    @property
    def pipeline_ranks(self) -> int:
        """Processes of one replica."""
        return 1 if self.pipeline.emulate or self.pipeline.stages == 1 else self.pipeline.ranks

    @property
    def num_processes(self) -> int:
        """Processes of the whole run."""
        return self.pipeline_ranks * (1 if self.dp.emulate else self.dp.replicas)

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.model.seq_len

    def make_codec(self) -> Codec:
        """Return the codec; a `factor` is turned into a rank here.

        Raises:
            ConfigError: options that the codec does not take, or a factor that no rank reaches.
        """
        chosen, id_bytes = self.codec, id_width(self.network.vocab_size)
        if chosen.name == "identity":
            _refuse_subspace_options(chosen)
            return codecs.get("identity", wire_format=chosen.wire_format)
        if bool(chosen.rank) == bool(chosen.factor):
            raise ConfigError(
                f"codec {chosen.name} with rank {chosen.rank} and factor {chosen.factor:g}",
                "exactly one of codec.rank and codec.factor above zero",
                "set the other to 0",
            )
        options = {
            "wire_format": chosen.wire_format, "id_bytes": id_bytes, "anchor_rank": chosen.anchor_rank,
            "frame_gradient": chosen.frame_gradient, "init": chosen.init,
        }  # fmt: skip
        if chosen.rank:
            return codecs.get(chosen.name, rank=chosen.rank, **options)
        for rank in range(self.network.dim, 0, -1):
            codec = codecs.get(chosen.name, rank=rank, **options)
            if self.expected_factor(codec) >= chosen.factor:
                return codec
        raise ConfigError(f"codec factor {chosen.factor:g}", "a factor that rank 1 reaches", "lower codec.factor")

    def expected_factor(self, codec: Codec) -> float:
        """bf16 activations over what `codec` sends per step and direction, ids, headers and frames included."""
        batch, tokens = self.microbatch_shape
        dim = self.network.dim
        messages = self.pipeline.microbatches * self.train.accumulation
        sent = messages * codec.wire_bytes((batch, tokens, dim))
        if isinstance(codec, Subspace) and codec.frame != "frozen":
            sent += 4 * dim * codec.rank + 48
        return messages * batch * tokens * dim * 2 / sent


def _refuse_subspace_options(chosen: CodecConfig) -> None:
    """An option without effect is an error."""
    default = CodecConfig()
    for name in ("rank", "factor", "anchor_rank", "frame_gradient", "init"):
        if getattr(chosen, name) != getattr(default, name):
            raise ConfigError(
                f"codec.{name} with the identity codec", "wire_format only", "drop it or set codec.name=mapl"
            )
