"""Deadlines (uniform progress) and fair share between projects."""

from __future__ import annotations

import pytest

from fallow.core.accounting.fairshare import HALF_LIFE_S, LEAST, MOST, factors, faded_use
from fallow.core.accounting.pacing import dispensable, extra_nodes, schedule

SPEEDS = ((1, 1.0), (2, 1.9), (4, 3.5), (8, 6.0))


def test_a_run_ahead_asks_for_nothing_and_one_behind_for_what_it_takes() -> None:
    ahead = schedule(0.0, 1000.0, 2000, 1200, 500.0)
    assert extra_nodes(ahead, SPEEDS, held=0, most=8) == 0
    behind = schedule(0.0, 1000.0, 2000, 500, 500.0)  # 1500 steps in 500 s
    assert behind.nodes(SPEEDS) == 4
    assert extra_nodes(behind, SPEEDS, held=1, most=8) == 3
    assert extra_nodes(behind, SPEEDS, held=1, most=2) == 1
    assert extra_nodes(behind, SPEEDS, held=5, most=8) == 0


def test_extra_nodes_go_only_with_some_slack_and_if_the_rest_is_fast_enough() -> None:
    slightly = schedule(0.0, 1000.0, 2000, 1050, 500.0)
    assert not dispensable(slightly, SPEEDS, held=8, extra=1), "asked back at once otherwise"
    well = schedule(0.0, 1000.0, 2000, 1300, 500.0)
    assert well.comfortable
    assert dispensable(well, SPEEDS, held=3, extra=1)
    assert not dispensable(well, SPEEDS, held=2, extra=1)


def test_use_fades_by_half_in_a_half_life() -> None:
    at = 10 * HALF_LIFE_S
    recent = faded_use([(at - 100.0, at)], at)
    assert recent == pytest.approx(100.0, rel=1e-2)
    assert faded_use([(at - HALF_LIFE_S - 100.0, at - HALF_LIFE_S)], at) == pytest.approx(recent / 2)
    assert faded_use([(at + 5.0, at + 9.0), (at - 1.0, at + 50.0)], at) == pytest.approx(1.0, rel=1e-3)


def test_projects_that_had_their_due_count_alike() -> None:
    assert factors({}) == {}
    assert factors({"a": 1e6}) == {"a": 1.0}
    assert factors({"a": 5e5, "b": 5e5}) == {"a": 1.0, "b": 1.0}
    greedy = factors({"a": 1e7, "b": 0.0})
    assert greedy["a"] == pytest.approx(0.5, rel=0.01)
    assert greedy["b"] == pytest.approx(2.0, rel=0.01)
    shut_out = factors({"a": 1e12, "b": 0.0, "c": 0.0, "d": 0.0, "e": 0.0})
    assert shut_out["a"] == LEAST and max(shut_out.values()) <= MOST, "nobody is shut out"
