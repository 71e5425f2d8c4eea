"""The demonstration: one model, one text, one seed, one budget, two wires."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from thinwire.train import recipes
from thinwire.train.launch import train

RUNS = {"bf16": "demo-uncompressed", "mapl-8x": "demo-mapl"}


def demo(folder: str, steps: int = 0) -> list[Path]:
    """Train both recipes under `folder`, replacing what an earlier demonstration left; returns the run folders.

    Args:
        steps: of each run; 0: the recipe's.
    """
    runs = []
    for name, recipe in RUNS.items():
        config = replace(recipes.get(recipe), folder=folder, name=name, overwrite=True)
        if steps:
            config = replace(config, train=replace(config.train, steps=steps))
        train(config)
        runs.append(Path(folder) / name)
    return runs
