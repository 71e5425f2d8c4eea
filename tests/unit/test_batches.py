"""Tokenizer, cache and batches: lossless, exact in bytes, deterministic, exact after a resume."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from thinwire.data import batches as batches_module
from thinwire.data import tokenizer as tokenizer_module
from thinwire.data.batches import (
    Batches,
    StreamBatches,
    TokenData,
    bits_per_byte,
    prepare,
    validation_windows,
)
from thinwire.data.corpus import Corpus, Document, is_held_out, load_corpus
from thinwire.data.tokenizer import Tokenizer, cache_dir, train_or_load
from thinwire.errors import ConfigError

VOCABULARY = 300
WORDS = ["wire", "thin", "frame", "vote", "anchor", "größe", "def f(x):\n    return x", "日本", "<|endoftext|>"]


def sentences(seed: int, count: int) -> str:
    words = random.Random(seed)
    return "\n".join(" ".join(words.choices(WORDS, k=9)) for _ in range(count)) + "\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": sentences(seed, 12)}) + "\n" for seed in range(80)))
    return str(path)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def data(source: str, cache: Path) -> TokenData:
    return prepare(source, VOCABULARY, cache=cache)


@pytest.mark.parametrize("text", ["", " a\t\n\r\n", "äöü 日本 🙂\0", "x<|endoftext|>y", sentences(99, 3), "a" * 999])
def test_encoding_loses_nothing_and_counts_bytes(data: TokenData, text: str) -> None:
    ids = data.tokenizer.encode(text)
    assert data.tokenizer.decode(ids) == text
    assert data.tokenizer.end_of_text not in ids
    assert data.tokenizer.token_bytes[ids].sum() == len(text.encode())


def test_every_document_is_there_and_ends(data: TokenData, source: str) -> None:
    corpus = load_corpus(source)
    for tokens, documents in ((data.train, corpus.train), (data.validation, corpus.validation)):
        ends = np.flatnonzero(tokens == data.tokenizer.end_of_text)
        assert len(ends) == len(documents) and ends[-1] == len(tokens) - 1
        texts = [data.tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1]]
        assert texts == [document.text for document in documents]
        size = sum(len(document.text.encode()) for document in documents)
        assert data.tokenizer.token_bytes[tokens].sum() == size


def test_long_documents_are_cut_without_loss(data: TokenData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 50)
    text = sentences(5, 40) + "x" * 333
    ids = np.concatenate(list(data.tokenizer.encode_documents([Document("a", text), Document("b", "end")])))
    assert (ids == data.tokenizer.end_of_text).sum() == 2
    assert data.tokenizer.decode(ids) == text + "end"


def test_training_is_deterministic(source: str, data: TokenData, tmp_path: Path) -> None:
    again = prepare(source, VOCABULARY, cache=tmp_path)
    assert again.digest == data.digest
    assert again.tokenizer._backend.to_str() == data.tokenizer._backend.to_str()
    assert np.array_equal(again.train, data.train)
    assert prepare(source, VOCABULARY - 1, cache=tmp_path).digest != data.digest
    assert not [path for path in tmp_path.rglob(".*")], "temporary files are gone"


def test_the_second_call_only_maps(source: str, data: TokenData, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("tokenised or trained again")

    monkeypatch.setattr(batches_module, "_flat", fail)
    monkeypatch.setattr(tokenizer_module, "_train", fail)
    again = prepare(source, VOCABULARY, cache=cache)
    assert isinstance(again.train, np.memmap) and again.train.dtype == np.uint16
    assert np.array_equal(again.train, data.train)


def test_tokenizer_saves_and_loads(data: TokenData, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    data.tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.vocab_size == VOCABULARY
    assert np.array_equal(loaded.encode("thin wire<|endoftext|>"), data.tokenizer.encode("thin wire<|endoftext|>"))
    path.write_text("{}")
    with pytest.raises(ConfigError, match="delete it"):
        Tokenizer.load(path)


def test_vocabularies_out_of_reach(tmp_path: Path) -> None:
    corpus = Corpus([Document("a", "thin wire " * 50)], [], "digest")
    with pytest.raises(ConfigError, match="at least 257"):
        train_or_load(corpus, 256, tmp_path)
    with pytest.raises(ConfigError, match=r"vocab_size=5000, but .* only 2\d\d tokens.*allowed: up to 2\d\d"):
        train_or_load(corpus, 5000, tmp_path)
    assert not list(tmp_path.iterdir())


def test_damaged_or_unwritable_cache(source: str, tmp_path: Path) -> None:
    data = prepare(source, VOCABULARY, cache=tmp_path / "cache")
    path = next((tmp_path / "cache").rglob("train-*.npy"))
    del data
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="damaged"):
        prepare(source, VOCABULARY, cache=tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="THINWIRE_CACHE"):
        prepare(source, VOCABULARY, cache=tmp_path / "file")


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("THINWIRE_CACHE", raising=False)
    assert cache_dir() == Path("/x/thinwire")
    monkeypatch.setenv("THINWIRE_CACHE", "/y")
    assert cache_dir() == Path("/y")
    monkeypatch.delenv("THINWIRE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "thinwire"


def counting(num_tokens: int) -> Any:
    return np.arange(num_tokens, dtype=np.uint32)


def test_an_epoch_has_every_target_once() -> None:
    batches = Batches(counting(7 * 12 + 1), seq_len=7, batch_size=4, seed=1)
    windows = torch.cat([batches.next() for _ in range(3)])
    assert windows.dtype == torch.int64 and windows.shape == (12, 8)
    assert torch.equal(windows[:, 1:].flatten().sort().values, torch.arange(1, 85))
    assert not torch.equal(windows[:, 0], windows[:, 0].sort().values)
    second = torch.cat([batches.next() for _ in range(3)])
    assert not torch.equal(second, windows), "a new order in each epoch"
    assert torch.equal(second[:, 0].sort().values, windows[:, 0].sort().values)


def test_the_order_depends_on_the_seed_alone() -> None:
    def rows(batch_size: int, seed: int) -> torch.Tensor:
        batches = Batches(counting(100), 7, batch_size, seed)
        return torch.cat([batches.next() for _ in range(24 // batch_size)])

    assert torch.equal(rows(2, 5), rows(2, 5))
    assert torch.equal(rows(2, 5), rows(6, 5)), "the batch size only groups"
    assert not torch.equal(rows(2, 5), rows(2, 6))


def stream(data: TokenData, opened: list[int] | None = None, count: int = 25, **options: Any) -> StreamBatches:
    def documents(skip: int) -> Iterator[Document]:
        (opened if opened is not None else []).append(skip)
        for index in range(skip, count):
            yield Document(f"set#{index}", sentences(index, 2) if index % 5 else "")

    options = {"seq_len": 16, "batch_size": 3, "seed": 2, "block_documents": 4, **options}
    return StreamBatches(documents, data.tokenizer, **options)


@pytest.mark.parametrize("kind", ["mapped", "streamed"])
@pytest.mark.parametrize("taken", [0, 1, 5, 40])
def test_resume_is_exact(data: TokenData, kind: str, taken: int) -> None:
    def make() -> Batches | StreamBatches:
        return Batches(data.train, 64, 3, seed=2) if kind == "mapped" else stream(data)

    batches = make()
    for _ in range(taken):
        batches.next()
    state = json.loads(json.dumps(batches.state_dict()))
    expected = [batches.next() for _ in range(30)]
    resumed = make()
    resumed.load_state_dict(state)
    assert all(torch.equal(resumed.next(), batch) for batch in expected)
    assert resumed.state_dict() == batches.state_dict()


def test_a_stream_skips_on_resume_and_leaves_validation_out(data: TokenData) -> None:
    opened: list[int] = []
    batches = stream(data, opened)
    while batches.state_dict()["first"] < 12:
        batches.next()
    resumed = stream(data, opened)
    resumed.load_state_dict(batches.state_dict())
    resumed.next()
    assert opened == [0, 12]
    while batches.state_dict()["epoch"] < 2:
        batches.next()
    assert opened == [0, 12, 0, 0], "each pass opens the stream anew"
    held_out = [index for index in range(200) if is_held_out(f"set#{index}")]
    only_held_out = StreamBatches(
        lambda skip: iter([Document(f"set#{index}", sentences(index, 30)) for index in held_out]),
        data.tokenizer,
        seq_len=16,
        batch_size=1,
        seed=0,
    )
    with pytest.raises(ConfigError, match="without one window of seq_len=16"):
        only_held_out.next()


@pytest.mark.parametrize("kind", ["mapped", "streamed"])
def test_the_position_of_other_data_is_refused(data: TokenData, kind: str) -> None:
    def make(seed: int) -> Batches | StreamBatches:
        return Batches(data.train, 64, 3, seed) if kind == "mapped" else stream(data, seed=seed)

    with pytest.raises(ConfigError, match="seed=1, but this run has 2"):
        make(2).load_state_dict(make(1).state_dict())
    with pytest.raises(ConfigError, match="data position with"):
        make(2).load_state_dict({"windows": 3})


@pytest.mark.parametrize(
    ("num_tokens", "seq_len", "batch_size", "message"),
    [
        (28, 7, 4, "28 tokens.*at least 29 tokens"),
        (0, 7, 1, "0 tokens"),
        (99, 0, 1, "seq_len=0"),
        (99, 7, 0, "batch_size=0"),
    ],
)
def test_too_short_or_too_small(num_tokens: int, seq_len: int, batch_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Batches(counting(num_tokens), seq_len, batch_size, 0)


def test_validation_windows() -> None:
    windows = validation_windows(counting(100), 7, 25)
    assert torch.equal(windows[:, 1:].flatten(), torch.arange(1, 22))
    assert len(validation_windows(counting(100), 7, 10**9)) == 14
    for num_tokens, most in ((7, 100), (100, 6)):
        with pytest.raises(ConfigError, match="held-out tokens"):
            validation_windows(counting(num_tokens), 7, most)


def test_bits_per_byte() -> None:
    assert bits_per_byte(8 * math.log(2) * 10, 10) == pytest.approx(8.0), "uniform over bytes"


def test_hub_sample_is_cached_and_training_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": sentences(seed, 12)} for seed in range(60)]
    calls: list[str] = []

    class Rows(list[dict[str, str]]):
        def skip(self, count: int) -> list[dict[str, str]]:
            return self[count:]

    def load_dataset(name: str, *args: Any, **options: Any) -> Rows:
        calls.append(name)
        return Rows(rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    first = prepare("hub:set", VOCABULARY, cache=tmp_path)
    second = prepare("hub:set", VOCABULARY, cache=tmp_path)
    assert calls == ["set"] and first.digest == second.digest
    assert len(second.train) == 0 and len(second.validation) > 0
    batches = second.batches(16, 2, seed=0)
    assert isinstance(batches, StreamBatches) and batches.next().shape == (2, 17)


def test_token_data_gives_batches(data: TokenData) -> None:
    batches = data.batches(32, 4, seed=0)
    assert isinstance(batches, Batches) and batches.next().max() < VOCABULARY
