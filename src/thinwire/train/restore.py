"""A trained run in one process: evaluation and generation through the twin, boundaries and all."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.data import Tokenizer
from thinwire.errors import ConfigError
from thinwire.pipeline import Twin
from thinwire.train import checkpoint
from thinwire.train.build import build_engine, build_stages
from thinwire.train.config import Config
from thinwire.train.evaluate import Validation
from thinwire.train.place import Place, join
from thinwire.train.stored import from_dict
from thinwire.train.validate import validate
from thinwire.train.work import load


def restore(run: Path) -> tuple[Config, Place, Twin, dict[str, Any]]:
    """Load a run's newest checkpoint into one process; returns its engine and what the checkpoint says of itself.

    Raises:
        ConfigError: no run there, no checkpoint yet, or one that does not fit or is damaged.
    """
    config = replace(read_config(run), folder=str(run.parent), name=run.name)
    alone = replace(config.pipeline, emulate=True, port=0)
    config = replace(config, pipeline=alone, dp=replace(config.dp, emulate=True, link="none"))
    validate(config)
    newest = checkpoint.latest(run)
    if newest is None:
        raise ConfigError(f"run {run} has no checkpoint", remedy="let it train to its first one")
    place = join(config)
    stages, _ = build_stages(config, place)
    engine = build_engine(config, place, stages)
    assert isinstance(engine, Twin)
    values = checkpoint.tensors(stages, engine.sync, (), place)
    values.pop(f"rng/{place.rank}")
    checkpoint.load(newest, values, place)
    engine.sync.publish(everything=True)
    return config, place, engine, checkpoint.read_state(newest)


def evaluate(run: Path) -> dict[str, float]:
    """Return what `Validation` measures of a run's newest checkpoint.

    Raises:
        ConfigError: as `restore`; or the data are not what the run was trained on.
    """
    config, place, engine, state = restore(run)
    work = load(config)
    if work.digest != state["data_digest"]:
        raise ConfigError(
            f"data {config.data.source!r} is not what {run} was trained on",
            "the same data",
            "restore it, or train anew",
        )
    return Validation(config, work, place).run(engine)


def generate(run: Path, prompt: str, num_tokens: int, temperature: float, seed: int) -> str:
    """Return `prompt` continued by `num_tokens` sampled tokens.

    Raises:
        ConfigError: an empty prompt, a temperature or seed out of range, or no tokens to add.
    """
    usable = prompt and _is_text(prompt) and num_tokens >= 1 and 0 <= seed < 1 << 63
    if not usable or not (temperature == 0 or 1e-3 <= temperature < math.inf):
        raise ConfigError(
            f"prompt {prompt[:40]!r}, temperature {temperature:g}, {num_tokens} tokens, seed {seed}",
            "some text, a temperature of 0 or from 0.001 on, a token or more, a seed from 0 to 2^63",
        )
    config, place, engine, _ = restore(run)
    if config.is_pictures:
        raise ConfigError(f"text from {run}, a {config.model.family}", "a run of a model of text")
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    ids: list[int] = tokenizer.encode(prompt).tolist()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        window = torch.tensor([ids[-config.model.seq_len :]], device=place.device)
        with torch.no_grad():
            logits = engine.forward(window)[0, -1].float().cpu()
        ids.append(_sample(logits, temperature, generator))
    text: str = tokenizer.decode(ids)
    return text


def _is_text(prompt: str) -> bool:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sample(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(torch.softmax(logits_V / temperature, -1), 1, generator=generator))


def read_config(run: Path) -> Config:
    """Return the configuration in a run folder.

    Raises:
        ConfigError: no run there, or a damaged or foreign configuration.
    """
    try:
        plain: dict[str, Any] = json.loads((run / "config.json").read_text())
    except OSError as error:
        raise ConfigError(f"{run} is no run folder ({error.strerror})", "a folder that thinwire train wrote") from None
    except ValueError as error:
        raise ConfigError(f"{run / 'config.json'} is damaged ({error})", "a run's own config.json") from None
    return from_dict(plain)
