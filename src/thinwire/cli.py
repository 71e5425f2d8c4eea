"""The `thinwire` command."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thinwire import __version__
from thinwire.errors import ConfigError, ThinwireError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 2 wrong configuration, 3 a peer or the network failed."""
    from thinwire.train.failures import report_errors

    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return report_errors(lambda: _dispatch(words))
    except KeyboardInterrupt:
        print("thinwire: interrupted", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return
    if words[0] in ("-V", "--version"):
        print(__version__)
        return
    if words[0] not in _COMMANDS:
        near = difflib.get_close_matches(words[0], _COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else "see thinwire --help"
        raise ConfigError(f"command {words[0]!r}", ", ".join(_COMMANDS), hint)
    _COMMANDS[words[0]](words[1:])


def _help() -> str:
    lines = [f"thinwire {__version__}: trains neural networks over thin wires", "", "usage: thinwire COMMAND ...", ""]
    for name, function in _COMMANDS.items():
        lines.append(f"  {name:9} {(function.__doc__ or '').strip().splitlines()[0]}")
    return "\n".join([*lines, "", "thinwire COMMAND --help tells more."])


# --- train -----------------------------------------------------------------------------------------------------


def _train(words: list[str]) -> None:
    """Train a recipe: thinwire train RECIPE [--section.field value]."""
    from thinwire.train import recipes
    from thinwire.train.launch import train
    from thinwire.train.restore import read_config
    from thinwire.train.validate import settle

    if not words or words[0].startswith("-"):
        listing = "\n".join(f"  {name:18} {text}" for name, text in recipes.describe())
        print(f"usage: thinwire train RECIPE [--section.field value]\n\nrecipes:\n{listing}\n")
        if not words or words[0] not in ("-h", "--help"):
            raise ConfigError("no recipe", ", ".join(recipes.names()), "name one")
        print("thinwire train RECIPE --help lists all fields.")
        return
    config = parse_config(recipes.get(words[0]), words[1:])
    if config.resume:  # what the run was started with holds, where nothing else is said now
        saved = read_config(Path(config.folder) / config.name)
        config = parse_config(dataclasses.replace(saved, folder=config.folder, name=config.name), words[1:])
        config = dataclasses.replace(config, overwrite=False)
    settled, left_out = settle(config, given_fields(words[1:]))
    if left_out and os.environ.get("RANK", "0") == "0":
        print(f"{words[0]}'s {', '.join(left_out)} does not apply here and is left out", file=sys.stderr)
    train(settled)


def given_fields(words: Sequence[str]) -> set[str]:
    """The fields that a command line names: `section.field`."""
    flags = (word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--"))
    return {flag.replace(".no_", ".") for flag in flags}


def parse_config(default: Any, words: Sequence[str]) -> Any:
    """Return `default` with the fields that `words` override (`--section.field value`).

    Raises:
        ConfigError: an unknown field (with the nearest known one) or a value of the wrong kind, in one line.
    """
    import tyro

    flags = _flags(default)
    for word in words:
        name = word[2:].split("=")[0].replace("_", "-")
        if word.startswith("--") and name not in flags and name not in ("help", ""):
            near = difflib.get_close_matches(name, flags, 1)
            hint = f"did you mean --{near[0]}?" if near else "thinwire train RECIPE --help lists all fields"
            raise ConfigError(f"field {word.split('=')[0]}", "--section.field of the configuration", hint)
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(type(default), default=default, args=list(words), prog="thinwire train RECIPE")
    except SystemExit as stop:
        if not stop.code:
            raise
        text = re.sub(r"[\u2500-\u257f]+", " ", captured.getvalue())
        raise ConfigError(" ".join(text.split()), remedy="thinwire train RECIPE --help lists all fields") from None


def _flags(config: Any, prefix: str = "") -> set[str]:
    """All flags of a configuration, without dashes in front; booleans have a --no- form too."""
    found = set()
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        name = prefix + entry.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            found |= _flags(value, f"{name}.")
        else:
            found.add(name)
            if isinstance(value, bool):
                found.add(f"{prefix}no-{entry.name.replace('_', '-')}")
    return found


# --- the rest --------------------------------------------------------------------------------------------------


def _demo(words: list[str]) -> None:
    """Train twice over an emulated home connection, uncompressed and with MAPL at 8x, and compare."""
    parser = _parser("demo", _demo)
    parser.add_argument("--folder", default="runs/demo", help="where the runs and the picture go")
    parser.add_argument("--steps", type=int, default=0, help="steps of each run (default: the recipe's)")
    given = _parse(parser, words)
    from thinwire.report import show
    from thinwire.train.demo import demo

    show(demo(given.folder, given.steps), Path(given.folder) / "report.png")


def _eval(words: list[str]) -> None:
    """Evaluate a run's last checkpoint on held-out text or pictures, in one process."""
    parser = _parser("eval", _eval)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = _parse(parser, words)
    import json

    from thinwire.train.restore import evaluate

    result = evaluate(Path(given.run))
    print(json.dumps(result) if given.json else "  ".join(f"{name} {value:.4f}" for name, value in result.items()))


def _generate(words: list[str]) -> None:
    """Continue a prompt with a run's last checkpoint: thinwire generate RUN "prompt"."""
    parser = _parser("generate", _generate)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("prompt", help="text to continue")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0)
    given = _parse(parser, words)
    from thinwire.train.restore import generate

    print(generate(Path(given.run), given.prompt, given.tokens, given.temperature, given.seed))


def _report(words: list[str]) -> None:
    """Compare runs: tables here, and one picture of loss over data, time and bytes."""
    parser = _parser("report", _report)
    parser.add_argument("runs", nargs="+", help="run folders; the first is the reference of the speed-up")
    parser.add_argument("--picture", default="", help="where the picture goes (default: into the first run's folder)")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of the tables")
    given = _parse(parser, words)
    from thinwire.report import show

    picture = Path(given.picture) if given.picture else Path(given.runs[0]) / "report.png"
    show([Path(run) for run in given.runs], picture, as_json=given.json)


def _sweep(words: list[str]) -> None:
    """Run recipes x codecs x factors x seeds, each in one process, and make one table."""
    own, flags = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = _parser("sweep", _sweep)
    parser.add_argument("recipes", nargs="+", help="recipes; flags of `thinwire train` for all runs follow after --")
    parser.add_argument("--codecs", nargs="+", required=True, help="as in: identity cut mapl,anchor_rank=16")
    parser.add_argument("--factors", nargs="*", type=float, default=[], help="of every codec but identity and cut")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--folder", default="sweep", help="of results; a second call runs what is missing")
    given = _parse(parser, own)
    from rich.console import Console

    from thinwire.report.sweeps import sweep_table
    from thinwire.sweep import jobs, sweep

    todo = jobs(given.recipes, given.codecs, given.factors, given.seeds, flags)
    Console().print(sweep_table(sweep(todo, Path(given.folder), parallel=given.jobs)))


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ours."""

    def error(self, message: str) -> Any:
        raise ConfigError(message, remedy=f"see {self.prog} --help")


def _parser(name: str, function: Callable[[list[str]], None]) -> argparse.ArgumentParser:
    return _Parser(prog=f"thinwire {name}", description=(function.__doc__ or "").strip())


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    return parser.parse_args(words)


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": _demo,
    "train": _train,
    "eval": _eval,
    "generate": _generate,
    "report": _report,
    "sweep": _sweep,
}

__all__ = ["ThinwireError", "given_fields", "main", "parse_config"]
