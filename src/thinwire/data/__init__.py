"""Text and images for training: readers, a byte-level BPE, deterministic batches that can resume exactly."""

from __future__ import annotations

from thinwire.data.batches import Batches, StreamBatches, TokenData, bits_per_byte, prepare, validation_windows
from thinwire.data.corpus import Corpus, Document, load_corpus, stream_hub
from thinwire.data.image_batches import ImageBatches, evaluation_batches, normalise
from thinwire.data.image_cache import prepare_cifar10
from thinwire.data.images import Images, load_cifar10
from thinwire.data.tokenizer import Tokenizer, cache_dir, train_or_load

__all__ = [
    "Batches",
    "Corpus",
    "Document",
    "ImageBatches",
    "Images",
    "StreamBatches",
    "TokenData",
    "Tokenizer",
    "bits_per_byte",
    "cache_dir",
    "evaluation_batches",
    "load_cifar10",
    "load_corpus",
    "normalise",
    "prepare",
    "prepare_cifar10",
    "stream_hub",
    "train_or_load",
    "validation_windows",
]
