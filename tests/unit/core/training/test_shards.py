"""Shards: each sample once, in proportion to speed."""

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.core.training.audit import Fed, Record, Start, StepFinished, audit
from fallow.core.training.shards import (
    EVERY,
    Division,
    divide,
    duties,
    fill_unmeasured,
    make_layout,
    mix,
    shard_crc,
    step_time,
)
from fallow.model import FallowError

PACES = st.floats(0, 1e3, allow_nan=False)
"""Seconds per shard; 0: not measured."""


@st.composite
def layouts(draw: st.DrawFn):
    batch = draw(st.integers(1, 7))
    shards = draw(st.integers(1, 9))
    drop_last = draw(st.booleans())
    least = batch * shards if drop_last else 1
    return make_layout(draw(st.integers(least, least + 300)), batch, batch * shards, drop_last)


@given(layouts(), st.lists(st.lists(PACES, min_size=1, max_size=12), min_size=1, max_size=50))
def test_h14_every_sample_exactly_once_for_any_membership_and_speeds(layout, history) -> None:
    used: list[int] = []
    for step in range(layout.steps):
        paces = history[step % len(history)]
        shards = layout.shards_in(step)
        shares = divide(shards, paces)
        in_step = 0
        for rank in range(len(paces)):
            mine = duties(shares, rank)
            assert mine, "every member has a body"
            for duty in mine:
                assert 0 <= duty.shard < shards
                first, end = layout.bounds(step, duty.shard)
                assert first < end
                if duty.counts:
                    used += range(first, end)
                    in_step += end - first
        assert in_step == layout.samples_in(step)
    wanted = layout.steps * layout.global_batch if layout.drop_last else layout.length
    assert sorted(used) == list(range(wanted))


@pytest.mark.parametrize(
    ("length", "batch", "total", "drop_last", "said"),
    [
        (100, 8, 20, False, "global_batch=20 is not a multiple of the DataLoader's batch_size=8"),
        (10, 8, 16, True, "10 samples are fewer than the global batch of 16"),
        (0, 8, 16, False, "no samples"),
    ],
)
def test_impossible_layouts_are_refused_with_both_numbers(length, batch, total, drop_last, said) -> None:
    with pytest.raises(FallowError, match=said):
        make_layout(length, batch, total, drop_last)


def test_seeds_and_crcs_are_stable_across_processes() -> None:
    assert mix(1, "order", 2) == 1671847539343688486
    assert mix(1, "order", 2) != mix(1, "order", 3)
    there, back = array("q", [3, 4]).tobytes(), array("q", [4, 3]).tobytes()
    assert shard_crc(0, 1, 2, there) == shard_crc(0, 1, 2, memoryview(there)) != shard_crc(0, 1, 2, back)
    assert len({shard_crc(*key, there) for key in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (0, 12, 0), (0, 1, 20))}) == 5


def fed(generation: int, step: int, shard: int, n: int = 4, total: int = 8) -> Fed:
    return Fed(generation=generation, epoch=0, step=step, shard=shard, n=n, total=total, crc=0)


def history() -> list[Record]:
    """Steps 0 and 1 by generation 1; step 2 begun by generation 1 and repeated by generation 2."""
    return [
        Start(generation=1, first_step=0),
        *(fed(1, step, shard) for step in range(2) for shard in range(2)),
        *(StepFinished(generation=1, step=step) for step in range(2)),
        fed(1, 2, 0),
        *(fed(2, 2, shard) for shard in range(2)),
    ]


TWO = {1: 0, 2: 2}


def test_samples_are_counted_as_consumed_lost_or_duplicated() -> None:
    for records, generations, steps, counted in (
        (history(), TWO, 3, (24, 0, 0)),
        (history(), {**TWO, 3: 3}, 3, (24, 0, 0)),  # one that computed nothing owns nothing
        ([record for record in history() if record != fed(1, 1, 1)], TWO, 3, (20, 4, 0)),
        (history(), TWO, 4, (24, 8, 0)),  # a step without any record
        ([*history(), fed(2, 2, 0)], TWO, 3, (24, 0, 4)),
    ):
        report = audit(records, generations, steps, 8)
        assert (report.consumed, report.lost, report.duplicated) == counted


PACE = st.floats(0.01, 100)


def all_divisions(shards: int, size: int) -> list[list[int]]:
    """Every way to give `size` members at least one of `shards` shards each."""
    cuts = itertools.combinations(range(1, shards), size - 1)
    return [[b - a for a, b in itertools.pairwise((0, *cut, shards))] for cut in cuts]


@given(st.lists(PACE, min_size=1, max_size=4), st.integers(0, 8))
def test_no_other_division_is_done_sooner(paces, more) -> None:
    shards = len(paces) + more
    best = min(step_time(shares, paces) for shares in all_divisions(shards, len(paces)))
    assert step_time(divide(shards, paces), paces) == best


def test_an_unknown_pace_is_the_median_of_the_known() -> None:
    assert fill_unmeasured([0.0, 1.0, 4.0, 2.0]) == [2.0, 1.0, 4.0, 2.0]
    assert fill_unmeasured([0.0, 0.0]) == [1.0, 1.0]
    assert divide(20, [1, 3, 0, 1]) == [6, 2, 6, 6]


@given(st.integers(1, 60), st.lists(PACE | st.just(0.0), min_size=1, max_size=12), st.data())
def test_small_noise_never_makes_it_flap(shards, paces, data) -> None:
    """Constant speeds, measured to within 1.5 %: the division changes at most once after an even start, and never after
    a measured one.
    """
    even = data.draw(st.booleans())
    wobble = st.floats(0.985, 1.015)
    noisy = st.tuples(*[wobble for _ in paces]).map(
        lambda by: [p * q for p, q in zip(fill_unmeasured(paces), by, strict=True)]
    )
    division, changes = Division((0.0,) * len(paces) if even else tuple(data.draw(noisy))), 0
    for step in range(0, 10 * EVERY, EVERY):
        division, before = division.revised(shards, data.draw(noisy), step), division
        changes += division != before
    assert changes <= even


def test_divisions_are_some_steps_apart() -> None:
    even = Division((0.0,) * 4)
    assert even.shares(20) == [5, 5, 5, 5]
    slow = even.revised(20, [1, 3, 1, 1], 4)
    assert slow.shares(20) == [6, 2, 6, 6]
    assert slow.revised(20, [1, 1, 1, 1], 4 + EVERY - 1) == slow
    assert slow.revised(20, [1, 1, 1, 1], 4 + EVERY).shares(20) == [5, 5, 5, 5]
