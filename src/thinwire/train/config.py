"""What a run is: frozen dataclasses, one per part. A recipe gives one; the command line overrides fields."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from thinwire import codecs
from thinwire.codecs import Codec, Subspace
from thinwire.errors import ConfigError
from thinwire.models import SIZES, LlamaConfig
from thinwire.optim.build import Decay
from thinwire.pipeline.orders import stages_per_rank_of
from thinwire.wire import id_width


@dataclass(frozen=True)
class ModelConfig:
    """A LLaMA. Zeros (and empty text) mean: as the size has it."""

    size: str = "tiny"
    """one of tiny, 10m, 150m, 500m, 1b"""
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
class OptimConfig:
    """Muon on hidden matrices, AdamW on the rest, SPEL on frames."""

    lr: float = 0.02
    """of Muon"""
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
    codec: CodecConfig = field(default_factory=CodecConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def llama(self) -> LlamaConfig:
        """The model's sizes.

        Raises:
            ConfigError: an unknown size or sizes that do not fit together.
        """
        if self.model.size not in SIZES:
            raise ConfigError(f"model size {self.model.size!r}", ", ".join(SIZES))
        options = dict(SIZES[self.model.size])
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim"):
            if getattr(self.model, name):
                options[name] = getattr(self.model, name)
        try:
            return LlamaConfig(**options, max_seq_len=self.model.seq_len, tied_head=self.model.tied_head)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def microbatch_shape(self) -> tuple[int, int]:
        """`(B, T)` of one microbatch."""
        return self.train.batch_size // (self.train.accumulation * self.pipeline.microbatches), self.model.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.model.seq_len

    def make_codec(self) -> Codec:
        """Return the codec; a `factor` is turned into a rank here.

        Raises:
            ConfigError: options that the codec does not take, or a factor that no rank reaches.
        """
        chosen, id_bytes = self.codec, id_width(self.llama.vocab_size)
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
        for rank in range(self.llama.dim, 0, -1):
            codec = codecs.get(chosen.name, rank=rank, **options)
            if self.expected_factor(codec) >= chosen.factor:
                return codec
        raise ConfigError(f"codec factor {chosen.factor:g}", "a factor that rank 1 reaches", "lower codec.factor")

    def expected_factor(self, codec: Codec) -> float:
        """bf16 activations over what `codec` sends per step and direction, ids, headers and frames included."""
        batch, tokens = self.microbatch_shape
        dim = self.llama.dim
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


def to_dict(config: Config) -> dict[str, Any]:
    """As JSON has it."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_dict(plain: dict[str, Any]) -> Config:
    """The inverse of `to_dict`.

    Raises:
        ConfigError: fields that this version does not know.
    """
    parts: dict[str, Any] = {}
    kinds: dict[str, Any] = {
        "model": ModelConfig, "data": DataConfig, "pipeline": PipelineConfig,
        "codec": CodecConfig, "optim": OptimConfig, "train": TrainConfig,
    }  # fmt: skip
    try:
        for name, value in plain.items():
            if name in kinds:
                value = kinds[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
            parts[name] = value
        return Config(**parts)
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"configuration with unknown fields ({error})", remedy="use the version that wrote it"
        ) from None


def flat(plain: dict[str, Any]) -> dict[str, Any]:
    """Fields by their dotted names."""
    result: dict[str, Any] = {}
    for name, value in plain.items():
        result |= {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
    return result


def run_digest(config: Config) -> str:
    """What all ranks of a run must agree on: everything but the port."""
    plain = to_dict(config)
    plain["pipeline"].pop("port")
    return _digest(plain)


def layout_digest(config: Config) -> str:
    """What must agree for an exact resume: everything but names, intervals, links, ports and the number of steps."""
    plain = to_dict(config)
    for name in ("name", "folder", "resume", "overwrite"):
        plain.pop(name)
    for name in ("link", "timeout_s", "port"):
        plain["pipeline"].pop(name)
    for name in ("steps", "eval_every", "checkpoint_every", "keep_checkpoints", "threads"):
        plain["train"].pop(name)
    return _digest(plain)


def _digest(plain: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8).hexdigest()
