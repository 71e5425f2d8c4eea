"""Pictures from the cache: the same as decoded, bound to the source's bytes, and never damaged unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.reference.cifar_files import encoded, pictures, write_parquet
from thinwire.data import image_cache, load_cifar10, prepare_cifar10
from thinwire.errors import ConfigError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write(folder, 0)
    return folder


def write(folder: Path, seed: int) -> None:
    for part, number in (("train", 5), ("test", 3)):
        made = [encoded(one) for one in pictures(number, seed=seed)]
        write_parquet(folder / f"{part}.parquet", made, list(range(number)))


def refuse(source: object) -> None:
    raise AssertionError(f"{source} decoded again")


def folder_of(cache: Path) -> Path:
    (folder,) = cache.iterdir()
    return folder


def test_decoded_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_cifar10(source)
    first = prepare_cifar10(source, cache=tmp_path / "cache")
    monkeypatch.setattr(image_cache, "load_cifar10", refuse)
    for got in (first, prepare_cifar10(source, cache=tmp_path / "cache")):
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one.pixels, other.pixels) and torch.equal(one.labels, other.labels)
            assert one.digest == other.digest


def test_other_bytes_are_other_pictures(source: Path, tmp_path: Path) -> None:
    before, _ = prepare_cifar10(source, cache=tmp_path / "cache")
    write(source, seed=1)
    after, _ = prepare_cifar10(source, cache=tmp_path / "cache")
    assert after.digest == load_cifar10(source)[0].digest != before.digest


def test_what_was_interrupted_is_made_again(source: Path, tmp_path: Path) -> None:
    prepare_cifar10(source, cache=tmp_path / "cache")
    folder = folder_of(tmp_path / "cache")
    (folder / "digests.json").unlink()
    (folder / "train-pixels.npy").write_bytes(b"half")
    assert prepare_cifar10(source, cache=tmp_path / "cache")[0].digest == load_cifar10(source)[0].digest


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in ("train-pixels.npy", "test-labels.npy") for damage in ("cut", "changed", "gone")),
        ("digests.json", "cut"),
        ("digests.json", "changed"),
    ],
)
def test_damage_is_told(source: Path, tmp_path: Path, name: str, damage: str) -> None:
    prepare_cifar10(source, cache=tmp_path / "cache")
    path = folder_of(tmp_path / "cache") / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if damage == "cut" else content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    with pytest.raises(ConfigError, match=r"damaged .*delete this folder"):
        prepare_cifar10(source, cache=tmp_path / "cache")


def test_no_source_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="image source"):
        prepare_cifar10(tmp_path / "missing", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
