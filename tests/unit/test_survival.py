"""Survival curves of holes: by hand, against the empirical curve, and what must hold for every one."""

from __future__ import annotations

from itertools import pairwise
from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.survival import Curve, Spell, count, prior

AGES = st.integers(1, 20_000).map(float)


@st.composite
def spells(draw: st.DrawFn) -> Spell:
    entered = draw(st.just(0.0) | st.integers(0, 10_000).map(float))
    return Spell(entered + draw(AGES), draw(st.booleans()), entered)


def test_kaplan_and_meier_by_hand() -> None:
    # Ends at 6, 6, 6, 7, 10 and censored at 6, 9, 10, 11: the beginning of Freireich's leukaemia data of 21 patients.
    ended = [Spell(t) for t in (6.0, 6.0, 6.0, 7.0, 10.0)]
    censored = [Spell(t, ended=False) for t in (6.0, 9.0, 10.0, 11.0)]
    curve = Curve([*ended, *censored, *(Spell(30.0, ended=False) for _ in range(12))], weight=0.0)
    assert curve.at(5.9) == 1.0
    assert curve.at(6.0) == pytest.approx(18 / 21)
    assert curve.at(7.0) == pytest.approx(18 / 21 * 16 / 17)
    assert curve.at(10.0) == pytest.approx(18 / 21 * 16 / 17 * 14 / 15)
    assert curve.at(1e6) == curve.at(10.0), "nothing ends after that"
    assert curve.remains(6.0, 4.0) == pytest.approx(16 / 17 * 14 / 15)
    assert curve.expected(6.0, 4.0) == pytest.approx(1.0 + 3.0 * 16 / 17)


def test_holes_that_were_found_late_count_from_then_on() -> None:
    # One ends at 100 with three there; the two that were found at 200 are not among them.
    found = [
        Spell(100.0),
        Spell(500.0),
        Spell(600.0, ended=False),
        Spell(400.0, entered_s=200.0),
        Spell(900.0, False, 200.0),
    ]
    curve = Curve(found, weight=0.0)
    assert curve.at(100.0) == pytest.approx(2 / 3)
    assert curve.at(400.0) == pytest.approx(2 / 3 * 3 / 4)
    assert curve.at(500.0) == pytest.approx(2 / 3 * 3 / 4 * 2 / 3)


def test_one_early_end_with_nobody_else_there_is_not_the_end_of_all() -> None:
    late = [Spell(1000.0 + i, entered_s=500.0) for i in range(10)]
    assert Curve([Spell(10.0), *late], weight=0.0).at(900.0) == 1.0
    assert Curve([Spell(10.0)], weight=0.0).at(10.0) == 0.0


def test_nothing_known_is_the_prior_and_the_old_live_longer() -> None:
    curve = Curve()
    for age in (0.0, 1.0, 475.0, 1e5):
        assert curve.at(age) == pytest.approx(prior(age))
    # What Summit's holes were seen to do: a tenth off at most.
    for age, measured in ((0.0, 0.44), (600.0, 0.66), (1800.0, 0.74), (3600.0, 0.78), (7200.0, 0.92)):
        assert curve.remains(age, 600.0) == pytest.approx(measured, abs=0.1)
    chances = [curve.remains(age, 600.0) for age in range(0, 10_000, 500)]
    assert chances == sorted(chances)


def test_what_is_seen_outweighs_the_prior() -> None:
    short, long = Curve([Spell(60.0)] * 200), Curve([Spell(86_400.0)] * 200)
    assert short.remains(0.0, 120.0) < 0.05 and long.remains(0.0, 3600.0) > 0.95
    assert short.expected(0.0, 3600.0) < 100.0 and long.expected(0.0, 3600.0) > 3400.0


@given(st.lists(spells(), max_size=30), st.sampled_from([0.0, 1.0, 8.0]), st.lists(AGES, min_size=2, max_size=10))
def test_a_curve_falls_from_one_and_never_below_nought(seen: list[Spell], weight: float, ages: list[float]) -> None:
    curve = Curve(seen, weight)
    values = [curve.at(age) for age in [0.0, *sorted(ages)]]
    assert values[0] == 1.0
    assert all(0.0 <= later <= earlier + 1e-12 for earlier, later in pairwise(values))
    for age, more in pairwise(ages):
        assert 0.0 <= curve.remains(age, more) <= 1.0 + 1e-12
        assert 0.0 <= curve.expected(age, more) <= more * (1 + 1e-9)


@given(st.lists(AGES, min_size=1, max_size=30), AGES)
def test_without_censoring_it_is_the_empirical_curve(lengths: list[float], age: float) -> None:
    curve = Curve([Spell(length) for length in lengths], weight=0.0)
    assert isclose(curve.at(age), sum(length > age for length in lengths) / len(lengths), abs_tol=1e-9)
    mean = sum(min(length, age) for length in lengths) / len(lengths)
    assert isclose(curve.expected(0.0, age), mean, rel_tol=1e-9)


@settings(max_examples=40)
@given(st.lists(spells(), max_size=12), AGES, AGES)
def test_the_mean_is_the_area_under_the_curve(seen: list[Spell], age: float, seconds: float) -> None:
    curve = Curve(seen)
    pieces = 2000
    width = seconds / pieces
    area = sum(curve.remains(age, (i + 0.5) * width) for i in range(pieces)) * width
    assert curve.expected(age, seconds) == pytest.approx(area, rel=0.02, abs=1.0)


@given(st.lists(spells()), st.lists(spells()), st.sampled_from([0.0, 8.0]), st.lists(st.floats(0.0, 1e6), max_size=5))
def test_it_is_the_same_however_it_is_counted_and_asked(
    kept: list[Spell], more: list[Spell], weight: float, ages: list[float]
) -> None:
    in_parts = Curve(more, weight, count(kept))
    whole = Curve([*kept, *more], weight)
    whole.at(1e9)
    for age in ages:
        assert in_parts.at(age) == whole.at(age) == Curve([*kept, *more], weight).at(age)
        assert in_parts.expected(age, 60.0) == whole.expected(age, 60.0)
