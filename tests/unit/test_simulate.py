"""The simulated step: by hand where a hand can, by laws over every schedule elsewhere."""

from __future__ import annotations

import itertools
import math

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from thinwire.errors import ConfigError
from thinwire.link import Link
from thinwire.pipeline import orders as orders_module
from thinwire.plan import Action, StepTimeline, schedule_actions, simulate, stage_rank

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
FORWARD_S, BACKWARD_S = 1.0, 2.0


def step(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    link: Link | None = None,
    message_bytes: int = 1000,
    overhead_s: float = 0.0,
) -> StepTimeline:
    stages_per_rank = SCHEDULES[schedule]
    num_stages = num_ranks * stages_per_rank
    return simulate(
        schedule_actions(schedule, num_ranks, stages_per_rank, num_microbatches),
        stage_rank(schedule, num_ranks, stages_per_rank),
        forward_s=[FORWARD_S] * num_stages,
        backward_s=[BACKWARD_S] * num_stages,
        message_bytes=[message_bytes] * (num_stages - 1),
        link=link,
        overhead_s=overhead_s,
    )


def expected_work(num_stages: int, num_microbatches: int) -> set[tuple[int, str, int]]:
    """What a step has to do, a full backward written as its two parts."""
    return {(p, kind, n) for p in range(num_stages) for kind in "FIW" for n in range(num_microbatches)}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_order_does_all_the_work_once_and_finishes(schedule: str, num_ranks: int) -> None:
    num_stages = num_ranks * SCHEDULES[schedule]
    for num_microbatches in (num_stages, 2 * num_stages, 4 * num_ranks):
        if num_microbatches < num_stages:
            continue
        actions = schedule_actions(schedule, num_ranks, SCHEDULES[schedule], num_microbatches)
        assert sorted(actions) == list(range(num_ranks))
        parts = [
            (action.stage, kind, action.microbatch)
            for order in actions.values()
            for action in order
            for kind in ("IW" if action.kind == "B" else action.kind)
        ]
        assert len(parts) == len(set(parts))
        assert set(parts) == expected_work(num_stages, num_microbatches)
        timeline = step(schedule, num_ranks, num_microbatches, link=Link(1e6, 0.01))
        assert len(timeline.spans) == sum(map(len, actions.values()))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_lie_where_torch_puts_them(schedule: str) -> None:
    num_ranks, per_rank = 3, SCHEDULES[schedule]
    placed = stage_rank(schedule, num_ranks, per_rank)
    assert all(
        placed[a.stage] == rank for rank, order in schedule_actions(schedule, 3, per_rank, 6).items() for a in order
    )
    if per_rank == 1:
        return
    stages = [orders_module._stage_stand_in(p, num_ranks, num_ranks * per_rank) for p in placed if placed[p] == 0]
    schedule_class = torch_schedules.get_schedule_class(schedule)
    assert schedule_class(stages, 6).stage_index_to_group_rank == placed


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_still_describes_its_schedules_as_we_read_them(schedule: str) -> None:
    """A failure means: torch renamed what `thinwire.pipeline.orders._torch_orders` reads. Adapt that function."""
    try:
        order = orders_module._torch_orders(schedule, 2, SCHEDULES[schedule], 4)
    except RuntimeError as error:
        pytest.fail(str(error))
    kinds = {action.kind for actions in order.values() for action in actions}
    assert {"F"} < kinds <= {"F", "B", "I", "W"}, f"torch names its actions otherwise now: {kinds}"


def test_a_renamed_attribute_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Renamed:
        def __init__(self, stages: object, num_microbatches: int) -> None:
            self.order_of_the_pipeline = {}

    monkeypatch.setattr(torch_schedules, "get_schedule_class", lambda name: Renamed)
    with pytest.raises(RuntimeError, match=r"torch changed.*pipeline_order"):
        schedule_actions("DualPipeV", 2, 2, 4)


def test_1f1b_is_ordered_as_it_is_executed() -> None:
    orders = schedule_actions("1f1b", 2, 1, 3)
    assert " ".join(map(str, orders[0])) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert " ".join(map(str, orders[1])) == "1F0 1B0 1F1 1B1 1F2 1B2"


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 3), (2, 2), (2, 5), (4, 8)])
def test_without_a_link_a_step_takes_n_plus_p_minus_1_rounds(
    schedule: str, num_ranks: int, num_microbatches: int
) -> None:
    timeline = step(schedule, num_ranks, num_microbatches)
    rounds = num_microbatches + num_ranks - 1
    assert timeline.step_s == pytest.approx(rounds * (FORWARD_S + BACKWARD_S))
    assert timeline.busy_s == {r: num_microbatches * (FORWARD_S + BACKWARD_S) for r in range(num_ranks)}


def test_two_stages_over_a_link_by_hand() -> None:
    # GPipe, 2 microbatches, a message occupies the link for 4 s and then travels for 0.5 s.
    # Rank 0: F until 1 and 2. Activations arrive at 1+4+.5 = 5.5 and 5+4+.5 = 9.5.
    # Rank 1: F 5.5-6.5 and 9.5-10.5, B 10.5-12.5 and 12.5-14.5. Gradients arrive at 12.5+4+.5 = 17 and 21.
    # Rank 0: B 17-19 and 21-23.
    timeline = step("GPipe", 2, 2, link=Link(2000.0, 0.5))
    starts = {str(span.action): span.start_s for span in timeline.spans}
    assert starts == {
        "0F0": 0,
        "0F1": 1,
        "1F0": 5.5,
        "1F1": 9.5,
        "1B0": 10.5,
        "1B1": 12.5,
        "0B0": 17,
        "0B1": 21,
    }
    assert timeline.step_s == 23
    assert timeline.busy_s == {0: 6, 1: 6}
    assert timeline.wait_s == {0: 17, 1: 8.5}  # rank 1 is idle from 14.5 on: neither busy nor waiting


def test_a_narrow_boundary_sets_the_pace() -> None:
    occupancy_s, num_microbatches = 50.0, 10
    timeline = step("GPipe", 2, num_microbatches, link=Link(1000 * 8 / occupancy_s))
    # the link works without a pause in both directions, and the last microbatch does the rest alone
    assert timeline.step_s == pytest.approx(2 * num_microbatches * occupancy_s + 2 * FORWARD_S + 2 * BACKWARD_S)


def test_latency_is_paid_once_per_crossing_in_gpipe() -> None:
    for num_ranks in (2, 3, 4):
        late = step("GPipe", num_ranks, 8, link=Link(latency_s=0.25)).step_s - step("GPipe", num_ranks, 8).step_s
        assert late == pytest.approx(2 * (num_ranks - 1) * 0.25)


def test_stages_of_one_rank_talk_for_nothing() -> None:
    slow = Link(1.0, 100.0)
    assert step("ZBVZeroBubble", 1, 4, link=slow).step_s == step("ZBVZeroBubble", 1, 4).step_s
    assert step("ZBVZeroBubble", 2, 4, link=slow).step_s > step("ZBVZeroBubble", 2, 4).step_s + 100.0


def test_the_first_stage_does_its_whole_backward_for_weights() -> None:
    spans = step("ZBVZeroBubble", 2, 4, overhead_s=0.125).spans
    cost = {(s.action.stage, s.action.kind): s.end_s - s.start_s for s in spans}
    assert cost[0, "I"] == 0
    assert cost[0, "W"] == BACKWARD_S + 0.125
    assert cost[3, "I"] == cost[3, "W"] == BACKWARD_S / 2 + 0.125
    assert cost[0, "F"] == FORWARD_S + 0.125


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_worse_link_never_shortens_a_step(schedule: str) -> None:
    num_ranks = 3
    none = step(schedule, num_ranks, 6)
    assert step(schedule, num_ranks, 6, link=Link(math.inf, 0.0)) == none
    for worse in ([Link(1e5, s) for s in (0.0, 0.1, 1.0)], [Link(b, 0.1) for b in (1e6, 1e4, 1e3)]):
        steps = [none.step_s, *(step(schedule, num_ranks, 6, link=link).step_s for link in worse)]
        assert steps == sorted(steps)
        assert steps[0] < steps[-1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_timeline_is_consistent(schedule: str) -> None:
    timeline = step(schedule, 2, 8, link=Link(1e4, 0.2))
    for rank in (0, 1):
        spans = [span for span in timeline.spans if span.rank == rank]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))
        assert timeline.busy_s[rank] + timeline.wait_s[rank] == pytest.approx(spans[-1].end_s)
    assert timeline.step_s == max(span.end_s for span in timeline.spans)


def test_an_order_that_cannot_finish_names_what_is_stuck() -> None:
    orders = {0: [Action(0, "B", 0), Action(0, "F", 0)], 1: [Action(1, "F", 0), Action(1, "B", 0)]}
    with pytest.raises(ValueError, match=r"never finish.*rank 0 at 0B0, rank 1 at 1F0"):
        simulate(orders, {0: 0, 1: 1}, forward_s=[1, 1], backward_s=[1, 1], message_bytes=[8])


def test_lists_must_fit_the_stages() -> None:
    orders = schedule_actions("GPipe", 2, 1, 2)
    with pytest.raises(ValueError, match="2 message sizes were given for 2 stages"):
        simulate(orders, {0: 0, 1: 1}, forward_s=[1, 1], backward_s=[1, 1], message_bytes=[8, 8])
    with pytest.raises(ValueError, match="rank 0 is to run 0F0"):
        simulate(orders, {0: 1, 1: 0}, forward_s=[1, 1], backward_s=[1, 1], message_bytes=[8])


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (("2F2B", 2, 1, 4), "allowed: GPipe, 1F1B"),
        (("1F1B", 2, 2, 4), "allowed: 1 per rank"),
        (("DualPipeV", 2, 1, 4), "allowed: 2 per rank"),
        (("1F1B", 4, 1, 2), r"2 microbatches.*stages \(4\)"),
        (("Interleaved1F1B", 3, 2, 7), "7 microbatches.*multiple"),
        (("GPipe", 0, 1, 2), "1 or more"),
        (("GPipe", 2, 1, 0), "1 or more"),
    ],
)
def test_counts_a_schedule_does_not_take(given: tuple[str, int, int, int], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        schedule_actions(*given)
