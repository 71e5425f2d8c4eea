"""The tree's shape: imports point upward, files are short, and importing costs and needs little."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "thinwire"

ORDER = (
    "errors",
    # mathematics
    "polar",
    "stiefel",
    "bits",
    "quant",
    # the wire
    "link",
    "wire",
    "codecs",
    # gradient traffic
    "collectives",
    "optim",
    # pipeline
    "pipeline",
    # models and data
    "models",
    "data",
    # running and measuring
    "plan",
    "train",
    "report",
    "sweep",
    "cli",
    "__init__",
    "__main__",
)

# Layers that may import less than the order allows: the layers left to them, and why.
NARROWER = {
    "models": ((), "a model file serves every method, so it knows none of ours"),
    "data": (("errors",), "data is the same for every method and every layout"),
}

# Names of the root package that a module may import; any other name hides the layer it comes from.
ROOT_NAMES = {"__version__"}

FORBIDDEN_STEMS = {"utils", "util", "common", "helpers", "helper"}
MAX_LINES = 300
HEAVY = ("torch", "numpy", "matplotlib", "tensorboard", "tokenizers", "pyarrow", "tyro", "rich")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = [module_name(path) for path in SOURCES]
LAYERS = {layer_of(path) for path in SOURCES}


def absolute_base(node: ast.ImportFrom, path: Path) -> str:
    """The module that a `from ... import` names, relative dots resolved against the file at `path`."""
    if not node.level:
        return node.module or ""
    package = path.relative_to(PACKAGE.parent).parent.parts
    base = package[: len(package) - node.level + 1]
    return ".".join((*base, node.module) if node.module else base)


def imported_layers(source: str, path: Path, layers: set[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, layer) of every import of thinwire in the file; another root name as `thinwire:NAME`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, path)
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            root, _, rest = target.partition(".")
            if root == "thinwire":
                head = rest.partition(".")[0]
                yield node.lineno, head if head in layers else f"thinwire:{head}"


def allowed_layers(layer: str) -> set[str]:
    if layer == "__init__":
        return set(ORDER)  # re-exports public names, lazily
    above = NARROWER[layer][0] if layer in NARROWER else ORDER[: ORDER.index(layer)]
    return {*above, layer, *(f"thinwire:{name}" for name in ROOT_NAMES)}


def violations(source: str, path: Path, layers: set[str]) -> list[str]:
    layer = layer_of(path)
    reason = f" ({NARROWER[layer][1]})" if layer in NARROWER else ""
    return [
        f"{path.relative_to(ROOT)}:{line}: {layer!r} imports {target!r}, which is not above it{reason}"
        for line, target in imported_layers(source, path, layers)
        if target not in allowed_layers(layer)
    ]


def test_every_layer_has_a_place_in_the_order() -> None:
    unknown = sorted(LAYERS - set(ORDER))
    assert not unknown, f"add {unknown} to ORDER in {Path(__file__).name}, above everything that imports it"


@pytest.mark.parametrize("path", SOURCES, ids=MODULES)
def test_imports_point_upward(path: Path) -> None:
    if layer_of(path) not in ORDER:
        pytest.skip("not in the order, which another test reports")
    found = violations(path.read_text(), path, LAYERS)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source", "is_allowed"),
    [
        ("wire.py", "from thinwire.errors import WireError", True),
        ("wire.py", "from .errors import WireError", True),
        ("wire.py", "from thinwire import __version__", True),
        ("wire.py", "import thinwire.codecs", False),
        ("wire.py", "from thinwire import codecs", False),
        ("wire.py", "from . import codecs", False),
        ("wire.py", "import thinwire", False),
        ("wire.py", "from thinwire import SignMuon", False),
        ("wire.py", "def f():\n    from thinwire.train import loop", False),
        ("wire.py", "if TYPE_CHECKING:\n    from thinwire.cli import main", False),
        ("codecs/__init__.py", "from . import base\nfrom .. import wire\nfrom .base import Codec", True),
        ("codecs/subspace.py", "from .base import Codec\nfrom ..wire import Ledger", True),
        ("codecs/subspace.py", "from ..pipeline import split", False),
        ("models/llama.py", "import torch\nfrom .gpt import GPT", True),
        ("models/llama.py", "from thinwire.errors import ConfigError", False),
        ("data/text.py", "from thinwire.errors import ConfigError", True),
        ("data/text.py", "from thinwire.wire import Ledger", False),
        ("__init__.py", "def __getattr__(name):\n    from thinwire.cli import main", True),
        ("__main__.py", "from thinwire.cli import main", True),
    ],
)
def test_the_checker_sees(file: str, source: str, is_allowed: bool) -> None:
    assert (violations(source, PACKAGE / file, set(ORDER)) == []) is is_allowed


def test_no_file_is_a_drawer_for_everything() -> None:
    files = [*PACKAGE.rglob("*"), *(ROOT / "tests").rglob("*")]
    found = [str(path.relative_to(ROOT)) for path in files if path.stem in FORBIDDEN_STEMS]
    assert not found, f"{found}: name each after what is in it"


def test_files_are_short() -> None:
    counts = {module_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    long = {name: count for name, count in counts.items() if count > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines, two ideas in one file? {long}"


def run_python(source: str, *args: str) -> str:
    """The standard output of a fresh interpreter that sees no CUDA device; its errors fail the test."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "-c", source, *args], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT_ALL = """
import importlib, json, sys
failures = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:  # SystemExit too: an import must not run the program
        failures[name] = repr(error)
import torch
effects = {"CUDA": torch.cuda.is_initialized(), "a process group": torch.distributed.is_initialized()}
print(json.dumps([failures, [name for name, started in effects.items() if started]]))
"""


def test_every_module_imports_without_cuda_and_starts_nothing() -> None:
    output = run_python(IMPORT_ALL, *MODULES)
    failures, started = json.loads(output)
    assert not failures
    assert not started, f"an import started {started}"


def test_importing_the_package_imports_nothing_heavy() -> None:
    loaded = run_python(
        "import sys, thinwire; print(*(name for name in sys.argv[1:] if name in sys.modules))", *HEAVY
    ).split()
    assert not loaded, f"`import thinwire` imported {loaded}"
