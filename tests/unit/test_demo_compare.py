"""The figures of the long comparison, from hand-made observations with known answers."""

from __future__ import annotations

import pytest

from fallow.demo.compare import JobTimes, compare, start_ups, usable
from fallow.demo.measure import Sample
from fallow.model import ChangeKind, GenerationReport, Parts


def sample(at: float, idle: str = "", ours: str = "", others: str = "") -> Sample:
    return Sample(at, frozenset(idle), frozenset(ours), frozenset("b"), frozenset(others), ())


def generation(number: int, at: float, *members: str) -> GenerationReport:
    kind = ChangeKind.ABSORB
    return GenerationReport(
        generation=number, kind=kind, members=list(members), first_step=0, pause_s=0.0, parts=Parts(), at=at
    )


NODES = {"w0": "b", "w1": "x", "w2": "y"}
SAMPLES = [
    sample(0, idle="x", others="y"),
    sample(1, ours="x", idle="y"),
    sample(2, ours="x", others="y"),
    sample(4, ours="x", others="y"),
    sample(8, others="xy"),
    sample(9, idle="xy"),
]
GENERATIONS = [generation(1, 0.0, "w0"), generation(2, 3.5, "w0", "w1")]


def test_waiting_times_of_the_same_jobs() -> None:
    ours = {"a": JobTimes(0, 5), "b": JobTimes(1, 11), "c": JobTimes(2, None), "d": JobTimes(3, 3)}
    theirs = {"a": JobTimes(0, 3), "b": JobTimes(1, 1), "c": JobTimes(2, 2), "e": JobTimes(3, 3)}
    found = compare(ours, theirs, rule_s=5.0)
    assert (found.compared, found.later, found.beyond_rule, found.max_s) == (2, 2, 1, 10.0)
    assert (found.waited_s, found.waited_without_s, found.worst) == (15.0, 3.0, ("b +10 s", "a +2 s"))
    assert compare({}, theirs, 5.0).max_s == 0.0


def test_only_holes_that_are_longer_than_a_start_up_count() -> None:
    found = usable(SAMPLES, GENERATIONS, NODES, 1.5, 0.0, 9.0)
    assert (found.idle_node_s, found.harvested_node_s) == (8.0, 4.0), "x from 0 to 8, a member from the look at 4"
    found = usable(SAMPLES, GENERATIONS, NODES, 0.5, 0.5, 9.0)
    assert found.idle_node_s == pytest.approx(7.5 + 1.0)


def test_start_ups() -> None:
    assert start_ups(SAMPLES, GENERATIONS, NODES) == [3.0]
