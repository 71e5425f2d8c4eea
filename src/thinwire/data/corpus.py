"""Where text comes from: the embedded corpus, local files, or a streamed hub data set.

Validation text is held out by whole documents under a rule on the document's name alone, so it is the same
on every machine and for every seed.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, one_line

EMBEDDED = "stdlib"
HUB_PREFIX = "hub:"
DEFAULT_COLUMN = "text"
HELD_OUT_ONE_IN = 20
SAMPLE_BYTES = 32 << 20

# Tests of the library repeat its text; packages and generated build data differ between machines.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


@dataclass(frozen=True)
class Document:
    """A text and its name, which is relative to the source and therefore the same on every machine."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Training and held-out documents; `digest` (32 hex digits) changes with any name or text."""

    train: list[Document]
    validation: list[Document]
    digest: str


def load_corpus(source: str, *, text_column: str = DEFAULT_COLUMN) -> Corpus:
    """Loads a whole corpus into memory.

    `source` is "stdlib" (the source text of Python's own library), a .txt, .jsonl or .parquet file, a folder
    or glob of them, or "hub:NAME[:CONFIG]", of which only the first 32 MiB are loaded (`stream_hub` gives it
    all). `text_column` names the text in JSON lines, parquet and hub rows. Anything unusable raises
    ConfigError.
    """
    if source.startswith(HUB_PREFIX):
        return _sample(source, text_column)
    found = _embedded_documents(text_column) if source == EMBEDDED else _local_documents(source, text_column)
    documents = [document for document in found if document.text]
    if not documents:
        raise ConfigError(f"data source {source!r} is empty", "at least one document", "give a source with text")
    return _corpus(documents)


def is_held_out(name: str) -> bool:
    """Whether the document of this name is for validation: one in 20, by a hash of the name."""
    return _name_hash(name) % HELD_OUT_ONE_IN == 0


def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _corpus(documents: list[Document]) -> Corpus:
    train, validation = _split(documents)
    digest = hashlib.blake2b(digest_size=16)
    for role, part in (("train", train), ("validation", validation)):
        for document in part:
            content = document.text.encode()
            digest.update(f"{role}\0{document.name}\0{len(content)}\0".encode())
            digest.update(content)
    return Corpus(train, validation, digest.hexdigest())


def _split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training, validation); a few documents give the one of lowest hash, a single one its last 5 %."""
    if len(documents) == 1:
        return _cut_tail(documents[0])
    names = {document.name for document in documents if is_held_out(document.name)}
    if len(names) in (0, len(documents)):
        names = {min((document.name for document in documents), key=_name_hash)}
    train = [document for document in documents if document.name not in names]
    return train, [document for document in documents if document.name in names]


def _cut_tail(document: Document) -> tuple[list[Document], list[Document]]:
    text = document.text
    cut = len(text) - max(1, len(text) // HELD_OUT_ONE_IN)
    line_end = text.find("\n", cut) + 1
    cut = line_end if 0 < line_end < len(text) else cut
    return [Document(document.name, text[:cut])], [Document(f"{document.name}[end]", text[cut:])]


def _embedded_documents(text_column: str) -> Iterator[Document]:
    _refuse_column(EMBEDDED, text_column)
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(_python_files(root), key=lambda path: path.relative_to(root).as_posix()):
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        yield Document(path.relative_to(root).as_posix(), text)


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if _is_portable(name)]
        yield from (Path(folder, name) for name in names if name.endswith(".py") and _is_portable(name))


def _is_portable(name: str) -> bool:
    return name not in _SKIPPED_FOLDERS and not name.startswith(_SKIPPED_PREFIXES)


def _local_documents(source: str, text_column: str) -> Iterator[Document]:
    files = _local_files(source)
    if all(path.suffix == ".txt" for _, path in files):
        _refuse_column(source, text_column)
    for name, path in files:
        yield from _READERS[path.suffix](name, path, text_column)


def _refuse_column(source: str, text_column: str) -> None:
    if text_column != DEFAULT_COLUMN:
        given = f"text_column={text_column!r}: {source!r} has no columns"
        raise ConfigError(given, "the default", "remove it")


def _local_files(source: str) -> list[tuple[str, Path]]:
    """(name, path) of every file of a source, sorted by name."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.suffix in _READERS and file.is_file()]
    else:
        found = [path] if path.exists() else [Path(name) for name in glob.glob(str(path), recursive=True)]
    if not found:
        raise ConfigError(
            f"data source {source!r} names no file",
            f"{EMBEDDED!r}, {HUB_PREFIX}NAME, or files, a folder or a glob of {_suffixes()}",
            "correct the path",
        )
    for file in found:
        if file.suffix not in _READERS:
            raise ConfigError(f"{file}: unknown kind of file", _suffixes(), "convert or rename it")
    root = os.path.commonpath([file.parent for file in found])
    return sorted((Path(os.path.relpath(file, root)).as_posix(), file) for file in found)


def _suffixes() -> str:
    return ", ".join(_READERS)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        remedy = "check that it is a file and that you may read it"
        raise ConfigError(f"{path}: cannot be read ({error.strerror})", "a readable file", remedy) from error


def _read_text(path: Path) -> str:
    content = _read_file(path)
    position = content.find(b"\0")
    if position < 0:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            position = error.start
    given = f"{path}: not text (byte {position} is zero or not UTF-8)"
    raise ConfigError(given, "UTF-8 text", "convert it or leave it out")


def _txt_documents(name: str, path: Path, text_column: str) -> Iterator[Document]:
    yield Document(name, _read_text(path))


def _jsonl_documents(name: str, path: Path, text_column: str) -> Iterator[Document]:
    for index, line in enumerate(_read_text(path).split("\n")):
        if not line.strip():
            continue
        place = f"{path}: line {index + 1}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{place}: not JSON ({error})", "one object per line", "repair the line") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: not an object", "one object per line", "repair the line")
        yield Document(f"{name}#{index}", _row_text(place, row, text_column))


def _parquet_documents(name: str, path: Path, text_column: str) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = _read_file(path)
    if not content:
        return
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        _require_column(str(path), text_column, file.schema_arrow.names)
        values = file.read(columns=[text_column]).column(0).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not parquet, or damaged", "a parquet file", "write it again") from error
    for index, value in enumerate(values):
        text = _row_text(f"{path}: row {index}", {text_column: value}, text_column)
        yield Document(f"{name}#{index}", text)


def _require_column(place: str, column: str, columns: Iterable[str]) -> None:
    if column not in columns:
        raise ConfigError(f"{place}: no column {column!r}", ", ".join(columns), "set text_column to one of them")


def _row_text(place: str, row: dict[str, Any], column: str) -> str:
    """The text of a row; null counts as empty."""
    _require_column(place, column, row)
    text = "" if row[column] is None else row[column]
    if not isinstance(text, str):
        given = f"{place}: column {column!r} is {type(text).__name__}"
        raise ConfigError(given, "text", "set text_column to a column of text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: half a surrogate pair", "Unicode text", "repair the text") from error
    return text


_READERS: dict[str, Callable[[str, Path, str], Iterator[Document]]] = {
    ".txt": _txt_documents,
    ".jsonl": _jsonl_documents,
    ".parquet": _parquet_documents,
}


def hub_digest(source: str, text_column: str) -> str:
    """Digest of the name of a hub data set, so that its cache is found without the network."""
    return hashlib.blake2b(f"{source}\0{text_column}".encode(), digest_size=16).hexdigest()


def stream_hub(source: str, *, text_column: str = DEFAULT_COLUMN, skip: int = 0) -> Iterator[Document]:
    """Documents of the training split of "hub:NAME[:CONFIG]", in its order, without the first `skip`.

    Nothing but the current shard is in memory. Held-out documents are among them; `is_held_out(name)` tells.
    """
    name, _, config = source.removeprefix(HUB_PREFIX).partition(":")
    try:
        rows = _hub_module().load_dataset(name, config or None, split="train", streaming=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source}: {one_line(error)}", "hub:NAME[:CONFIG] of a data set", "check it and the network"
        ) from error
    for index, row in enumerate(rows.skip(skip) if skip else rows, start=skip):
        yield Document(f"{name}#{index}", _row_text(f"{source}: row {index}", row, text_column))


def _hub_module() -> Any:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        remedy = "pip install 'thinwire[hub]'"
        raise ConfigError("a hub data set needs the `datasets` package", "local files without it", remedy) from error


def _sample(source: str, text_column: str) -> Corpus:
    documents, size = [], 0
    for document in stream_hub(source, text_column=text_column):
        documents += [document] if document.text else []
        size += len(document.text)
        if size >= SAMPLE_BYTES:
            break
    if len(documents) < 2:
        raise ConfigError(f"{source}: fewer than two documents", "a data set of many", "use a local file instead")
    train, validation = _split(documents)
    return Corpus(train, validation, hub_digest(source, text_column))
