"""What is learned from polls and from nodes that come."""

from __future__ import annotations

import pytest

from builders import NOW, allocation, cluster, gpu_node, preempting
from fallow.core.accounting.backoff import Asker
from fallow.core.planning import allowance
from fallow.core.planning.learner import Learner
from fallow.core.planning.rules import HarvestRules


def test_nodes_that_come_at_once_are_counted_and_count_less_with_time() -> None:
    learner, rules = Learner(), HarvestRules()

    def at_once(at: float, *idle: str, ours: tuple[str, ...] = ()) -> float:
        mine = [(allocation(name, nodes=[name], start_at=at - 10.0), Asker()) for name in ours]
        nodes = [gpu_node(f"n{i}", "IDLE" if f"n{i}" in idle else "ALLOCATED") for i in range(9)]
        learner.take_in(preempting(nodes, at=at), mine, rules, at)
        return learner.known.experience.at_once(at)

    assert at_once(0.0, "n1", "n2") == 0.0, "nobody knows since when"
    assert at_once(30.0, "n1", "n2", "n3", "n4") == 2.0
    assert at_once(60.0, "n1", ours=("n2", "n5", "n6", "n7")) == 3.0, "those that a request waited for, too"
    assert at_once(90.0, "n1", "n8", ours=("n2", "n5", "n6", "n7")) == pytest.approx(3.0, rel=0.01)
    assert at_once(3660.0, "n1", "n8") == 1.5


def test_each_start_is_taken_note_of_once() -> None:
    learner, job = Learner(), allocation("t", start_at=NOW, active_at=NOW + 9.0)
    for at in (NOW - 5.0, NOW + 30.0, NOW + 60.0):
        mine = [(job, Asker())] if at > NOW else []
        learner.take_in(cluster([], at=at), mine, HarvestRules(), at)
    assert len(learner.known.experience.starts) == 1


def test_nodes_that_took_too_long_to_begin_leave_requests_as_long_as_any_may_be() -> None:
    """Else nothing was asked for in six hours, whatever was the matter."""
    learner, configured = Learner(), HarvestRules(max_minutes=120)
    for start_s, least in ((60.0, 2), (1800.0, 60), (7000.0, 120)):
        learner.known.experience.starts = [(NOW, start_s)]
        assert allowance.rules(configured, None, learner.known.experience, NOW, 30.0).min_minutes == least
