"""A trained run in one process: evaluation and generation through the twin, boundaries and all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.pipeline import Twin
from thinwire.train import checkpoint
from thinwire.train.build import Parts, build
from thinwire.train.config import Config, from_dict
from thinwire.train.evaluate import Validation
from thinwire.train.place import Place, join


def restore(run: Path) -> tuple[Config, Place, Parts]:
    """Load a run's newest checkpoint into one process.

    Raises:
        ConfigError: no run there, no checkpoint yet, or one that does not fit.
    """
    config = replace(_read_config(run), folder=str(run.parent), name=run.name)
    config = replace(config, pipeline=replace(config.pipeline, emulate=True))
    newest = checkpoint.latest(run)
    if newest is None:
        raise ConfigError(f"run {run} has no checkpoint", remedy="let it train to its first one")
    place = join(config)
    parts = build(config, place)
    values = checkpoint.tensors(parts.stages, parts.engine.sync, (), place)
    values.pop(f"rng/{place.rank}")
    checkpoint.load(newest, values, place)
    parts.engine.sync.publish(everything=True)
    return config, place, parts


def evaluate(run: Path) -> dict[str, float]:
    """Return the validation loss, perplexity and bits per byte of a run's newest checkpoint."""
    config, place, parts = restore(run)
    return Validation(config, parts.data, place).run(parts.engine)


def generate(run: Path, prompt: str, num_tokens: int, temperature: float, seed: int) -> str:
    """Return `prompt` continued by `num_tokens` sampled tokens.

    Raises:
        ConfigError: an empty prompt, a negative temperature, or no tokens to add.
    """
    if not prompt or temperature < 0 or num_tokens < 1:
        raise ConfigError(
            f"prompt {prompt!r}, temperature {temperature:g}, {num_tokens} tokens",
            "some text, a temperature of 0 or more, a token or more",
        )
    config, place, parts = restore(run)
    tokenizer = parts.data.tokenizer
    ids: list[int] = tokenizer.encode(prompt).tolist()
    generator = torch.Generator().manual_seed(seed)
    assert isinstance(parts.engine, Twin)
    for _ in range(num_tokens):
        window = torch.tensor([ids[-config.model.seq_len :]], device=place.device)
        with torch.no_grad():
            logits = parts.engine.forward(window)[0, -1].float().cpu()
        ids.append(_sample(logits, temperature, generator))
    text: str = tokenizer.decode(ids)
    return text


def _sample(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(torch.softmax(logits_V / temperature, -1), 1, generator=generator))


def _read_config(run: Path) -> Config:
    try:
        plain: dict[str, Any] = json.loads((run / "config.json").read_text())
    except OSError as error:
        raise ConfigError(f"{run} is no run folder ({error.strerror})", "a folder that thinwire train wrote") from None
    except ValueError as error:
        raise ConfigError(f"{run / 'config.json'} is damaged ({error})", "a run's own config.json") from None
    return from_dict(plain)
