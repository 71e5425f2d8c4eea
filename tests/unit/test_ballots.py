"""Ballots against integer sums: whatever the numbers, the voters, the lengths and the zeros."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.reference import votes as reference
from thinwire import bits
from thinwire.collectives.ballots import (
    TIES,
    Ballot,
    Moment,
    Ties,
    Zeros,
    all_present,
    cast,
    count,
    owned,
    read,
    result_kind,
)
from thinwire.collectives.mask import read_mask, write_mask

LENGTHS = [0, 1, 7, 8, 9, 63, 64, 65, 300, 64 * 40]
PATTERNS = {
    "full": Zeros.NONE, "one": Zeros.FEW, "rows": Zeros.WORDS, "rows and one": Zeros.WORDS, "scattered": Zeros.ANY,
    "special": Zeros.ANY,
}  # fmt: skip
MOMENT = Moment(seed=-3, step=5, first_word=7)


def numbers(length: int, pattern: str, seed: int) -> Tensor:
    """Full of signs; one zero; without some whole words; both; with zeros here and there; with what is no number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, generator=generator)
    if "one" in pattern and length:
        x[length // 3] = 0
    if "rows" in pattern:
        kept = torch.rand(bits.num_words(length), generator=generator) < 0.5
        x *= kept.repeat_interleave(64)[:length]
    if pattern == "scattered":
        x[torch.rand(length, generator=generator) < 0.4] = 0
    if pattern == "special":
        x[::3], x[1::5] = math.nan, -0.0
    return x


def dense(x: Tensor) -> reference.Signs:
    return reference.signs(x.double().numpy())


def decide(rows: list[Tensor], ties: Ties, moment: Moment = MOMENT) -> Tensor:
    return read(count([cast([x]) for x in rows], ties, moment), [rows[0].shape])[0]


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("voters", [1, 2, 3, 4, 5, 6])
def test_the_count_is_the_sign_of_the_integer_sum(voters: int, pattern: str, ties: Ties) -> None:
    for length in LENGTHS:
        rows = [numbers(length, pattern, 100 * voter + length) for voter in range(voters)]
        expected = reference.vote([dense(x) for x in rows], ties, MOMENT.seed, MOMENT.step, MOMENT.first_word)
        result = decide(rows, ties)
        assert result.dtype == torch.int8 and result.tolist() == expected.tolist(), length


@pytest.mark.parametrize("ties", TIES)
def test_voters_with_different_zeros_are_counted_together(ties: Ties) -> None:
    rows = [numbers(300, pattern, i) for i, pattern in enumerate(PATTERNS)]
    expected = reference.vote([dense(x) for x in rows], ties, MOMENT.seed, MOMENT.step, MOMENT.first_word)
    assert decide(rows, ties).tolist() == expected.tolist()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_ballot_reads_back_as_the_signs_that_were_cast(length: int, pattern: str) -> None:
    x = numbers(length, pattern, 1)
    ballot = cast([x])
    assert ballot.zeros <= PATTERNS[pattern] or length < 64 * 16, "a list pays among many words only"
    if length == 64 * 40:
        assert ballot.zeros == PATTERNS[pattern]
    assert read(ballot, [x.shape])[0].tolist() == dense(x).tolist()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.uint8], ids=str
)
def test_dtypes_strides_and_shapes_do_not_matter(dtype: torch.dtype) -> None:
    x = (4 * numbers(14 * 22, "scattered", 2)).view(14, 22).to(dtype).T[::2]
    assert not x.is_contiguous()
    (result,) = read(cast([x]), [x.shape])
    assert result.shape == x.shape and result.flatten().tolist() == dense(x).tolist()


def test_tensors_start_at_whole_words() -> None:
    tensors = [torch.ones(3), torch.zeros(0), torch.tensor(-1.0), -torch.ones(5, 13)]
    ballot = cast(tensors)
    assert ballot.negative_W.tolist() == [0, 1, -1, 1] and ballot.present_W.tolist() == [7, 1, -1, 1]
    shapes = [t.shape for t in tensors]
    for signs, x in zip(read(ballot, shapes), tensors, strict=True):
        assert torch.equal(signs, x.to(torch.int8))


def test_no_tensors_make_an_empty_ballot() -> None:
    ballot = cast([])
    assert ballot.negative_W.shape == (0,) and ballot.zeros is Zeros.NONE and read(ballot, []) == []


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("length", [1, 64, 65, 64 * 64, 64 * 64 + 1])
def test_a_mask_comes_back(length: int, pattern: str) -> None:
    ballot = cast([numbers(length, pattern, 3)])
    full_W = all_present((length,), torch.device("cpu"))
    words, few = bits.num_words(length), ballot.few + 2  # somebody else's list may be longer
    sizes = {Zeros.NONE: 0, Zeros.FEW: 2 * few, Zeros.WORDS: bits.num_words(words) + 2 * few, Zeros.ANY: words}
    for zeros in [kind for kind in Zeros if kind >= ballot.zeros]:
        mask = write_mask(ballot, full_W, zeros, few)
        assert mask.dtype == torch.int64 and mask.numel() == sizes[zeros]
        read_back = read_mask(ballot.negative_W, mask, full_W, zeros, few)
        assert torch.equal(read_back.present_W, ballot.present_W) and read_back.zeros == zeros


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("voters", [1, 2, 3, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_result_has_no_more_zeros_than_it_says(pattern: str, voters: int, ties: Ties) -> None:
    ballots = [cast([numbers(64 * 40, pattern, i)]) for i in range(voters)]
    result = count(ballots, ties, MOMENT)
    assert (result.zeros, result.few) == result_kind(ballots, ties)
    missing_W = result.present_W ^ all_present((64 * 40,), torch.device("cpu"))
    partly = int(((missing_W != 0) & (result.present_W != 0)).sum())
    if result.zeros is Zeros.NONE:
        assert not missing_W.any()
    if result.zeros is Zeros.FEW:
        assert int((missing_W != 0).sum()) <= result.few
    if result.zeros is Zeros.WORDS:
        assert partly <= result.few


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("voters", [1, 2, 3])
def test_where_nobody_votes_the_result_is_zero(voters: int, ties: Ties) -> None:
    assert not decide([torch.zeros(70)] * voters, ties).any()


@pytest.mark.parametrize("voters", [2, 4, 6])
def test_owners_take_turns(voters: int) -> None:
    """All tie in every word, so a word shows its owner's sign: it moves by one voter per word and per step."""
    rows = [(1.0 if voter % 2 else -1.0) * torch.ones(64 * 12) for voter in range(voters)]
    for step in range(voters + 1):
        for first_word in (0, 3):
            decided = decide(rows, "owner", Moment(0, step, first_word)).view(12, 64)
            owners = [(first_word + word + step) % voters for word in range(12)]
            assert [row.unique().tolist() for row in decided] == [[1 if owner % 2 else -1] for owner in owners]
            for voter in range(voters):
                mine = list(range(12))[owned(voter, voters, Moment(0, step, first_word))]
                assert mine == [word for word in range(12) if owners[word] == voter]


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_result_does_not_depend_on_the_bucketing(pattern: str, ties: Ties) -> None:
    """Ties are drawn from the position among all words, so a vote may be cut at any of them."""
    ballots = [cast([numbers(64 * 9, pattern, i)]) for i in range(4)]
    whole = count(ballots, ties, MOMENT)
    for cuts in ([0, 9], [0, 1, 9], [0, 4, 5, 9], list(range(10))):
        parts: list[Ballot] = []
        for start, stop in pairwise(cuts):
            parts.append(count([b.part(start, stop) for b in ballots], ties, MOMENT.behind(start)))
        assert torch.equal(torch.cat([p.negative_W for p in parts]) & whole.present_W, whole.negative_W)
        assert torch.equal(torch.cat([p.present_W for p in parts]), whole.present_W)


@pytest.mark.parametrize("ties", ["random", "owner"])
def test_ties_differ_from_step_to_step(ties: Ties) -> None:
    rows = [torch.ones(640), -torch.ones(640)]
    draws = [decide(rows, ties, Moment(0, step)) for step in range(2)]
    assert not torch.equal(*draws)
    assert abs(float(draws[0].float().mean())) < 0.2, "nobody is favoured"


def test_random_ties_depend_on_the_seed() -> None:
    rows = [torch.ones(640), -torch.ones(640)]
    assert not torch.equal(decide(rows, "random", Moment(0)), decide(rows, "random", Moment(1)))
