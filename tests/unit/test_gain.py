"""Throughput learned from what runs do: prior, fit, stairs, memory, pooling."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.gain import MEMORY_S, SIZES, Curve, Seen, fit, pooled, with_losses

NOW = 1_000_000.0


def learned(shards: int, times: dict[int, float], shard_s: float | None = None) -> Curve:
    curve = Curve(shard_s=shard_s)
    for members, step_s in times.items():
        for _ in range(10):
            curve.observe(members, step_s, 60.0, NOW)
    return curve


def true_step_s(members: int, shards: int, shard: float, rest: float, talk: float) -> float:
    return shard * -(-shards // members) + rest + talk * math.log2(members)


def test_without_any_measurement_the_prior_is_near_the_best_published_curves() -> None:
    prior = fit(Curve(), 64, NOW)
    efficiency = prior.step_s(1) / prior.step_s(64) / 64
    assert 0.7 < efficiency < 0.9


def test_members_beyond_the_shards_gain_nothing_and_only_whole_shards_count() -> None:
    known = fit(learned(8, {1: 8.2}), 8, NOW)
    assert known.step_s(8) == known.step_s(50)
    assert [nodes for nodes, _ in known.speeds(1, 100)] == [1, 2, 3, 4, 8]
    assert [nodes for nodes, _ in known.speeds(4, 100)] == [1, 2]
    assert [nodes for nodes, _ in fit(Curve(), 64, NOW).speeds(1, 20)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16]


@settings(max_examples=60, deadline=None)
@given(
    shard=st.floats(0.01, 5),
    rest=st.floats(0, 2),
    talk=st.floats(0, 0.5),
    sizes=st.sets(st.sampled_from([1, 2, 4, 8, 16]), min_size=3),
)
def test_measured_sizes_are_met_and_the_next_ones_foretold(
    shard: float, rest: float, talk: float, sizes: set[int]
) -> None:
    times = {m: true_step_s(m, 32, shard, rest * shard, talk * shard) for m in sizes}
    known = fit(learned(32, times, shard), 32, NOW)
    for m, step_s in times.items():
        assert known.step_s(m) == pytest.approx(step_s, rel=0.05)
    assert known.step_s(32) == pytest.approx(true_step_s(32, 32, shard, rest * shard, talk * shard), rel=0.45)


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
    fitted = fit(learned(shards, times, pace), shards, NOW)
    found = fitted.speeds(slots, 300)
    assert found == [(nodes, 1.0 / fitted.step_s(nodes * slots)) for nodes, _ in found]
    assert found[0][0] == 1
    for (fewer, slower), (more, faster) in pairwise(found):
        assert fewer < more
        assert 0 < slower < faster < math.inf
    assert len(found) <= 2 * math.isqrt(shards) + 2


@settings(max_examples=60, deadline=None)
@given(
    shard=st.floats(0.01, 5),
    rest=st.floats(0, 2),
    talk=st.floats(0, 0.5),
    noise=st.lists(st.floats(0.9, 1.1), min_size=5, max_size=5),
)
def test_where_shards_divide_evenly_gains_diminish(shard: float, rest: float, talk: float, noise: list[float]) -> None:
    """Concave up to the stairs: from one size to twice as many, the speed less than doubles, more so each time."""
    sizes = (1, 2, 4, 8, 16)
    times = {m: true_step_s(m, 64, shard, rest * shard, talk * shard) * n for m, n in zip(sizes, noise, strict=True)}
    known = fit(learned(64, times, shard), 64, NOW)
    ratios = [known.step_s(m) / known.step_s(2 * m) for m in (1, 2, 4, 8, 16, 32)]
    assert max(ratios) <= 2 + 1e-9


def test_a_size_that_turns_out_bad_makes_larger_ones_look_worse() -> None:
    hopeful = fit(learned(32, {1: 32.2}), 32, NOW)
    sobered = fit(learned(32, {1: 32.2, 8: 30.0}), 32, NOW)
    assert hopeful.step_s(16) < 3
    assert sobered.step_s(16) > 15


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
    assert 199 in curve.seen
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


def test_spare_nodes_are_worth_what_they_insure_against() -> None:
    speeds = fit(learned(8, {1: 8.2}, 1.0), 8, NOW).speeds(1, 8)
    sure = dict(with_losses(speeds, 0.0, 8))
    assert sure == dict(speeds), "without losses a spare is worth nothing"
    counted = dict(with_losses(speeds, 0.02, 8))
    assert list(counted) == [1, 2, 3, 4, 5, 6, 7, 8]
    steps = dict(speeds)
    assert all(counted[n] < steps[n] for n in steps)
    assert counted[1] == pytest.approx(0.98 * steps[1])
    exact = sum(math.comb(4, k) * 0.02**k * 0.98 ** (4 - k) * steps.get(4 - k, 0.0) for k in range(5))
    assert counted[4] == pytest.approx(exact, rel=1e-9)
    assert 0 < counted[5] - counted[4] < 0.2 * (counted[8] - counted[4]) / 4


@settings(max_examples=60, deadline=None)
@given(shards=st.integers(1, 100), loss=st.floats(0, 0.5), most=st.integers(1, 80), beyond=st.integers(0, 80))
def test_what_can_be_counted_on_rises_with_the_nodes(shards: int, loss: float, most: int, beyond: int) -> None:
    """Whether the curve goes further than the nodes that there may be, or not."""
    speeds = fit(Curve(), shards, NOW).speeds(1, most + beyond)
    counted = with_losses(speeds, loss, most)
    assert [n for n, _ in counted] == sorted({n for n, _ in counted})
    assert all(0 < slower < faster for (_, slower), (_, faster) in pairwise(counted))
    within = [(n, speed) for n, speed in speeds if n <= most]
    assert {n for n, _ in within} <= {n for n, _ in counted} <= set(range(1, most + 1))
    assert counted[-1][1] <= within[-1][1] + 1e-12
    assert counted == with_losses(within, loss, most)


def test_a_curve_survives_the_store() -> None:
    curve = learned(8, {1: 8.0, 4: 2.4}, 1.0)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(curve), type=Curve)
    assert again == curve
    assert again.seen[4] == Seen(2.4, 600.0, NOW)
