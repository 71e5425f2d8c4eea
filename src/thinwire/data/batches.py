"""From a source of text to batches of token ids, in an order that depends on the seed alone.

Every rank makes the same global batch and takes its share, so the order knows neither stages, replicas nor
microbatches. B batch, T tokens, N windows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray

from thinwire.data.corpus import (
    DEFAULT_COLUMN,
    HUB_PREFIX,
    Corpus,
    Document,
    hub_digest,
    is_held_out,
    load_corpus,
    stream_hub,
)
from thinwire.data.position import check_sizes, check_state, shuffled
from thinwire.data.tokenizer import Tokenizer, cache_dir, train_or_load, write_atomically
from thinwire.errors import ConfigError

Tokens = NDArray[np.unsignedinteger[Any]]
OpenDocuments = Callable[[int], Iterator[Document]]


@dataclass(frozen=True)
class TokenData:
    """Tokenised text: flat ids (N,), mapped from disk. `train` is empty when `open_documents` streams instead.

    `digest` (32 hex digits) changes with the text and with the tokenizer; all ranks must agree on it.
    """

    tokenizer: Tokenizer
    train: Tokens
    validation: Tokens
    digest: str
    open_documents: OpenDocuments | None = field(default=None, repr=False)

    def batches(self, seq_len: int, batch_size: int, seed: int) -> Batches | StreamBatches:
        """The training batches: windows of the mapped tokens, or of the stream."""
        if self.open_documents is not None:
            return StreamBatches(self.open_documents, self.tokenizer, seq_len, batch_size, seed)
        return Batches(self.train, seq_len, batch_size, seed)


def prepare(source: str, vocab_size: int, *, cache: Path | None = None, text_column: str = DEFAULT_COLUMN) -> TokenData:
    """Tokenises a source (see `load_corpus`) once per cache; processes that ask together wait for the first.

    Of a hub data set the cache keeps the tokenizer and the held-out documents of its first 32 MiB; training text
    is streamed.
    """
    cache = cache or cache_dir()
    if source.startswith(HUB_PREFIX):
        digest = hub_digest(source, text_column)
        load: Callable[[], Corpus] = partial(load_corpus, source, text_column=text_column)
        stream = partial(_open_hub, source, text_column)
    else:
        corpus = load_corpus(source, text_column=text_column)
        digest, load, stream = corpus.digest, lambda: corpus, None
    folder = cache / digest
    if not _is_complete(folder, vocab_size):
        _fill(folder, vocab_size, load, keep_train=stream is None)
    path = _file(folder, "tokenizer", vocab_size)
    tokenizer = Tokenizer.load(path)
    train, validation = (_map(_file(folder, part, vocab_size)) for part in ("train", "validation"))
    digest = hashlib.blake2b(digest.encode() + path.read_bytes(), digest_size=16).hexdigest()
    return TokenData(tokenizer, train, validation, digest, stream)


def _open_hub(source: str, text_column: str, skip: int) -> Iterator[Document]:
    return stream_hub(source, text_column=text_column, skip=skip)


def _file(folder: Path, part: str, vocab_size: int) -> Path:
    return folder / f"{part}-{vocab_size}{'.json' if part == 'tokenizer' else '.npy'}"


def _is_complete(folder: Path, vocab_size: int) -> bool:
    return all(_file(folder, part, vocab_size).exists() for part in ("tokenizer", "train", "validation"))


def _fill(folder: Path, vocab_size: int, load: Callable[[], Corpus], *, keep_train: bool) -> None:
    note = "Derived by thinwire; may be deleted.\n"
    write_atomically(folder / "README", lambda path: path.write_text(note))
    with FileLock(folder / "lock"):
        if _is_complete(folder, vocab_size):
            return
        corpus = load()
        tokenizer = train_or_load(corpus, vocab_size, folder.parent)
        parts = {"train": corpus.train if keep_train else [], "validation": corpus.validation}
        for part, documents in parts.items():
            tokens = _flat(tokenizer, documents)
            write_atomically(_file(folder, part, vocab_size), partial(_save, tokens))


def _flat(tokenizer: Tokenizer, documents: list[Document]) -> Tokens:
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    parts = [ids.astype(dtype) for ids in tokenizer.encode_documents(documents)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _save(tokens: Tokens, path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, tokens, allow_pickle=False)


def _map(path: Path) -> Tokens:
    try:
        tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: damaged ({error})", "a cached token file", "delete its folder") from error
    return tokens


def _windows(tokens: Tokens, indices: NDArray[np.int64], seq_len: int) -> torch.Tensor:
    """int64 windows (N, T+1) that start at index * T: each token is a target exactly once."""
    if not len(indices):
        return torch.empty(0, seq_len + 1, dtype=torch.int64)
    rows = [tokens[index * seq_len : (index + 1) * seq_len + 1] for index in indices.tolist()]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def _num_windows(num_tokens: int, seq_len: int) -> int:
    return max(0, num_tokens - 1) // seq_len


class Batches:
    """Endless batches of windows, shuffled anew in each epoch; an epoch's remainder fills up from the next."""

    def __init__(self, tokens: Tokens, seq_len: int, batch_size: int, seed: int) -> None:
        check_sizes(seq_len=seq_len, batch_size=batch_size)
        self._tokens, self._seq_len, self._batch_size, self._seed = tokens, seq_len, batch_size, seed
        self._num_windows = _num_windows(len(tokens), seq_len)
        if self._num_windows < batch_size:
            given = f"training text of {len(tokens)} tokens with seq_len={seq_len}, batch_size={batch_size}"
            needed = f"at least {batch_size * seq_len + 1} tokens"
            raise ConfigError(given, needed, "give more text, or lower seq_len or batch_size")
        self._position = 0
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))

    def next(self) -> torch.Tensor:
        """The next global batch, int64 (B, T+1): inputs are [:, :-1], targets [:, 1:]."""
        positions = range(self._position, self._position + self._batch_size)
        indices = np.array([self._window_at(position) for position in positions], dtype=np.int64)
        self._position += self._batch_size
        return _windows(self._tokens, indices, self._seq_len)

    def _window_at(self, position: int) -> int:
        epoch, index = divmod(position, self._num_windows)
        if self._order[0] != epoch:
            self._order = epoch, shuffled(self._num_windows, self._seed, epoch)
        return int(self._order[1][index])

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position: windows served so far, and what fixes their order."""
        fixed = {"seed": self._seed, "seq_len": self._seq_len, "num_tokens": len(self._tokens)}
        return {"windows": self._position, **fixed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `state` was taken. ConfigError if seed, length or text differ."""
        check_state(state, self.state_dict(), {"windows"})
        self._position = int(state["windows"])


class StreamBatches:
    """Batches from a stream of documents: blocks of documents become windows, shuffled inside the block.

    The position is the block's first document and the windows already served of it, so a resume skips the
    documents before and rebuilds one block. Held-out documents are left out; less than a window per block is lost.
    """

    def __init__(
        self,
        open_documents: OpenDocuments,
        tokenizer: Tokenizer,
        seq_len: int,
        batch_size: int,
        seed: int,
        *,
        block_documents: int = 1024,
    ) -> None:
        check_sizes(seq_len=seq_len, batch_size=batch_size)
        self._open, self._tokenizer, self._seq_len, self._batch_size = open_documents, tokenizer, seq_len, batch_size
        self._fixed = {"seed": seed, "seq_len": seq_len, "block_documents": block_documents}
        self._epoch, self._first, self._served = 0, 0, 0
        self._stream: Iterator[Document] | None = None
        self._block: torch.Tensor | None = None
        self._pass_ends = False  # the block in hand is the last of its pass
        self._pass_had_windows = False

    def next(self) -> torch.Tensor:
        """The next global batch, int64 (B, T+1). ConfigError if a whole pass of the stream has no window."""
        parts: list[torch.Tensor] = []
        missing = self._batch_size
        while missing:
            part = self._current_block()[self._served : self._served + missing]
            self._served += len(part)
            missing -= len(part)
            parts.append(part)
            if missing:
                self._advance()
        return torch.cat(parts)

    def _current_block(self) -> torch.Tensor:
        """Shuffled windows (N, T+1) of the block at the position."""
        if self._block is None:
            self._stream = self._stream or self._open(self._first)
            documents = list(islice(self._stream, self._fixed["block_documents"]))
            self._pass_ends = len(documents) < self._fixed["block_documents"]
            kept = [document for document in documents if document.text and not is_held_out(document.name)]
            tokens = _flat(self._tokenizer, kept)
            num_windows = _num_windows(len(tokens), self._seq_len)
            order = np.random.default_rng([self._fixed["seed"], self._epoch, self._first]).permutation(num_windows)
            self._block = _windows(tokens, order, self._seq_len)
            self._pass_had_windows |= num_windows > 0
        return self._block

    def _advance(self) -> None:
        self._served, self._block = 0, None
        if not self._pass_ends:
            self._first += self._fixed["block_documents"]
            return
        if not self._pass_had_windows:
            given = f"streamed text without one window of seq_len={self._seq_len}"
            raise ConfigError(given, "a longer stream", "give more text or lower seq_len")
        self._epoch, self._first, self._stream, self._pass_had_windows = self._epoch + 1, 0, None, False

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position: pass, first document of the block, windows served of it, and what fixes the order."""
        return {"epoch": self._epoch, "first": self._first, "served": self._served, **self._fixed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `state` was taken. ConfigError if seed, length or block size differ."""
        check_state(state, self.state_dict(), {"epoch", "first", "served"})
        self._epoch, self._first, self._served = (int(state[name]) for name in ("epoch", "first", "served"))
        self._stream, self._block, self._pass_had_windows = None, None, True


def validation_windows(tokens: Tokens, seq_len: int, max_tokens: int) -> torch.Tensor:
    """The first windows of the held-out tokens, int64 (N, T+1), N*T <= max_tokens targets; always the same."""
    check_sizes(seq_len=seq_len)
    available = _num_windows(len(tokens), seq_len)
    num_windows = min(available, max_tokens // seq_len)
    if num_windows < 1:
        given = f"validation with {len(tokens)} held-out tokens, max_tokens={max_tokens}, seq_len={seq_len}"
        raise ConfigError(given, "at least one window of seq_len + 1 tokens", "give more text or lower seq_len")
    return _windows(tokens, np.arange(num_windows), seq_len)


def bits_per_byte(total_nll_nats: float, total_bytes: int) -> float:
    """Summed negative log-likelihood (nats) of all targets over the UTF-8 bytes they stand for, in bits.

    The bytes are `token_bytes[targets].sum()`; an end-of-document mark costs likelihood and stands for none.
    """
    return total_nll_nats / (math.log(2.0) * total_bytes)
