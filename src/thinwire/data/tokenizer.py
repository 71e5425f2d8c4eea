"""Byte-level BPE (Sennrich et al., arXiv 1508.07909), trained with the `tokenizers` library and cached on disk."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thinwire.data.corpus import Corpus, Document
from thinwire.errors import ConfigError, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and the end of a document
TRAINING_CHARACTERS = 32 << 20
PIECE_CHARACTERS = 1 << 17
PIECES_AT_ONCE = 16


class Tokenizer:
    """Text to ids and back, without loss for any text. Ids are below `vocab_size`."""

    def __init__(self, backend: Backend) -> None:
        backend.encode_special_tokens = True  # an end-of-document mark inside a text is only text
        end_of_text = backend.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise ConfigError(f"tokenizer without {END_OF_TEXT}", "a tokenizer saved by thinwire", "train one")
        self._backend = backend
        self.end_of_text: int = end_of_text
        self.vocab_size: int = backend.get_vocab_size()

    @property
    def token_bytes(self) -> NDArray[np.int64]:
        """Bytes of UTF-8 that each id stands for, (V,); 0 for the end of a document."""
        tokens = [self._backend.id_to_token(index) or "" for index in range(self.vocab_size)]
        sizes = np.array([len(token) for token in tokens], dtype=np.int64)  # one letter stands for one byte
        sizes[self.end_of_text] = 0
        return sizes

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of a text, (T,), without an end-of-document mark."""
        return np.array(self._backend.encode(text).ids, dtype=np.int64)

    def encode_documents(self, documents: Iterable[Document]) -> Iterator[NDArray[np.int64]]:
        """Ids of all documents in parts of bounded size, every document followed by its end mark."""
        pieces = (piece for document in documents for piece in _pieces(document.text))
        while group := list(islice(pieces, PIECES_AT_ONCE)):
            ids: list[int] = []
            encodings = self._backend.encode_batch_fast([text for text, _ in group])
            for encoding, (_, is_last) in zip(encodings, group, strict=True):
                ids += encoding.ids
                ids += [self.end_of_text] if is_last else []
            yield np.array(ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that do not form UTF-8, as after a cut inside a letter, become U+FFFD."""
        return self._backend.decode([int(index) for index in ids], skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """Writes one JSON file, whole or not at all."""
        write_atomically(path, lambda temporary: temporary.write_text(self._backend.to_str(), encoding="utf-8"))

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads what `save` wrote; a missing or damaged file raises ConfigError."""
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            given = f"{path}: {one_line(error)}"
            raise ConfigError(given, "a saved tokenizer", "delete it to train it again") from error
        return cls(backend)


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """(piece, is the last) of a text, cut after line ends: the library's memory grows with the length it is given."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
        yield text[start:end], False
        start = end
    yield text[start:], True


def train_or_load(corpus: Corpus, vocab_size: int, cache: Path) -> Tokenizer:
    """The BPE of exactly `vocab_size` tokens for a corpus, trained on its first 32 Mi characters, once per cache.

    Raises ConfigError when the corpus has too little text for so many tokens.
    """
    path = cache / corpus.digest / f"tokenizer-{vocab_size}.json"
    if path.exists():
        return Tokenizer.load(path)
    tokenizer = _train(corpus, vocab_size)
    tokenizer.save(path)
    return tokenizer


def _train(corpus: Corpus, vocab_size: int) -> Tokenizer:
    import tokenizers

    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(f"vocab_size={vocab_size}", f"at least {SMALLEST_VOCABULARY}", "raise it")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(_training_text(corpus.train), trainer)
    tokenizer = Tokenizer(backend)
    if tokenizer.vocab_size < vocab_size:
        given = f"vocab_size={vocab_size}, but the training text has only {tokenizer.vocab_size} tokens to learn"
        raise ConfigError(given, f"up to {tokenizer.vocab_size}", "lower it or give more text")
    return tokenizer


def _training_text(documents: list[Document]) -> Iterator[str]:
    left = TRAINING_CHARACTERS
    for piece in (piece for document in documents for piece, _ in _pieces(document.text)):
        if left <= 0:
            return
        left -= len(piece)
        yield piece


def cache_dir() -> Path:
    """Folder of everything derived: $THINWIRE_CACHE, $XDG_CACHE_HOME/thinwire, or ~/.cache/thinwire."""
    if own := os.environ.get("THINWIRE_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "thinwire"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file beside `path`, then renames it, so that no reader sees half a file."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        given = f"{path}: cannot be written ({error.strerror or error})"
        raise ConfigError(given, "a writable cache", "set THINWIRE_CACHE to another folder") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
