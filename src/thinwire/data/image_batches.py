"""Batches of images in an order, and with an augmentation, that depend on the seed alone.

Every rank makes the same global batch and takes its share. Shapes: N images, B batch, C channels, Y and X rows
and columns of pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.data.images import CIFAR10_MEAN, CIFAR10_STD, Images
from thinwire.data.position import check_sizes, check_state, shuffled
from thinwire.errors import ConfigError

PADDING = 4


def normalise(pixels: Tensor, mean: Sequence[float] = CIFAR10_MEAN, std: Sequence[float] = CIFAR10_STD) -> Tensor:
    """uint8 (B, C, Y, X) to float32: scaled to 0..1, less the channel's mean, over its standard deviation."""
    scale = 1 / (255 * torch.tensor(std))
    shift = -torch.tensor(mean) / torch.tensor(std)
    return pixels.float() * scale[:, None, None] + shift[:, None, None]


def crop_and_flip(pixels: Tensor, top: Tensor, left: Tensor, is_flipped: Tensor) -> Tensor:
    """Each picture moved within a black border of 4 pixels, and mirrored where asked (He et al., 1512.03385, 4.2).

    Args:
        pixels: (B, C, Y, X), any dtype.
        top, left: (B,), first row and column of the part to keep of the padded picture, in 0..8.
        is_flipped: (B,), bool.
    """
    num_images, num_channels, num_rows, num_columns = pixels.shape
    padded = F.pad(pixels, (PADDING,) * 4)
    columns = torch.arange(num_columns).expand(num_images, -1)
    columns = torch.where(is_flipped[:, None], columns.flip(1), columns) + left[:, None]
    rows = torch.arange(num_rows) + top[:, None]
    image = torch.arange(num_images)[:, None, None, None]
    channel = torch.arange(num_channels)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


@dataclass(frozen=True)
class _Epoch:
    """The order (N,) of an epoch, and what happens to the picture at each place of it."""

    order: Tensor
    top: Tensor
    left: Tensor
    is_flipped: Tensor

    @classmethod
    def draw(cls, num_images: int, seed: int, epoch: int) -> _Epoch:
        dice = np.random.default_rng([seed, epoch, 1])  # apart from the order's, which batches of text share
        top, left = torch.from_numpy(dice.integers(0, 2 * PADDING + 1, (2, num_images)))
        is_flipped = torch.from_numpy(dice.random(num_images) < 0.5)
        return cls(torch.from_numpy(shuffled(num_images, seed, epoch)), top, left, is_flipped)


class ImageBatches:
    """Endless batches, shuffled anew in each epoch; an epoch's remainder fills up from the next.

    With `augment`, every picture is cropped and mirrored at random, anew in each epoch. What happens to a picture
    depends on the seed and the epoch, not on the size of batches.

    Raises:
        ConfigError: a batch below one, or larger than the set.
    """

    def __init__(self, images: Images, batch_size: int, seed: int, *, augment: bool = True) -> None:
        check_sizes(batch_size=batch_size)
        if batch_size > len(images):
            given = f"batch_size={batch_size} with {len(images)} images"
            raise ConfigError(given, f"1..{len(images)}", "lower it or give more images")
        self._images, self._batch_size, self._seed, self._augment = images, batch_size, seed, augment
        self._position = 0
        self._epoch: tuple[int, _Epoch] | None = None

    def next(self) -> tuple[Tensor, Tensor]:
        """The next global batch: normalised float32 (B, C, Y, X), and int64 classes (B,)."""
        epoch, start = divmod(self._position, len(self._images))
        first = self._part(epoch, start, start + self._batch_size)
        missing = self._batch_size - len(first[1])
        parts = [first, self._part(epoch + 1, 0, missing)] if missing else [first]
        self._position += self._batch_size
        pixels, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        return normalise(pixels), labels

    def _part(self, epoch: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Pixels and classes at places start..stop of an epoch."""
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, _Epoch.draw(len(self._images), self._seed, epoch)
        drawn, places = self._epoch[1], slice(start, stop)
        chosen = drawn.order[places]
        pixels = self._images.pixels[chosen]
        if self._augment:
            pixels = crop_and_flip(pixels, drawn.top[places], drawn.left[places], drawn.is_flipped[places])
        return pixels, self._images.labels[chosen]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position: images served so far, and what fixes their order and looks."""
        return {
            "images": self._position,
            "seed": self._seed,
            "augment": self._augment,
            "digest": self._images.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `state` was taken. ConfigError if seed, augmentation or images differ."""
        check_state(state, self.state_dict(), {"images"})
        self._position = int(state["images"])


def evaluation_batches(images: Images, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All images once, in order and as they are, in batches as of `ImageBatches`; the last may be smaller."""
    check_sizes(batch_size=batch_size)
    for pixels, labels in zip(images.pixels.split(batch_size), images.labels.split(batch_size), strict=True):
        yield normalise(pixels), labels
