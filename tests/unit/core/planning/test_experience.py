"""What is learned from polls and nodes that come, and of how fast runs train."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import NOW, allocation, cluster, gpu_node, preempting
from fallow.core.accounting.backoff import Asker
from fallow.core.planning import allowance
from fallow.core.planning.gain import MEMORY_S, SIZES, Curve, pooled, speeds
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


# -- throughput: prior, fit, stairs, memory, pooling ------------------------------------------------------------------


def learned(shards: int, times: dict[int, float], shard_s: float | None = None) -> Curve:
    curve = Curve(shard_s=shard_s)
    for members, step_s in times.items():
        for _ in range(10):
            curve.observe(members, step_s, 60.0, NOW)
    return curve


def test_measured_sizes_are_met_and_the_others_follow_the_shape_between_them() -> None:
    times = {1: 33.0, 4: 9.0, 16: 3.0}
    found = dict(speeds(learned(32, times), 32, 1, 32))
    assert [found[workers] for workers in times] == pytest.approx([1.0 / step_s for step_s in times.values()])
    assert found[4] < found[8] < found[16] < found[32] < 2 * found[16]


@settings(max_examples=100, deadline=None)
@given(
    times=st.dictionaries(st.integers(1, 64), st.floats(0.01, 100), max_size=8),
    shards=st.integers(1, 200),
    slots=st.integers(1, 8),
    pace=st.none() | st.floats(0.001, 10),
)
def test_speeds_rise_with_the_nodes_whatever_was_measured(
    times: dict[int, float], shards: int, slots: int, pace: float | None
) -> None:
    found = speeds(learned(shards, times, pace), shards, slots, 300)
    assert found[0][0] == 1
    for (fewer, slower), (more, faster) in pairwise(found):
        assert fewer < more
        assert 0 < slower < faster < math.inf
    assert found[-1][0] <= max(1, -(-shards // slots))


def test_newer_measurements_replace_older_ones_and_memory_is_bounded() -> None:
    curve = learned(8, {2: 10.0})
    for _ in range(40):
        curve.observe(2, 1.0, 60.0, NOW)
    assert curve.seen[2].step_s == pytest.approx(1.0, rel=0.2)
    assert curve.seen[2].weight_s == MEMORY_S
    for m in range(1, 200):
        curve.observe(m, 1.0, 15.0 if m != 2 else 600.0, NOW + m)
    assert len(curve.seen) == SIZES
    assert 2 in curve.seen, "the least certain goes first"
    assert len(msgspec.msgpack.encode(curve)) < 2500


def test_earlier_runs_of_the_same_script_tell_what_to_expect() -> None:
    before = learned(8, {1: 8.0, 4: 2.4}, 1.0)
    merged = pooled(Curve(), [before], NOW)
    assert set(merged.seen) == {1, 4}
    assert merged.shard_s == 1.0
    own = Curve()
    own.observe(4, 4.8, MEMORY_S, NOW)
    both = pooled(own, [before], NOW)
    assert 3.6 < both.seen[4].step_s < 4.8, "own measurements count more"
    later = NOW + 60 * 86400.0
    own.observe(4, 4.8, 60.0, later)
    assert pooled(own, [before], later).seen[4].step_s > 4.7, "old ones fade"
