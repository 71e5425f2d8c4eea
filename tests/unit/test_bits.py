"""Signs as bits, against dense integer sums and against one example written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire import bits

LENGTHS = [0, 1, 7, 8, 9, 63, 64, 65, 200]
LONGER_THAN_A_PIECE = bits._CACHED_BITS + 65
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64]
VOTERS = [*range(1, 10), 63, 64, 65, 127, 128, 129, 1000]
SPECIAL = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1.0, -1.0]
SPECIAL_SIGNS = [1, 1, 1, 1, 1, -1, 1, -1]
SPECIAL_TERNARY = [0, 0, 0, 0, 1, -1, 1, -1]

floats = st.floats(width=32, allow_subnormal=True) | st.sampled_from(SPECIAL)


def dense_signs(x: Tensor) -> Tensor:
    """-1 where negative, else +1, as the rule says."""
    return torch.where(x < 0, -1, 1).to(torch.int8).flatten()


def dense_ternary(x: Tensor) -> Tensor:
    return ((x > 0).to(torch.int8) - (x < 0).to(torch.int8)).flatten()


def int_of(words_W: Tensor) -> int:
    """All the words as one number, word 0 lowest."""
    return sum((word % 2**64) << 64 * i for i, word in enumerate(words_W.tolist()))


def bit_counts(words_MW: Tensor) -> list[int]:
    numbers = [int_of(words_W) for words_W in words_MW]
    return [sum(number >> i & 1 for number in numbers) for i in range(64 * words_MW.size(1))]


def random_signs(workers: int, length: int) -> Tensor:
    return torch.randint(0, 2, (workers, length)) * 2 - 1


def test_the_layout_is_this_one() -> None:
    x = torch.ones(66)
    x[[0, 3, 8, 63, 64]] = -2.5
    words_W = bits.pack_signs(x)
    assert words_W.dtype == torch.int64
    assert [word % 2**64 for word in words_W.tolist()] == [0x8000_0000_0000_0109, 0x1]
    assert words_W.view(torch.uint8).tolist() == [9, 1, 0, 0, 0, 0, 0, 128, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_what_was_packed_comes_back(length: int, dtype: torch.dtype) -> None:
    x = (torch.randn(length) * 3).to(dtype)
    words_W = bits.pack_signs(x)
    assert words_W.shape == (bits.num_words(length),) == (math.ceil(length / 64),)
    assert torch.equal(bits.unpack_signs(words_W, length), dense_signs(x))
    assert torch.equal(bits.unpack_ternary(bits.pack_ternary(x), length), dense_ternary(x))
    assert int_of(words_W) < 2 ** max(length, 1), "padding is zero"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_special_values_have_the_written_rule(dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL, dtype=dtype)
    assert bits.unpack_signs(bits.pack_signs(x), len(x)).tolist() == SPECIAL_SIGNS
    assert bits.unpack_ternary(bits.pack_ternary(x), len(x)).tolist() == SPECIAL_TERNARY


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_precision_number(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert torch.equal(bits.unpack_signs(bits.pack_signs(x), len(x)), dense_signs(x))
    assert torch.equal(bits.unpack_ternary(bits.pack_ternary(x), len(x)), dense_ternary(x))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool], ids=str)
def test_the_ends_of_integers(dtype: torch.dtype) -> None:
    ends = [0, 1] if dtype == torch.bool else [torch.iinfo(dtype).min, 0, torch.iinfo(dtype).max]
    x = torch.tensor(ends, dtype=dtype)
    assert torch.equal(bits.unpack_signs(bits.pack_signs(x), len(x)), dense_signs(x))
    assert torch.equal(bits.unpack_ternary(bits.pack_ternary(x), len(x)), dense_ternary(x))


def test_zeros_and_nan_take_the_drawn_bit_and_others_do_not() -> None:
    x = torch.tensor([*SPECIAL, *SPECIAL])
    draw_W = torch.tensor([0x00FF | ~0xFFFF])  # ones for the first eight and in the padding
    signs = bits.unpack_signs(packed := bits.pack_signs(x, draw_W), 16).tolist()
    assert signs == [-1, -1, -1, -1, 1, -1, 1, -1, *SPECIAL_SIGNS]
    assert int_of(packed) < 2**16


def test_a_tensor_of_several_pieces() -> None:
    x = torch.randn(LONGER_THAN_A_PIECE)
    assert torch.equal(bits.unpack_signs(bits.pack_signs(x), x.numel()), dense_signs(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_shapes_and_gradients_do_not_matter(dtype: torch.dtype) -> None:
    x = (torch.randn(7, 22) * 3).to(dtype).T[::2]
    if dtype.is_floating_point:
        x.requires_grad_()
    assert torch.equal(bits.pack_signs(x), bits.pack_signs(x.detach().clone(memory_format=torch.contiguous_format)))
    assert torch.equal(bits.unpack_signs(bits.pack_signs(x), x.numel()), dense_signs(x))


@pytest.mark.parametrize("length", LENGTHS)
def test_torch_alone_gives_the_same_as_numpy(length: int) -> None:
    mask = torch.randn(length) < 0
    words_W = bits.pack_mask(mask)
    assert torch.equal(bits._pack_anywhere(mask, torch.zeros_like(words_W)), words_W)
    assert torch.equal(bits._unpack_anywhere(words_W.view(torch.uint8))[:length], mask)


@pytest.mark.parametrize(("words", "length"), [(1, 65), (2, 64), (1, 0), (0, 1)])
def test_a_wrong_length_is_refused(words: int, length: int) -> None:
    with pytest.raises(ValueError, match="number of elements"):
        bits.unpack_signs(torch.zeros(words, dtype=torch.int64), length)


@pytest.mark.parametrize("workers", VOTERS)
def test_planes_hold_the_counts(workers: int) -> None:
    words_MW = torch.randint(-(2**63), 2**63 - 1, (workers, 2))
    before = words_MW.clone()
    planes = bits.count_planes(words_MW)
    assert torch.equal(words_MW, before)
    assert len(planes) == workers.bit_length()
    numbers = [int_of(plane) for plane in planes]
    assert [sum((n >> i & 1) << k for k, n in enumerate(numbers)) for i in range(128)] == bit_counts(words_MW)


@pytest.mark.parametrize("workers", VOTERS)
def test_majority_is_the_sign_of_the_dense_sum(workers: int) -> None:
    signs = random_signs(workers, 130)
    signs[: workers // 2, :3], signs[workers // 2 :, :3] = 1, -1  # ties for even numbers
    negative_W, tie_W = bits.majority(torch.stack([bits.pack_signs(s) for s in signs]))
    assert torch.equal(bits.unpack_vote(negative_W, tie_W, 130), signs.sum(0).sign().to(torch.int8))
    assert int_of(negative_W) < 2**130 and int_of(tie_W) < 2**130
    assert not int_of(negative_W & tie_W)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 65, 128])
def test_ternary_majority_is_the_sign_of_the_dense_sum(workers: int) -> None:
    signs = torch.randint(-1, 2, (workers, 130))
    words_M2W = torch.stack([bits.pack_ternary(s) for s in signs])
    assert torch.equal(bits.unpack_vote(*bits.majority_ternary(words_M2W), 130), signs.sum(0).sign().to(torch.int8))


def test_as_many_workers_as_can_be_counted() -> None:
    workers = bits.MAX_VOTERS
    words_MW = torch.zeros(workers, 1, dtype=torch.int64)
    words_MW[: workers // 2] |= 1  # one vote short of half
    words_MW[: workers // 2 + 1] |= 2  # just over half
    words_MW |= 4
    negative_W, tie_W = bits.majority(words_MW)
    assert (negative_W.tolist(), tie_W.tolist()) == ([0b110], [0])
    with pytest.raises(ValueError, match="65535"):
        bits.majority(torch.zeros(workers + 1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="0 workers"):
        bits.majority(torch.zeros(0, 1, dtype=torch.int64))


@pytest.mark.parametrize("workers", [2, 3])
def test_a_vote_over_several_pieces_of_words(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    signs = random_signs(workers, 700)
    words_MW = torch.stack([bits.pack_signs(s) for s in signs])
    whole = bits.majority(words_MW)
    monkeypatch.setattr(bits, "_CACHED_WORDS", 3)
    assert all(map(torch.equal, bits.majority(words_MW), whole))
    assert torch.equal(bits.unpack_vote(*whole, 700), signs.sum(0).sign().to(torch.int8))


def test_a_drawn_bit_decides_ties_and_nothing_else() -> None:
    words_MW = torch.tensor([[0b0011], [0b0101]])
    negative_W, tie_W = bits.majority(words_MW)
    assert (negative_W.tolist(), tie_W.tolist()) == ([0b0001], [0b0110])
    assert bits.break_ties(negative_W, tie_W, torch.tensor([0b1010])).tolist() == [0b0011]


@given(st.lists(st.lists(floats, min_size=70, max_size=70), min_size=1, max_size=9))
def test_any_numbers_any_workers(rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    vote = bits.majority(torch.stack([bits.pack_signs(row) for row in x]))
    dense = torch.stack([dense_signs(row) for row in x]).sum(0).sign()
    assert torch.equal(bits.unpack_vote(*vote, 70), dense.to(torch.int8))
    ternary = bits.majority_ternary(torch.stack([bits.pack_ternary(row) for row in x]))
    dense = torch.stack([dense_ternary(row) for row in x]).sum(0).sign()
    assert torch.equal(bits.unpack_vote(*ternary, 70), dense.to(torch.int8))


@given(st.lists(st.integers(0, 31), min_size=1, max_size=64), st.integers(0, 70))
def test_comparison_with_any_threshold(counts: list[int], threshold: int) -> None:
    planes = [bits.pack_mask(torch.tensor([c >> k & 1 for c in counts]).bool()) for k in range(5)]
    greater_W, equal_W = bits.compare_planes(planes, threshold)
    assert bits.unpack_mask(greater_W, len(counts)).tolist() == [c > threshold for c in counts]
    assert bits.unpack_mask(equal_W, len(counts)).tolist() == [c == threshold for c in counts]


def splitmix_finaliser(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@given(st.integers(0, 2**64), st.integers(0, 2**40), st.integers(0, 2**50))
def test_random_words_are_splitmix_of_seed_step_and_position(seed: int, step: int, start: int) -> None:
    key = splitmix_finaliser((splitmix_finaliser(seed % 2**64) + splitmix_finaliser(step)) % 2**64)
    expected = [splitmix_finaliser((key + (start + i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in range(3)]
    assert [word % 2**64 for word in bits.random_words(seed, step, start, 3).tolist()] == expected


def test_random_words_do_not_depend_on_the_cut_and_are_fair() -> None:
    whole = bits.random_words(1, 2, 0, 4096)
    assert torch.equal(torch.cat([bits.random_words(1, 2, 0, 100), bits.random_words(1, 2, 100, 3996)]), whole)
    five_sigma = 5 * 0.5 / math.sqrt(4096 * 64)
    others = (bits.random_words(1, 3, 0, 4096), bits.random_words(2, 2, 0, 4096), whole.roll(1))
    for words_W in (whole, *(whole ^ other for other in others)):
        assert abs(bits.unpack_mask(words_W, 4096 * 64).float().mean().item() - 0.5) < five_sigma
