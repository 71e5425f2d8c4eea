"""What the README shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(SNIPPETS[number], f"README snippet {number}", "exec"), {})


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 2


def test_every_command_shown_exists() -> None:
    from thinwire.cli import _COMMANDS
    from thinwire.train import recipes

    for command, word in re.findall(r"thinwire (train|eval|generate|report|demo|sweep) ?([a-z0-9-]*)", README):
        assert command in _COMMANDS
        if command in ("train", "sweep"):
            assert word in recipes.names()
