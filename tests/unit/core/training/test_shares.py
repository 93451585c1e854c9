"""Shards in proportion to speed: optimal, at least one each, and steady under noise."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fallow.core.training.shares import EVERY, Division, divide, filled, step_time

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
    assert filled([0.0, 1.0, 4.0, 2.0]) == [2.0, 1.0, 4.0, 2.0]
    assert filled([0.0, 0.0]) == [1.0, 1.0]
    assert divide(20, [1, 3, 0, 1]) == [6, 2, 6, 6]


@given(st.integers(1, 60), st.lists(PACE | st.just(0.0), min_size=1, max_size=12), st.data())
def test_small_noise_never_makes_it_flap(shards, paces, data) -> None:
    """Speeds that stay the same, measured to within 1.5 %: it changes once at most, and not if it began so."""
    even = data.draw(st.booleans())
    wobble = st.floats(0.985, 1.015)
    noisy = st.tuples(*[wobble for _ in paces]).map(lambda by: [p * q for p, q in zip(filled(paces), by, strict=True)])
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
