"""Holes as on Summit: what is known of the source comes out again, and pilots cover as much of them as is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from fallow.model import Exit, FallowError
from fallow.sim.pool import PoolSim
from fallow.sim.traces.summit import MEANS, NODES, SummitHoles, read_percentiles
from fallow.sim.types import Costs, Ended, Notice, Options, Scheduler, Started, Wanted
from fallow.traces import trace_path

DAY_S = 86400.0


def drawn(days: float, seed: int = 0, begin_day: float = 0.0) -> SummitHoles:
    return SummitHoles(
        trace_path("summit"), seed, begin_day=begin_day, days=days, profile="nograce", scheduler=Scheduler()
    )


@dataclass
class Seen:
    """What is counted of some days of holes."""

    holes: SummitHoles
    lengths: list[float] = field(default_factory=list)
    "of holes that began and ended there"
    events: int = 0
    joins: int = 0
    leaves: int = 0
    node_s: float = 0.0

    def quantile(self, part: float) -> float:
        return self.lengths[int(part * len(self.lengths))]

    def usable(self, cost_s: float) -> float:
        """U(c)."""
        return sum(max(0.0, length - cost_s) for length in self.lengths) / sum(self.lengths)


@cache
def seen(days: float, seed: int) -> Seen:
    """Checks on the way that nodes come and go in turn."""
    holes = drawn(days, seed)
    found = Seen(holes)
    since: dict[int, float] = {}
    last = holes.begin
    for at, joined, left in holes.changes():
        assert holes.begin <= at < holes.end
        assert at > last or at == holes.begin
        assert joined or left
        assert (at - holes.begin) % 10 == 0
        found.node_s += len(since) * (at - last)
        for node in left:
            begun = since.pop(node)
            if begun > holes.begin:
                found.lengths.append(at - begun)
        for node in joined:
            assert node not in since
            assert 0 <= node < NODES
            since[node] = at
        found.events += 1
        found.joins += bool(joined)
        found.leaves += bool(left)
        last = at
    found.node_s += len(since) * (holes.end - last)
    found.lengths.sort()
    return found


def agrees(found: Seen, days: float) -> None:
    quantiles = {0.1: 91, 0.25: 162, 0.5: 475, 0.75: 1397, 0.9: 3269, 0.95: 4723}
    assert {part: found.quantile(part) for part in quantiles} == pytest.approx(quantiles, rel=0.15)
    usable = {10: 0.992, 30: 0.975, 60: 0.950, 120: 0.903, 300: 0.798, 600: 0.669}
    assert {cost: found.usable(cost) for cost in usable} == pytest.approx(usable, abs=0.015)
    assert found.node_s / (days * DAY_S) == pytest.approx(391, rel=0.15)
    assert found.events / days == pytest.approx(23883 / 14.9, rel=0.1)
    assert found.joins / days == pytest.approx(14691 / 14.9, rel=0.1)
    assert found.leaves / days == pytest.approx(11015 / 14.9, rel=0.15)
    assert len(found.lengths) / days == pytest.approx(28367, rel=0.1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_five_days_are_as_the_source(seed: int) -> None:
    agrees(seen(5, seed), 5)


def test_the_same_seed_draws_the_same_holes() -> None:
    assert list(drawn(0.05, 3).changes()) == list(drawn(0.05, 3).changes())
    assert list(drawn(0.05, 3).changes()) != list(drawn(0.05, 4).changes())
    assert drawn(0.05, 3, begin_day=2).begin == drawn(0.05, 3).begin + 2 * DAY_S


def test_the_last_percentile_has_the_known_mean() -> None:
    for name, column in read_percentiles(trace_path("summit")).items():
        parts = 20_000
        mean = sum(column.at((part + 0.5) / parts) for part in range(parts)) / parts
        assert mean == pytest.approx(MEANS[name], rel=0.01)
        assert column.at(1.0) > column.at(0.999) > column.at(0.99)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("hole_length_s", "length"), "hole_length_s"),
        (lambda text: text.replace("\n7,82,", "\n7,x,"), "'x'"),
        (lambda text: text.replace("\n7,82,2,1,1,10", ""), "percentiles 0, 1"),
        (lambda text: text.replace("\n7,82,", "\n7,70,"), "column hole_length_s falls"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "percentiles.csv"
    path.write_text(change(trace_path("summit").read_text()))  # type: ignore[operator]
    with pytest.raises(FallowError, match=message) as refused:
        read_percentiles(path)
    assert refused.value.code == Exit.DATA


# -- how much of the holes pilots cover ---------------------------------------------------------------------------

SET = (90, 56, 34, 22, 14, 8, 6, 4, 2)


def coverage(days: float, lengths: tuple[int, ...]) -> dict[float, float]:
    """Part of the idle time that jobs of these lengths (minutes) cover, by seconds lost at the start of each.

    The longest that fits is asked for as soon as a node is idle or its job has ended. No lengths: one job is stretched
    to each hole.
    """
    holes = drawn(days)
    free = Costs(absorb=(0, 0), release=(0, 0), eject=(0, 0), start=(0, 0))
    engine = PoolSim(holes, Options(seed=0, latency="none", plans="known", poll_s=30, costs=free))
    lost = (30.0, 120.0)
    covered = dict.fromkeys(lost, 0.0)
    idle_s, changes, started = 0.0, list(drawn(days).changes()), {}
    at, place = holes.begin, 0
    while at < holes.end:
        todo: list[int] = []
        while place < len(changes) and changes[place][0] <= at:
            todo += changes[place][1]
            place += 1
        happenings = engine.advance(at)
        while happenings or todo:
            for each in happenings:
                if isinstance(each, Notice):
                    engine.left(each.job_id)
                elif isinstance(each, Started):
                    started[each.job_id] = each.nodes[0], each.at
                elif isinstance(each, Ended) and each.job_id in started:
                    node, begun = started.pop(each.job_id)
                    for seconds in lost:
                        covered[seconds] += max(0.0, each.at - begun - seconds)
                    if lengths:
                        todo.append(int(node[1:]) - 1)
            asked: list[str] = []
            for number in todo:
                name = f"n{number + 1:04d}"
                for minutes in lengths or [100_000]:
                    wanted = Wanted(token="t", partition="scavenge", minutes=min(minutes, 1440), node=name)
                    asked.append(engine.submit(wanted))
            todo = []
            happenings = engine.advance(at)
            begun_now = {each.job_id for each in happenings if isinstance(each, Started)}
            for job_id in asked:
                if job_id not in begun_now:
                    engine.cancel(job_id)
        idle = engine.idle_nodes()
        after = min(engine.next_at(), holes.end)
        idle_s += idle * (after - at)
        at = after
    for _, begun in started.values():
        for seconds in lost:
            covered[seconds] += max(0.0, holes.end - begun - seconds)
    return {seconds: covered[seconds] / idle_s for seconds in lost}


KNOWN = {
    SET: (0.917, 0.817),
    (5,): (0.790, 0.527),
    (10,): (0.752, 0.633),
    (20,): (0.638, 0.589),
    (60,): (0.340, 0.331),
    (120,): (0.126, 0.124),
}


@pytest.mark.parametrize("lengths", [(20,)])
def test_pilots_cover_about_as_much_in_a_day(lengths: tuple[int, ...]) -> None:
    """A single day is poor or rich in long holes."""
    assert tuple(coverage(1, lengths).values()) == pytest.approx(KNOWN[lengths], abs=0.06)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lengths", KNOWN)
def test_pilots_cover_as_much_as_is_known(lengths: tuple[int, ...]) -> None:
    assert tuple(coverage(5, lengths).values()) == pytest.approx(KNOWN[lengths], abs=0.035)
