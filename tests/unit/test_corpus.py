"""Where text comes from: every kind of source, the held-out rule, and every bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinwire.data import corpus as corpus_module
from thinwire.data.corpus import Corpus, is_held_out, load_corpus, stream_hub
from thinwire.errors import ConfigError

TEXTS = [f"text number {index}\nwith ünïcode\n" for index in range(60)]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def all_texts(corpus: Corpus) -> list[str]:
    return sorted(document.text for document in corpus.train + corpus.validation)


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_corpus("stdlib")


def test_the_embedded_corpus(stdlib: Corpus) -> None:
    names = {document.name for document in stdlib.train} | {document.name for document in stdlib.validation}
    assert "argparse.py" in names
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert all(is_held_out(document.name) for document in stdlib.validation)
    size = sum(len(document.text) for document in stdlib.train)
    held_out = sum(len(document.text) for document in stdlib.validation)
    assert size > 5e6 and 0.01 < held_out / size < 0.15


def test_the_embedded_corpus_is_always_the_same(stdlib: Corpus) -> None:
    assert load_corpus("stdlib") == stdlib
    assert [document.name for document in stdlib.train] == sorted(document.name for document in stdlib.train)


def test_unreadable_library_files_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    for name in ("a.py", "b.py", "pkg/c.py", "test/d.py", "_sysconfigdata_x.py", "note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    assert all_texts(load_corpus("stdlib")) == ["# a.py\n", "# b.py\n", "# pkg/c.py\n"]


def test_a_single_text_is_cut_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    text = "".join(f"line {index}\r\n" for index in range(1000))
    path.write_bytes(text.encode())
    corpus = load_corpus(str(path))
    assert corpus.train[0].text + corpus.validation[0].text == text
    assert corpus.train[0].text.endswith("\n")
    assert len(corpus.validation[0].text) == pytest.approx(0.05 * len(text), rel=0.05)


def test_a_single_line_is_cut_inside(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 200)
    assert len(load_corpus(str(path)).validation[0].text) == 10


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_documents(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    texts = [*TEXTS, "", None]
    if suffix == ".jsonl":
        write_jsonl(path, [{"body": text, "id": 1} for text in texts])
    else:
        pq.write_table(pa.table({"id": list(range(len(texts))), "body": texts}), path, row_group_size=7)
    corpus = load_corpus(str(path), text_column="body")
    assert all_texts(corpus) == sorted(TEXTS)
    assert 1 <= len(corpus.validation) <= 9
    assert corpus.train[0].name == f"rows{suffix}#0"
    assert {document.name for document in corpus.validation} == {
        f"rows{suffix}#{index}" for index in range(60) if is_held_out(f"rows{suffix}#{index}")
    }


@pytest.mark.parametrize("form", ["{}", "{}/**/*.txt", "{}/*"])
def test_folders_and_globs(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "texts"
    for index, text in enumerate(TEXTS):
        path = folder / (f"deep/{index}.txt" if form == "{}" else f"{index}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    corpus = load_corpus(form.format(folder))
    assert all_texts(corpus) == sorted(TEXTS)
    assert all(is_held_out(document.name) for document in corpus.validation)


def test_the_digest_knows_texts_and_not_places(tmp_path: Path) -> None:
    digests = []
    for folder, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(text)
        (tmp_path / folder / "y.txt").write_text("other")
        digests.append(load_corpus(str(tmp_path / folder)).digest)
    assert digests[0] == digests[1] != digests[2]


def test_few_documents_still_hold_one_out(tmp_path: Path) -> None:
    for count in (2, 3):
        rows = write_jsonl(tmp_path / "few.jsonl", [{"text": text} for text in TEXTS[:count]])
        corpus = load_corpus(str(rows))
        assert len(corpus.validation) == 1 and len(corpus.train) == count - 1


Make = Callable[[Path], str]


def written(name: str, content: bytes) -> Make:
    def make(folder: Path) -> str:
        (folder / name).write_bytes(content)
        return str(folder / name)

    return make


def parquet(columns: dict[str, list[Any]]) -> Make:
    def make(folder: Path) -> str:
        pq.write_table(pa.table(columns), folder / "a.parquet")
        return str(folder / "a.parquet")

    return make


BAD_INPUT: dict[str, tuple[Make, str]] = {
    "missing": (lambda folder: str(folder / "none.txt"), "names no file"),
    "glob without match": (lambda folder: str(folder / "*.txt"), "names no file"),
    "empty folder": (lambda folder: str(folder), "names no file"),
    "empty text": (written("a.txt", b""), "is empty"),
    "empty jsonl": (written("a.jsonl", b"\n\n"), "is empty"),
    "empty parquet file": (written("a.parquet", b""), "is empty"),
    "parquet without rows": (parquet({"text": []}), "is empty"),
    "zero byte": (written("a.txt", b"abc\0def"), "byte 3 is zero"),
    "not UTF-8": (written("a.txt", b"ab\xff"), "byte 2"),
    "binary jsonl": (written("a.jsonl", b"\x80\0"), "not text"),
    "not parquet": (written("a.parquet", b"PAR1 no"), "not parquet"),
    "unknown suffix": (written("a.csv", b"a"), "unknown kind.*allowed: .txt, .jsonl, .parquet"),
    "broken JSON": (written("a.jsonl", b'{"text": "a"}\n\n{"text": \n'), "line 3: not JSON"),
    "no object": (written("a.jsonl", b'"a"\n'), "line 1: not an object"),
    "no column in JSON": (written("a.jsonl", b'{"text": "a"}\n{"body": "a"}\n'), "line 2: no column 'text'.*body"),
    "no column in parquet": (parquet({"body": ["a"], "id": ["1"]}), "no column 'text'.*body, id"),
    "numbers in JSON": (written("a.jsonl", b'{"text": 3}\n'), "line 1: column 'text' is int"),
    "numbers in parquet": (parquet({"text": [3]}), "row 0: column 'text' is int"),
    "half a letter": (written("a.jsonl", b'{"text": "\\ud800"}\n'), "surrogate"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line(tmp_path: Path, case: str) -> None:
    make, message = BAD_INPUT[case]
    source = make(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load_corpus(source)
    assert "\n" not in str(caught.value) and source in str(caught.value) and "allowed: " in str(caught.value)


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")  # a test run by root may read everything

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"a\.txt: cannot be read \(Permission denied\)"):
        load_corpus(str(tmp_path / "a.txt"))


def test_a_column_without_effect_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for source in ("stdlib", str(tmp_path / "a.txt")):
        with pytest.raises(ConfigError, match="has no columns"):
            load_corpus(source, text_column="body")


class Rows:
    """A streamed data set that counts what was taken from it."""

    def __init__(self, taken: list[int], first: int = 0) -> None:
        self.taken, self.first = taken, first

    def skip(self, count: int) -> Rows:
        return Rows(self.taken, self.first + count)

    def __iter__(self) -> Iterator[dict[str, str]]:
        for index in range(self.first, 1000):
            self.taken.append(index)
            yield {"body": f"row {index}"}


def test_hub_rows_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    calls: list[tuple[Any, ...]] = []

    def load_dataset(*args: Any, **options: Any) -> Rows:
        calls.append((*args, options))
        return Rows(taken)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    rows = stream_hub("hub:who/what:en", text_column="body", skip=5)
    assert [next(rows).name, next(rows).text] == ["who/what#5", "row 6"]
    assert taken == [5, 6]
    assert calls == [("who/what", "en", {"split": "train", "streaming": True})]
    monkeypatch.setattr(corpus_module, "SAMPLE_BYTES", 700)
    sample = load_corpus("hub:who/what", text_column="body")
    assert 90 < len(sample.train) + len(sample.validation) < 120
    with pytest.raises(ConfigError, match=r"row 0: no column 'text'.*body"):
        load_corpus("hub:who/what")


def test_hub_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'thinwire\[hub\]'"):
        load_corpus("hub:who/what")

    def fail(*args: Any, **options: Any) -> None:
        raise FileNotFoundError("no such\ndata set")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    with pytest.raises(ConfigError, match="hub:who/what: no such data set"):
        load_corpus("hub:who/what")
