"""CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009) from local files.

Two layouts are read: parquet as the hub has it, and the original batches for Python. Shapes: N images,
C channels, Y and X rows and columns of pixels.
"""

from __future__ import annotations

import hashlib
import io
import math
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.data.pickled import read_pickle
from thinwire.errors import ConfigError, one_line

CIFAR10_SHAPE = (3, 32, 32)
CIFAR10_CLASSES = 10
# Per channel, of the training pixels scaled to 0..1.
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)

IMAGE_COLUMN, LABEL_COLUMN = "img", "label"
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCHES = ("test_batch",)
_ORIGINAL_FOLDER = "cifar-10-batches-py"
_PARQUET = ".parquet"
_ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".tar")
_MAX_BATCH_BYTES = 64 << 20  # twice an original batch: an archive shall not unpack to anything
_LAYOUTS = "a folder with train*.parquet and test*.parquet, or the original batches as a folder or .tar.gz"

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Images:
    """Pictures, uint8 (N, C, Y, X), and their classes, int64 (N,), in 0..num_classes-1.

    `digest` (32 hex digits) changes with any pixel or label; all ranks must agree on it.

    Raises:
        ConfigError: no images, other shapes or dtypes, or a label out of range.
    """

    pixels: Tensor
    labels: Tensor
    num_classes: int
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        shape, dtypes = (tuple(self.pixels.shape), tuple(self.labels.shape)), (self.pixels.dtype, self.labels.dtype)
        if dtypes != (torch.uint8, torch.int64) or len(shape[0]) != 4 or shape[1] != shape[0][:1]:
            given = f"images {shape[0]} of {dtypes[0]} with labels {shape[1]} of {dtypes[1]}"
            raise ConfigError(given, "uint8 (N, C, Y, X) with int64 (N,)", "convert them")
        if not len(self):
            raise ConfigError("a set without images", "at least one image", "give more data")
        wrong = ((self.labels < 0) | (self.labels >= self.num_classes)).nonzero().flatten().tolist()
        if wrong:
            raise _wrong_label(int(self.labels[wrong[0]]), f"image {wrong[0]}", self.num_classes)
        digest = hashlib.blake2b(repr((shape, self.num_classes)).encode(), digest_size=16)
        for values in (self.pixels, self.labels):
            digest.update(values.reshape(-1).numpy().data)
        object.__setattr__(self, "digest", digest.hexdigest())

    def __len__(self) -> int:
        return len(self.labels)


def _labels(labels: Sequence[int], place: str) -> Tensor:
    """Labels (N,) after a check, as Python's integers, which no size can overflow."""
    for index, label in enumerate(labels):
        if not 0 <= label < CIFAR10_CLASSES:
            raise _wrong_label(label, f"{place}: image {index}", CIFAR10_CLASSES)
    return torch.tensor(labels, dtype=torch.int64)


def _wrong_label(label: int, place: str, num_classes: int) -> ConfigError:
    return ConfigError(f"{place} has label {label}", f"0..{num_classes - 1}", "give the right data set")


def load_cifar10(source: str | Path) -> tuple[Images, Images]:
    """The training and the test images, in the order of the files; any number of each is accepted.

    `source` is a folder with train*.parquet and test*.parquet at any depth (columns `img`, a structure with the
    file's `bytes` as PNG or JPEG, and `label`), or the original batches: the folder, its parent, or the archive.
    No code in these is executed. The pixels of a JPEG depend on the decoder's version, and so does the digest.

    Raises:
        ConfigError: missing files or columns, damaged images, labels out of range, or a batch that wants more
            than plain data.
    """
    path, files = Path(source).expanduser(), cifar10_files(source)
    if not files:
        raise ConfigError(f"image source {str(source)!r}", _LAYOUTS, "correct the path")
    if files == [path]:
        return _load_batches(_Archive(path))
    if files[0].suffix != _PARQUET:
        return _load_batches(_Folder(files[0].parent))
    train, test = (_parquet_part(path, files, part) for part in ("train", "test"))
    return train, test


def cifar10_files(source: str | Path) -> list[Path]:
    """The files that make up a source of `load_cifar10`; none where it is not one."""
    path = Path(source).expanduser()
    if path.is_file() and path.name.endswith(_ARCHIVE_SUFFIXES):
        return [path]
    for folder in (path, path / _ORIGINAL_FOLDER):
        batches = [folder / name for name in (*TRAIN_BATCHES, *TEST_BATCHES) if (folder / name).exists()]
        if batches:
            return batches
    return sorted(path.rglob(f"*{_PARQUET}")) if path.is_dir() else []


def _images(place: str, parts: Sequence[tuple[Pixels, Tensor]]) -> Images:
    """One set of several parts, their rows (N, 3072) or pictures of CIFAR's shape."""
    pixels = np.concatenate([pixels.reshape(-1, *CIFAR10_SHAPE) for pixels, _ in parts])
    if not len(pixels):
        raise ConfigError(f"{place}: no images", "at least one image", "fetch it again")
    return Images(torch.from_numpy(pixels), torch.cat([labels for _, labels in parts]), CIFAR10_CLASSES)


def _parquet_part(root: Path, files: Sequence[Path], part: str) -> Images:
    chosen = [file for file in files if file.name.startswith(part)]
    if not chosen:
        raise ConfigError(f"{root}: no {part}*.parquet", _LAYOUTS, "add the file")
    return _images(f"{root}/{part}*.parquet", [_read_parquet(file) for file in chosen])


def _read_parquet(path: Path) -> tuple[Pixels, Tensor]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow)
            table = file.read(columns=[IMAGE_COLUMN, LABEL_COLUMN])
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not parquet, or damaged", "a parquet file", "fetch it again") from error
    labels = table[LABEL_COLUMN].to_pylist()
    if None in labels:
        raise ConfigError(f"{path}: row {labels.index(None)} has no label", "a label per image", "repair the file")
    pixels = np.empty((len(labels), *CIFAR10_SHAPE), np.uint8)
    for index, content in enumerate(pc.struct_field(table[IMAGE_COLUMN], "bytes")):
        pixels[index] = _decoded(content.as_py(), f"{path}: row {index}")
    return pixels, _labels(labels, str(path))


def _check_columns(path: Path, schema: Any) -> None:
    import pyarrow as pa
    import pyarrow.types as kinds

    types = dict(zip(schema.names, schema.types, strict=True))
    image, label = (types.get(name) for name in (IMAGE_COLUMN, LABEL_COLUMN))
    parts = {part.name: part.type for part in image} if isinstance(image, pa.StructType) else {}
    content = parts.get("bytes")
    is_binary = content is not None and (kinds.is_binary(content) or kinds.is_large_binary(content))
    if not is_binary or label is None or not kinds.is_integer(label):
        given = f"{path}: columns {', '.join(f'{name}: {kind}' for name, kind in types.items()) or 'missing'}"
        allowed = f"{IMAGE_COLUMN}: struct with binary `bytes`, {LABEL_COLUMN}: an integer"
        raise ConfigError(given, allowed, "rename the columns, or use CIFAR-10 as the hub has it")


def _decoded(content: bytes | None, place: str) -> Pixels:
    """The pixels (3, 32, 32) of a PNG or JPEG file."""
    from PIL import Image

    channels, *size = CIFAR10_SHAPE
    try:
        with Image.open(io.BytesIO(content or b""), formats=("PNG", "JPEG")) as image:
            kind = f"{image.width} x {image.height} pixels, {image.mode}"  # known before anything is unpacked
            if image.size == tuple(size) and len(image.getbands()) == channels:
                return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        given = f"{place}: not an image, or damaged ({one_line(error, 100)})" if content else f"{place}: no image"
        raise ConfigError(given, "the bytes of a PNG or JPEG", "fetch the file again") from error
    raise ConfigError(f"{place}: {kind}", "32 x 32 pixels, RGB", "give CIFAR-10")


class _Folder:
    """Original batches as files."""

    def __init__(self, path: Path) -> None:
        self.place = path

    def read(self, name: str) -> bytes:
        try:
            return (self.place / name).read_bytes()
        except OSError as error:
            raise _no_batch(self.place, name) from error


class _Archive:
    """Original batches in a tar archive, read without unpacking it to disk."""

    def __init__(self, path: Path) -> None:
        self.place = path
        wanted = (*TRAIN_BATCHES, *TEST_BATCHES)
        try:
            with tarfile.open(path) as archive:
                files = {Path(member.name).name: member for member in archive if member.isfile()}
                self._contents = {name: _member(path, archive, files[name]) for name in wanted if name in files}
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{path}: not an archive, or damaged", "a .tar.gz", "fetch it again") from error

    def read(self, name: str) -> bytes:
        if name not in self._contents:
            raise _no_batch(self.place, name)
        return self._contents[name]


def _member(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    content = b"" if file is None else file.read(_MAX_BATCH_BYTES + 1)
    if len(content) > _MAX_BATCH_BYTES:
        raise ConfigError(f"{path}: {member.name} of {member.size} bytes", f"<= {_MAX_BATCH_BYTES}", "fetch it again")
    return content


def _no_batch(place: Path, name: str) -> ConfigError:
    return ConfigError(f"{place}: {name} is missing or cannot be read", _LAYOUTS, "fetch it again")


def _load_batches(reader: _Folder | _Archive) -> tuple[Images, Images]:
    train, test = (
        _images(str(reader.place), [_batch(reader.read(name), f"{reader.place}: {name}") for name in names])
        for names in (TRAIN_BATCHES, TEST_BATCHES)
    )
    return train, test


def _batch(content: bytes, place: str) -> tuple[Pixels, Tensor]:
    """Rows (N, 3072), channel after channel, and labels of one original batch."""
    batch = read_pickle(content, place)
    fields = batch if isinstance(batch, dict) else {}
    pixels, labels = fields.get(b"data"), fields.get(b"labels")
    width = math.prod(CIFAR10_SHAPE)
    has_rows = isinstance(pixels, np.ndarray) and pixels.ndim == 2 and pixels.shape[1] == width
    has_labels = isinstance(labels, list) and all(type(label) is int for label in labels)
    if pixels is None or labels is None or not has_rows or not has_labels or len(pixels) != len(labels):
        given = f"{place}: no `data` of rows of {width} with as many `labels`"
        raise ConfigError(given, "a batch of CIFAR-10 for Python", "fetch it again")
    return pixels, _labels(labels, place)
