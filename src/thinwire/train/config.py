"""What a run is: frozen dataclasses, one per part. A recipe gives one; the command line overrides fields."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire import codecs
from thinwire.codecs import Codec, Subspace
from thinwire.errors import ConfigError
from thinwire.models import GPT, GPT_SIZES, SIZES, GPTConfig, Llama, LlamaConfig, ResNet, ResNetConfig
from thinwire.train.fields import (
    CodecConfig,
    DataConfig,
    DataParallelConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    TrainConfig,
)
from thinwire.wire import id_width

__all__ = [
    "CodecConfig",
    "Config",
    "DataConfig",
    "DataParallelConfig",
    "ModelConfig",
    "OptimConfig",
    "PipelineConfig",
    "TrainConfig",
]

_GPT_VOCABULARY = 4096  # of GPTs, where the configuration names none


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
        if self.is_pictures:
            raise ConfigError(f"a {self.model.family} among models of text", "llama or gpt")
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

    @property
    def is_pictures(self) -> bool:
        """Whether the run classifies pictures; else it predicts text."""
        return self.model.family.startswith("resnet")

    @property
    def unit(self) -> str:
        """What the run counts as `tokens`."""
        return "pictures" if self.is_pictures else "tokens"

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary; a run on pictures has none."""
        return 1 if self.is_pictures else self.network.vocab_size

    @property
    def dim(self) -> int:
        """Width of what crosses a boundary; a run on pictures has no boundary."""
        return 1 if self.is_pictures else self.network.dim

    def make_model(self) -> Llama | GPT | ResNet:
        """Return the model, with whatever weights its constructor leaves."""
        if self.is_pictures:
            return ResNet(ResNetConfig(depth=int(self.model.family[6:]), width=self.model.width))
        network = self.network
        return Llama(network) if isinstance(network, LlamaConfig) else GPT(network)

    @property
    def microbatch_shape(self) -> tuple[int, ...]:
        """`(B, T)` of one microbatch, or `(B, 3, 32, 32)` of pictures."""
        parts = self.train.accumulation * self.pipeline.microbatches * self.dp.replicas
        batch = self.train.batch_size // parts
        return (batch, 3, 32, 32) if self.is_pictures else (batch, self.model.seq_len)

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
        return self.train.batch_size * (1 if self.is_pictures else self.model.seq_len)

    def make_codec(self) -> Codec:
        """Return the codec; a `factor` is turned into a rank here.

        Raises:
            ConfigError: options that the codec does not take, or a factor that no rank reaches.
        """
        chosen, id_bytes = self.codec, id_width(self.vocab_size)
        if chosen.name == "identity":
            return codecs.get("identity", wire_format=chosen.wire_format, gradient_format=chosen.gradient_format)
        if chosen.name == "cut":
            return codecs.get("cut", id_bytes=id_bytes, anchor_rank=chosen.anchor_rank)
        if bool(chosen.rank) == bool(chosen.factor):
            raise ConfigError(
                f"codec {chosen.name} with rank {chosen.rank} and factor {chosen.factor:g}",
                "exactly one of codec.rank and codec.factor above zero",
                "set the other to 0",
            )
        options = {
            "wire_format": chosen.wire_format, "gradient_format": chosen.gradient_format, "id_bytes": id_bytes,
            "anchor_rank": chosen.anchor_rank, "frame_gradient": chosen.frame_gradient, "init": chosen.init,
        }  # fmt: skip
        if chosen.rank:
            return codecs.get(chosen.name, rank=chosen.rank, **options)
        for rank in range(self.dim, 0, -1):
            codec = codecs.get(chosen.name, rank=rank, **options)
            if self.expected_factor(codec) >= chosen.factor:
                return codec
        raise ConfigError(f"codec factor {chosen.factor:g}", "a factor that rank 1 reaches", "lower codec.factor")

    def expected_factor(self, codec: Codec) -> float:
        """bf16 activations over what `codec` sends per step and direction, ids, headers and frames included."""
        batch, tokens = self.microbatch_shape[:2]
        dim = self.dim
        messages = self.pipeline.microbatches * self.train.accumulation
        sent = messages * codec.wire_bytes((batch, tokens, dim))
        if isinstance(codec, Subspace) and codec.frame != "frozen":
            sent += 4 * dim * codec.rank + 48
        return messages * batch * tokens * dim * 2 / sent
