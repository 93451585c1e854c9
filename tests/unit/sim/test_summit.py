"""Holes as on Summit: what is known of the source comes out again."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from fallow.model import Exit, FallowError
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.summit import NODES, SummitHoles, read_percentiles
from fallow.sim.types import Scheduler
from fallow.traces import trace_path

DAY_S = 86400.0


def drawn(days: float, seed: int = 0, begin_day: float = 0.0) -> SummitHoles:
    window = Window(seed=seed, begin_day=begin_day, days=days)
    return SummitHoles(trace_path("summit"), window, "nograce", Scheduler())


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
    means = {"hole_length_s": 1192.0, "join_batch_nodes": 29.0, "inter_event_s": 53.9}
    for name, column in read_percentiles(trace_path("summit")).items():
        parts = 20_000
        mean = sum(column.at((part + 0.5) / parts) for part in range(parts)) / parts
        assert mean == pytest.approx(means[name], rel=0.01)
        assert column.at(1.0) > column.at(0.999) > column.at(0.99)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("hole_length_s", "length"), "hole_length_s"),
        (lambda text: text.replace("\n7,82,", "\n7,x,"), "'x'"),
        (lambda text: text.replace("\n7,82,2,1,1,10", ""), "101 percentiles"),
        (lambda text: text.replace("\n7,82,", "\n7,70,"), "column hole_length_s"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "percentiles.csv"
    path.write_text(change(trace_path("summit").read_text()))  # type: ignore[operator]
    with pytest.raises(FallowError, match=message) as refused:
        read_percentiles(path)
    assert refused.value.code == Exit.DATA
