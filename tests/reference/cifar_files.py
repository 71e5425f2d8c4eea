"""Tiny files in the two layouts of CIFAR-10, written by hand."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]


def pictures(count: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def encoded(picture: Pixels, kind: str = "PNG") -> bytes:
    """A picture (C, Y, X) as a file's bytes."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture.transpose(1, 2, 0))).save(buffer, kind)
    return buffer.getvalue()


def write_parquet(path: Path, contents: Sequence[bytes | None], labels: Sequence[int | None]) -> None:
    images = pa.array([{"bytes": content, "path": None} for content in contents],
                      pa.struct([("bytes", pa.binary()), ("path", pa.string())]))  # fmt: skip
    pq.write_table(pa.table({"img": images, "label": pa.array(labels, pa.int64())}), path)


def python2_batch(rows: Pixels, labels: Sequence[int]) -> bytes:
    """A batch as `cPickle.dump(batch, file, 2)` of Python 2 wrote it: text is bytes, memo entries and all."""
    numbers = b"".join(b"K" + bytes([n]) if n < 256 else b"M" + struct.pack("<H", n) for n in labels)
    names = b"".join(b"U\x05%d.png" % (index % 10) for index in range(len(labels)))
    shape = b"".join(b"M" + struct.pack("<H", size) for size in rows.shape)
    dtype = b"cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return b"".join(
        (
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03",
            b"U\x06labelsq\x04]q\x05(" + numbers + b"e",
            b"U\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09",
            b"(K\x01" + shape + b"\x86" + dtype + b"\x89T" + struct.pack("<i", rows.nbytes) + rows.tobytes() + b"tb",
            b"U\tfilenamesq\x0c]q\x0d(" + names + b"eu.",
        )
    )
