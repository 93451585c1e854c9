"""The clock of leases: it goes on with the head, and not while the head is away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.core.lease_clock import ABSENCE_S, DEAF_S, LONGEST_TICK_S, Hearing, LeaseClock

TICK_S = 0.25

steps = st.lists(st.tuples(st.sampled_from(["hear", "tick", "idle", "read"]), st.floats(0.0, 1000.0)), max_size=60)


def play(clock: LeaseClock, at: float, what: str) -> None:
    match what:
        case "hear":
            clock.hear(at)
        case "tick":
            clock.tick(at, expects_somebody=True)
        case "idle":
            clock.tick(at, expects_somebody=False)


@given(steps)
def test_it_never_goes_back_nor_faster_than_time_nor_far_at_once(history: list[tuple[str, float]]) -> None:
    clock = LeaseClock(7.0)
    at = shown = 7.0
    for what, passed_s in history:
        at += passed_s
        play(clock, at, what)
        assert shown <= clock.read(at) <= shown + min(passed_s, LONGEST_TICK_S) + 1e-6
        shown = clock.read(at)


@given(steps)
def test_while_nobody_is_heard_it_stands_still_soon(history: list[tuple[str, float]]) -> None:
    clock = LeaseClock(0.0)
    clock.hear(1.0)
    at = heard = 1.0
    for what, passed_s in history:
        at += passed_s
        if what in ("tick", "read"):
            play(clock, at, what)
    assert clock.read(at) <= heard + DEAF_S + 1e-6
    assert clock.hearing.newest_at == heard


@given(st.integers(1, 400), st.floats(2.0, 100_000.0))
def test_a_head_that_is_well_loses_no_time_and_one_that_stood_still_loses_all_but_one_tick(
    ticks: int, gap_s: float
) -> None:
    clock, at = LeaseClock(0.0), 0.0
    for _ in range(ticks):
        at += TICK_S
        clock.hear(at)
        clock.tick(at, expects_somebody=True)
    assert clock.read(at) == pytest.approx(at)
    clock.tick(at + gap_s, expects_somebody=True)
    clock.hear(at + gap_s)
    assert clock.read(at + gap_s) == pytest.approx(at + LONGEST_TICK_S)


@given(steps, st.floats(0.0, 100.0))
def test_to_look_at_it_changes_nothing(history: list[tuple[str, float]], ahead_s: float) -> None:
    one, other = LeaseClock(0.0), LeaseClock(0.0)
    at = 0.0
    for what, passed_s in history:
        at += passed_s
        play(one, at, what)
        play(other, at, what)
        one.read(at + ahead_s)
        assert one.read(at) == other.read(at)
        assert one.hearing == other.hearing


def test_without_anybody_to_hear_it_goes_on() -> None:
    clock = LeaseClock(0.0)
    for number in range(1, 1001):
        clock.tick(float(number), expects_somebody=False)
    assert clock.read(1000.0) == 1000.0


@pytest.mark.parametrize(("away_s", "returned"), [(ABSENCE_S - 0.5, False), (ABSENCE_S + 0.5, True)])
@pytest.mark.parametrize("ticks", [True, False])
def test_it_knows_when_an_absence_ended_that_connections_may_not_outlive(
    away_s: float, returned: bool, ticks: bool
) -> None:
    """Whether the head stood still or heard nobody."""
    clock = LeaseClock(0.0)
    clock.hear(1.0)
    for number in range(1, int(away_s / TICK_S)):
        if ticks:
            clock.tick(1.0 + number * TICK_S, expects_somebody=True)
    clock.hear(1.0 + away_s)
    shows = clock.read(1.0 + away_s)
    assert clock.hearing == Hearing(newest_at=shows, returned_at=shows if returned else 0.0)
