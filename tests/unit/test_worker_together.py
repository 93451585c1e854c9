"""What members have done together outside of bodies when a generation ends in the middle of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.model import FallowError
from fallow.worker.loop.together import NOTHING_TOLD, Asking, Kind, conclude, told


def waits(number: int, kind: Kind, value: float = 0.0) -> Asking:
    return Asking(number, kind, value)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), st.integers(0, 9), st.integers(0, 2))
def test_all_wait_in_the_same(values: list[float], number: int, newcomers: int) -> None:
    """It is complete, over those who are left; newcomers have no part in it."""
    parts = [told(number, 7.0, waits(number, Kind.MEAN, value), holds=True) for value in values]
    complete, answer = conclude([*[NOTHING_TOLD] * newcomers, *parts])
    assert complete == number + 1
    assert answer == pytest.approx(sum(values) / len(values))


def test_who_has_not_the_result_takes_it_from_one_who_has() -> None:
    there = told(4, 0.25, waits(4, Kind.END), holds=True)
    waiting = told(3, 7.0, waits(3, Kind.MEAN, 9.0), holds=True)
    assert conclude([waiting, there]) == (4, 0.25)
    in_the_next_loop = told(4, 0.25, None, holds=True)
    assert conclude([in_the_next_loop, waiting]) == (4, 0.25)


def test_while_a_member_is_still_in_the_loop_it_is_asked_again() -> None:
    waiting, training = told(3, 7.0, waits(3, Kind.END), holds=True), told(3, 7.0, None, holds=True)
    assert conclude([waiting, training]) == (3, 7.0)


def test_what_is_complete_here_is_not_waited_for() -> None:
    assert told(4, 0.5, waits(3, Kind.MEAN, 9.0), holds=True) == told(4, 0.5, None, holds=True)


def test_different_things_are_refused() -> None:
    parts = [told(3, 0.0, waits(3, kind), holds=True) for kind in (Kind.MEAN, Kind.BARRIER, Kind.BARRIER)]
    with pytest.raises(FallowError, match=r"1 in run\.mean, 2 in run\.barrier; every member has to"):
        conclude(parts)
