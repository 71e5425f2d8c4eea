"""What is exchanged: one optimizer's worth of gradients of 25 million parameters, in every way that is compared.

Dimension letters: M workers, n parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import bits

DIM, HIDDEN, VOCAB = 576, 1536, 1931
POWER_RANK = 4
ONE_BUCKET_MB = 1024
RING = "ring all-reduce fp32"


def shapes(num_layers: int) -> list[tuple[int, int]]:
    """The matrices of so many LLaMA layers and one head; six layers are 43 matrices, 25,000,128 parameters."""
    layer = [(DIM, DIM)] * 4 + [(HIDDEN, DIM)] * 2 + [(DIM, HIDDEN)]
    return layer * num_layers + [(VOCAB, DIM)]


class Gradients:
    """A rank's own random gradients: flat, and as matrices that are views into it."""

    def __init__(self, num_layers: int, seed: int, folder: str) -> None:
        self.folder = folder  # that all ranks see
        self.shapes = shapes(num_layers)
        sizes = [rows * columns for rows, columns in self.shapes]
        self.flat = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))
        self.flat[self.flat == 0] = 1  # of 25 million, about two; a vote with a zero sends where its zeros are
        pieces = self.flat.split(sizes)
        self.matrices = [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


class Matrices(nn.Module):
    """Parameters whose gradients are given: the loss is their dot product with them, and costs next to nothing."""

    def __init__(self, gradients: Gradients) -> None:
        super().__init__()
        self.gradients = gradients.matrices
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in gradients.shapes)

    def forward(self) -> Tensor:
        pairs = zip(self.weights, self.gradients, strict=True)
        return torch.stack([weight.flatten().dot(gradient.flatten()) for weight, gradient in pairs]).sum()


def _nothing() -> None:
    pass


def _accept(result: object) -> None:
    pass


def _overwrite(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


@dataclass
class Exchange:
    """`prepare` is not timed, `run` is. `needed_bytes`: what a rank has to send, headers apart."""

    run: Callable[[], object]
    needed_bytes: float
    prepare: Callable[[], None] = _nothing
    num_warmups: int = 1
    check: Callable[[object], None] = _accept


def ring_bytes(num_bytes: float) -> float:
    """What a rank sends in a ring all-reduce, or in its two halves, of so many bytes: 2 (M - 1) / M of them."""
    return 2 * (dist.get_world_size() - 1) / dist.get_world_size() * num_bytes


def vote(gradients: Gradients, transport: str, num_zeros: int = 0) -> Exchange:
    """Thinwire's majority of signs, from a float32 vector to an int8 one; the first elements may be zeros."""
    n = gradients.flat.numel()
    flat = gradients.flat.clone() if num_zeros else gradients.flat
    flat[:num_zeros] = 0
    needed = {"packed": ring_bytes(n / 8), "gather": (dist.get_world_size() - 1) * n / 8, "sum": ring_bytes(n)}
    run = partial(thinwire.majority_vote, flat, group=None, transport=transport, ties="random")
    return Exchange(run, needed[transport], check=partial(_check_vote, flat))


def _check_vote(flat: Tensor, vote: Tensor) -> None:
    """Every rank has the same vote, and it is the sign of the integer sum wherever that is not zero."""
    span = slice(0, min(1 << 20, vote.numel()))
    total = flat[span].sign().to(torch.int8)
    dist.all_reduce(total)
    high, low = vote[span].clone(), vote[span].clone()
    dist.all_reduce(high, dist.ReduceOp.MAX)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    decided = total != 0
    if not torch.equal(high, low) or not torch.equal(vote[span][decided], total.sign()[decided]):
        raise RuntimeError("the vote is not the majority, or not the same on every rank")


class Words:
    """Packed signs that are already there: the wire of the packed vote, without its computing."""

    def __init__(self, gradients: Gradients) -> None:
        self.num_ranks, self.rank = dist.get_world_size(), dist.get_rank()
        width = -(-bits.num_words(gradients.flat.numel()) // self.num_ranks)
        self.mine, self.received = torch.zeros(2, self.num_ranks, width, dtype=torch.int64)
        self.needed_bytes = ring_bytes(gradients.flat.numel() / 8)

    def in_pairs(self) -> None:
        """Both halves with one partner to send to and one to receive from at a time."""
        self._pass(list(self.mine))
        self._pass([self.mine[self.rank]] * self.num_ranks)

    def _pass(self, outgoing: list[Tensor]) -> None:
        for shift in range(1, self.num_ranks):
            to, source = (self.rank + shift) % self.num_ranks, (self.rank - shift) % self.num_ranks
            arriving = dist.irecv(self.received[source], source)
            leaving = dist.isend(outgoing[to], to)
            assert arriving is not None and leaving is not None
            arriving.wait()
            leaving.wait()

    def by_gloo(self) -> None:
        """gloo's all-to-all, in which every rank sends to all others at once, and its all-gather."""
        dist.all_to_all_single(self.received.flatten(), self.mine.flatten())
        dist.all_gather_single(self.received.flatten(), self.mine[self.rank])


def words_alone(gradients: Gradients, how: str) -> Exchange:
    """The two halves of the packed vote, on words that are already there."""
    words = Words(gradients)
    return Exchange(getattr(words, how), words.needed_bytes)


def packed_computing_alone(gradients: Gradients) -> Exchange:
    """The packing, counting and unpacking of the packed vote, without the wire. All ranks at once, on the cores."""
    num_ranks, n = dist.get_world_size(), gradients.flat.numel()
    width = -(-bits.num_words(n) // num_ranks)
    received = torch.randint(-(1 << 62), 1 << 62, (num_ranks, width))
    words = torch.zeros(bits.num_words(n), dtype=torch.int64)

    def run() -> None:
        bits.pack_signs(gradients.flat)
        bits.break_ties(*bits.majority(received), bits.random_words(1, 1, 0, width))
        bits.unpack_signs(words, n)

    return Exchange(run, 0.0)


def ring(gradients: Gradients, dtype: torch.dtype) -> Exchange:
    """gloo's all-reduce of the flat gradients, in place in a copy that is made anew each time."""
    flat = torch.empty(gradients.flat.numel(), dtype=dtype)
    needed = ring_bytes(flat.numel() * flat.itemsize)
    return Exchange(partial(dist.all_reduce, flat), needed, lambda: _overwrite(flat, gradients.flat))


def ddp(gradients: Gradients, name: str) -> Exchange:
    """The backward pass of DistributedDataParallel. Three passes first: buckets are laid again after the first, and
    PowerSGD starts to compress at the third. PowerSGD gets one bucket: with several, gloo's callbacks start their
    second collectives in another order on every rank, and they wait for each other for ever."""
    bucket_mb = ONE_BUCKET_MB if name == "powersgd" else None
    model = DistributedDataParallel(Matrices(gradients), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    n = gradients.flat.numel()
    needed = ring_bytes(4 * n)
    if name == "bf16":
        # torch's own hook, which DDP refuses on gloo by its name alone: gloo does sum bf16.
        model.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
        needed = ring_bytes(2 * n)
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWER_RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        needed = ring_bytes(4 * sum(POWER_RANK * (rows + columns) for rows, columns in gradients.shapes))
    losses: list[Tensor] = []

    def prepare() -> None:
        model.zero_grad(set_to_none=False)
        losses[:] = [model()]

    return Exchange(lambda: losses.pop().backward(), needed, prepare, num_warmups=4 if name == "powersgd" else 2)


def averaging(gradients: Gradients) -> Exchange:
    """Hivemind's averaging in 8 bits."""
    from hivemind_averaging import Averaging  # optional

    peer = Averaging(gradients.flat, gradients.folder)
    needed = ring_bytes(gradients.flat.numel())
    return Exchange(peer.run, needed, peer.prepare, check=lambda result: peer.check())


EXCHANGES: dict[str, Callable[[Gradients], Exchange]] = {
    RING: partial(ring, dtype=torch.float32),
    "ring all-reduce bf16": partial(ring, dtype=torch.bfloat16),
    "thinwire packed": partial(vote, transport="packed"),
    "packed, words alone, in pairs": partial(words_alone, how="in_pairs"),
    "packed, words alone, by gloo": partial(words_alone, how="by_gloo"),
    "packed, computing alone": packed_computing_alone,
    "thinwire packed, one zero": partial(vote, transport="packed", num_zeros=1),
    "thinwire gather": partial(vote, transport="gather"),
    "thinwire sum": partial(vote, transport="sum"),
    "DDP fp32": partial(ddp, name="fp32"),
    "DDP bf16": partial(ddp, name="bf16"),
    "DDP PowerSGD": partial(ddp, name="powersgd"),
    "hivemind 8 bit": averaging,
}
