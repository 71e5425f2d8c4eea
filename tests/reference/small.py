"""A small Llama in stages, all in this process: what tests of the pipeline start from."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.codecs import Codec
from thinwire.models import Llama, LlamaConfig
from thinwire.pipeline import Stage, Sync, Twin, split
from thinwire.wire import Ledger

CONFIG = LlamaConfig(vocab_size=61, dim=16, num_layers=4, num_heads=2, num_kv_heads=1, max_seq_len=16)
TIED = LlamaConfig(vocab_size=61, dim=16, num_layers=4, num_heads=2, max_seq_len=16, tied_head=True)


def small_model(config: LlamaConfig = CONFIG, seed: int = 0) -> Llama:
    model = Llama(config)
    model.init_weights(seed)
    return model


def twin_of(stages: list[Stage], num_microbatches: int = 2) -> Twin:
    """For batches of the default size of `batch`."""
    sync = Sync(stages, {stage.index: 0 for stage in stages}, Ledger())
    return Twin(stages, sync, num_microbatches, (4 // num_microbatches, 5), loss)


def small_twin(codec: Codec, num_stages: int, config: LlamaConfig = CONFIG) -> Twin:
    return twin_of(split(small_model(config), num_stages, codec))


def batch(rows: int = 4, tokens: int = 5) -> tuple[Tensor, Tensor]:
    """Ids and targets, the same at every call."""
    ids = torch.randint(CONFIG.vocab_size, (rows, tokens + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")
