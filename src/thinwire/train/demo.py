"""The demonstration: one model, one text, one seed, one budget, two wires."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from thinwire.train import recipes
from thinwire.train.launch import train

RUNS = {"bf16": "demo-uncompressed", "mapl-8x": "demo-mapl"}


def demo(folder: str, steps: int = 0) -> list[Path]:
    """Train both recipes under `folder`; returns the run folders.

    Results of an earlier demonstration stay until the new ones are complete.

    Args:
        steps: of each run; 0: the recipe's.
    """
    fresh = Path(folder) / "in-progress"
    for name, recipe in RUNS.items():
        config = replace(recipes.get(recipe), folder=str(fresh), name=name, overwrite=True)
        if steps:
            config = replace(config, train=replace(config.train, steps=steps))
        train(config)
    for name in RUNS:
        shutil.rmtree(Path(folder) / name, ignore_errors=True)
        (fresh / name).rename(Path(folder) / name)
    shutil.rmtree(fresh, ignore_errors=True)
    return [Path(folder) / name for name in RUNS]
