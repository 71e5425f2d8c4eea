"""Images: both layouts of CIFAR-10, every bad file, augmentation against slow loops, exact order and resume."""

from __future__ import annotations

import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from tests.reference.cifar_files import encoded, pictures, python2_batch, write_parquet
from thinwire.data import ImageBatches, Images, evaluation_batches, load_cifar10, normalise
from thinwire.data.image_batches import crop_and_flip
from thinwire.data.images import CIFAR10_MEAN, CIFAR10_STD
from thinwire.errors import ConfigError

JPEG_ERROR = 12  # of a smooth picture's pixels after lossy compression, in steps of 1 / 255

TRAIN, TEST = pictures(10), pictures(4, seed=1)
TRAIN_LABELS, TEST_LABELS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 0], [7, 0, 9, 8]
MEMBERS = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def write_hub(folder: Path) -> Path:
    (folder / "plain_text").mkdir(parents=True)
    for shard in range(2):
        half = slice(5 * shard, 5 * shard + 5)
        contents = [encoded(picture) for picture in TRAIN[half]]
        write_parquet(folder / "plain_text" / f"train-{shard:05}-of-00002.parquet", contents, TRAIN_LABELS[half])
    write_parquet(folder / "plain_text" / "test.parquet", [encoded(picture) for picture in TEST], TEST_LABELS)
    return folder


def write_batches(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number in range(1, 6):
        part = slice(2 * number - 2, 2 * number)
        content = python2_batch(TRAIN[part].reshape(2, -1), TRAIN_LABELS[part])
        (folder / f"data_batch_{number}").write_bytes(content)
    (folder / "test_batch").write_bytes(python2_batch(TEST.reshape(4, -1), TEST_LABELS))
    return folder


def write_parent(folder: Path) -> Path:
    return write_batches(folder / "cifar-10-batches-py").parent


def write_archive(folder: Path) -> Path:
    write_parent(folder)
    path = folder / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder / "cifar-10-batches-py", "cifar-10-batches-py")
    return path


@pytest.mark.parametrize("write", [write_hub, write_batches, write_parent, write_archive])
def test_every_layout_gives_the_same_sets(write: Callable[[Path], Path], tmp_path: Path) -> None:
    train, test = load_cifar10(write(tmp_path / "cifar"))
    assert torch.equal(train.pixels, torch.from_numpy(TRAIN)) and train.labels.tolist() == TRAIN_LABELS
    assert torch.equal(test.pixels, torch.from_numpy(TEST)) and test.labels.tolist() == TEST_LABELS
    assert train.pixels.dtype == torch.uint8 and train.labels.dtype == torch.int64 and train.num_classes == 10
    assert train.digest == images().digest != test.digest


def test_jpeg_is_read(tmp_path: Path) -> None:
    rows, columns = np.mgrid[0:32, 0:32]
    smooth = np.stack([4 * rows, 4 * columns, 255 - 4 * rows]).astype(np.uint8)
    for part in ("train", "test"):
        write_parquet(tmp_path / f"{part}.parquet", [encoded(smooth, "JPEG")], [2])
    found = load_cifar10(tmp_path)[0].pixels[0].int() - torch.from_numpy(smooth).int()
    assert found.abs().max() <= JPEG_ERROR


def images(labels: list[int] = TRAIN_LABELS) -> Images:
    return Images(torch.from_numpy(TRAIN), torch.tensor(labels), 10)


def test_the_digest_sees_every_pixel_and_label() -> None:
    changed = torch.from_numpy(TRAIN.copy())
    changed[9, 2, 31, 31] ^= 1
    others = [Images(changed, torch.tensor(TRAIN_LABELS), 10), images([*TRAIN_LABELS[:-1], 1])]
    others.append(Images(torch.from_numpy(TRAIN), torch.tensor(TRAIN_LABELS), 11))
    assert len({images().digest, *(other.digest for other in others)}) == 4
    assert images().digest == images().digest


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64), "torch.float32"),
        (torch.zeros(2, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"uint8 \(N, C, Y, X\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "labels"),
        (torch.zeros(0, 3, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), "without images"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 10]), r"image 1 has label 10; allowed: 0\.\.9"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([-1, 0]), "image 0 has label -1"),
    ],
)
def test_sets_that_do_not_fit_are_refused(pixels: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Images(pixels, labels, 10)


GOOD = encoded(TRAIN[0])


@pytest.mark.parametrize(
    ("content", "label", "message"),
    [
        (GOOD, 10, r"image 1 has label 10; allowed: 0\.\.9"),
        (GOOD, -1, "image 1 has label -1"),
        (GOOD, None, "row 1 has no label"),
        (None, 3, "row 1: no image"),
        (b"", 3, "row 1: no image"),
        (b"GIF89a and more", 3, "row 1: not an image"),
        (GOOD[:200], 3, "row 1: not an image"),
        (GOOD[:60] + bytes(40) + GOOD[100:], 3, "row 1: not an image"),
        (encoded(TRAIN[0], "JPEG")[:400], 3, "row 1: not an image"),
        (encoded(TRAIN[0][:, :16]), 3, "row 1: 32 x 16 pixels, RGB; allowed: 32 x 32"),
        (encoded(TRAIN[0], "BMP"), 3, "row 1: not an image"),
    ],
)
def test_bad_rows_are_named(content: bytes | None, label: int | None, message: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [GOOD, content], [0, label])
    write_parquet(tmp_path / "test.parquet", [GOOD], [0])
    with pytest.raises(ConfigError, match=message) as caught:
        load_cifar10(tmp_path)
    assert "train.parquet" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "columns",
    [
        {"image": [{"bytes": GOOD}], "label": [1]},
        {"img": [{"bytes": GOOD}], "fine_label": [1]},
        {"img": [GOOD], "label": [1]},
        {"img": [{"path": "x"}], "label": [1]},
        {"img": [{"bytes": "text"}], "label": [1]},
        {"img": [{"bytes": GOOD}], "label": ["cat"]},
    ],
    ids=["image", "label", "no structure", "no bytes", "text", "names"],
)
def test_wrong_columns_are_refused(columns: dict[str, list[object]], tmp_path: Path) -> None:
    for part in ("train", "test"):
        pq.write_table(pa.table(columns), tmp_path / f"{part}.parquet")
    with pytest.raises(ConfigError, match=r"columns .*: .*; allowed: img: struct with binary `bytes`, label: an int"):
        load_cifar10(tmp_path)


def test_missing_empty_and_damaged_parquet_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="image source"):
        load_cifar10(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="image source"):
        load_cifar10(tmp_path)
    write_parquet(tmp_path / "train.parquet", [], [])
    with pytest.raises(ConfigError, match="no images"):
        load_cifar10(tmp_path)
    write_parquet(tmp_path / "train.parquet", [GOOD], [1])
    with pytest.raises(ConfigError, match=r"no test\*\.parquet"):
        load_cifar10(tmp_path)
    (tmp_path / "test.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"test\.parquet: not parquet"):
        load_cifar10(tmp_path)


def test_a_malicious_batch_is_refused_by_the_name_it_wants(tmp_path: Path) -> None:
    (write_batches(tmp_path / "cifar") / "data_batch_3").write_bytes(b"cos\nsystem\n(U\x04true\x85R.")
    with pytest.raises(ConfigError, match=r"data_batch_3: wants the global os\.system"):
        load_cifar10(tmp_path / "cifar")


ROWS = TRAIN[:2].reshape(2, -1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a pickle"),
        (python2_batch(ROWS, [1]), "no `data` of rows of 3072 with as many `labels`"),
        (python2_batch(ROWS[:, :3000], [1, 2]), "no `data`"),
        (python2_batch(ROWS, [1, 10]), r"test_batch: image 1 has label 10; allowed: 0\.\.9"),
        (pickle.dumps({"labels": [1]}, 2), "no `data`"),
        (pickle.dumps([1], 2), "no `data`"),
        (python2_batch(ROWS[:0], []), "no images"),
    ],
)
def test_bad_batches_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (write_batches(tmp_path / "cifar") / "test_batch").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_cifar10(tmp_path / "cifar")


def test_missing_batches_and_damaged_archives_are_refused(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "cifar")
    (path.parent / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(ConfigError, match="data_batch_4 is missing"):
        load_cifar10(path.parent)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"plain text", whole[:100] + bytes(50) + whole[150:]):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"tar\.gz"):
            load_cifar10(path)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(path.parent / "cifar-10-batches-py" / "test_batch", "test_batch")
    with pytest.raises(ConfigError, match="data_batch_1 is missing"):
        load_cifar10(path)


def test_an_archive_cannot_unpack_to_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.data.images._MAX_BATCH_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"data_batch_1 of \d+ bytes; allowed: <= 1000"):
        load_cifar10(write_archive(tmp_path / "cifar"))


def test_normalised_pixels_have_the_channels_mean_and_deviation() -> None:
    pixels = torch.from_numpy(TRAIN)
    expected = (pixels.double() / 255 - torch.tensor(CIFAR10_MEAN)[:, None, None]) / torch.tensor(CIFAR10_STD)[
        :, None, None
    ]
    torch.testing.assert_close(normalise(pixels).double(), expected, rtol=0, atol=1e-6)
    assert normalise(pixels).dtype == torch.float32


def test_crops_and_mirrors_equal_slow_ones() -> None:
    pixels = torch.from_numpy(pictures(9 * 9 * 2)[:, :2, :7, :6].copy())
    top, left, flip = (grid.flatten() for grid in torch.meshgrid(*map(torch.arange, (9, 9, 2)), indexing="ij"))
    found = crop_and_flip(pixels, top, left, flip.bool())
    for index, picture in enumerate(pixels):
        padded = torch.zeros(2, 15, 14, dtype=torch.uint8)
        padded[:, 4:11, 4:10] = picture
        expected = padded[:, top[index] : top[index] + 7, left[index] : left[index] + 6]
        assert torch.equal(found[index], expected.flip(-1) if flip[index] else expected)


def drawn(batches: ImageBatches, count: int) -> tuple[Tensor, Tensor]:
    pairs = [batches.next() for _ in range(count)]
    return torch.cat([pixels for pixels, _ in pairs]), torch.cat([labels for _, labels in pairs])


def test_an_epoch_serves_every_image_once_in_another_order() -> None:
    data = Images(torch.from_numpy(TRAIN), torch.arange(10), 10)
    _, labels = drawn(ImageBatches(data, 4, seed=0), 5)
    first, second = labels[:10].tolist(), labels[10:].tolist()
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    pixels, labels = drawn(ImageBatches(data, 5, seed=0, augment=False), 2)
    assert labels.tolist() == first
    assert torch.equal(pixels, normalise(data.pixels[labels]))


def test_batches_are_alike_whatever_their_size_and_the_seed_decides() -> None:
    whole = drawn(ImageBatches(images(), 10, seed=3), 3)
    parts = drawn(ImageBatches(images(), 6, seed=3), 5)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert not torch.equal(drawn(ImageBatches(images(), 10, seed=4), 3)[0], whole[0])


def test_augmentation_stays_in_range_and_is_uniform() -> None:
    count = 4000
    marked = torch.zeros(count, 3, 9, 9, dtype=torch.uint8)
    marked[:, :, 4, 3] = 255  # off the middle: its place tells the crop and the mirror
    pixels, _ = ImageBatches(Images(marked, torch.zeros(count, dtype=torch.int64), 1), count, seed=0).next()
    black, white = (normalise(torch.full((1, 3, 1, 1), value, dtype=torch.uint8)) for value in (0, 255))
    assert pixels.shape == marked.shape and pixels.min() == black.min() and pixels.max() == white.max()
    assert ((pixels == black) | (pixels == white)).all()
    places = (pixels == white)[:, 0].flatten(1).sum(0).reshape(9, 9)
    assert (places.sum(1) / count - 1 / 9).abs().max() < 0.02  # four standard deviations
    sides = (
        places.sum(0) / count
    )  # from 3 the mark reaches 0..7 (and is cut off at -1), from its mirror 5 it reaches 1..8
    assert (sides[[0, 8]] - 1 / 18).abs().max() < 0.015 and (sides[1:8] - 1 / 9).abs().max() < 0.02


def test_resume_is_exact_and_survives_json() -> None:
    for served in (0, 1, 2, 7):
        batches = ImageBatches(images(), 4, seed=5)
        drawn(batches, served) if served else None
        state = json.loads(json.dumps(batches.state_dict()))
        expected = drawn(batches, 6)
        other = ImageBatches(images(), 4, seed=5)
        other.next()
        other.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(drawn(other, 6), expected, strict=True))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ImageBatches(images(), 4, seed=6), "seed=6"),
        (ImageBatches(images(), 4, seed=5, augment=False), "augment=False"),
        (ImageBatches(images([0] * 10), 4, seed=5), "digest="),
    ],
)
def test_the_position_of_another_order_is_refused(other: ImageBatches, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ImageBatches(images(), 4, seed=5).load_state_dict(other.state_dict())


def test_the_position_in_a_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="windows"):
        ImageBatches(images(), 4, seed=5).load_state_dict({"windows": 3})


@pytest.mark.parametrize("batch_size", [0, -1, 11])
def test_batch_sizes_that_do_not_fit_are_refused(batch_size: int) -> None:
    with pytest.raises(ConfigError, match=f"batch_size={batch_size}"):
        ImageBatches(images(), batch_size, seed=0)


def test_evaluation_sees_every_image_once_in_order() -> None:
    pairs = list(evaluation_batches(images(), 4))
    assert [len(labels) for _, labels in pairs] == [4, 4, 2]
    assert torch.cat([labels for _, labels in pairs]).tolist() == TRAIN_LABELS
    assert torch.equal(torch.cat([pixels for pixels, _ in pairs]), normalise(torch.from_numpy(TRAIN)))
    with pytest.raises(ConfigError, match="batch_size=0"):
        next(evaluation_batches(images(), 0))
