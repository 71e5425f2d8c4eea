"""CIFAR-10 decoded once per machine: processes that ask together wait for the first.

<cache>/cifar10-<key>/
    train-pixels.npy, train-labels.npy, test-pixels.npy, test-labels.npy
    digests.json            of both sets, written last: a folder without it is not complete
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from thinwire.data.images import CIFAR10_CLASSES, Images, cifar10_files, load_cifar10
from thinwire.data.tokenizer import cache_dir, write_atomically
from thinwire.errors import ConfigError

_PARTS = ("train", "test")


def prepare_cifar10(source: str | Path, *, cache: Path | None = None) -> tuple[Images, Images]:
    """What `load_cifar10` returns, mapped from a cache that is bound to the bytes of the source's files.

    Raises:
        ConfigError: as `load_cifar10`; or the cache is damaged or cannot be written.
    """
    try:
        files = cifar10_files(source)
        key = _key(files)
    except OSError:
        files = []
    if not files:
        return load_cifar10(source)  # which says what is wrong
    folder = (cache or cache_dir()) / f"cifar10-{key}"
    if not _mark(folder).exists():
        _fill(folder, source)
    return _read(folder)


def _key(files: list[Path]) -> str:
    """Of the files' names and bytes, and of what decodes them."""
    import PIL

    digest = hashlib.blake2b(f"pillow {PIL.__version__}".encode(), digest_size=16)
    for path in files:
        with path.open("rb") as file:
            digest.update(f"\0{path.name}\0".encode() + hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def _mark(folder: Path) -> Path:
    return folder / "digests.json"


def _fill(folder: Path, source: str | Path) -> None:
    note = "Derived by thinwire; may be deleted.\n"
    write_atomically(folder / "README", lambda path: path.write_text(note))
    with FileLock(folder / "lock"):
        if _mark(folder).exists():
            return
        parts = dict(zip(_PARTS, load_cifar10(source), strict=True))
        for part, images in parts.items():
            write_atomically(folder / f"{part}-pixels.npy", partial(_save, images.pixels))
            write_atomically(folder / f"{part}-labels.npy", partial(_save, images.labels))
        digests = json.dumps({part: images.digest for part, images in parts.items()})
        write_atomically(_mark(folder), lambda path: path.write_text(digests))


def _save(values: Tensor, path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, values.numpy(), allow_pickle=False)


def _read(folder: Path) -> tuple[Images, Images]:
    try:
        digests = json.loads(_mark(folder).read_text())
        train, test = (
            Images(_map(folder / f"{part}-pixels.npy"), _map(folder / f"{part}-labels.npy"), CIFAR10_CLASSES)
            for part in _PARTS
        )
        if digests != {"train": train.digest, "test": test.digest}:
            raise ValueError("digests differ")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder}: damaged ({error})", "cached pictures", "delete this folder") from error
    return train, test


def _map(path: Path) -> Tensor:
    """Mapped copy-on-write: processes share the pages, and torch may hold what it could write to."""
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
