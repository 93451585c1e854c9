"""Holes as on Summit: what is known of the source is in the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fallow.model import Exit, FallowError
from fallow.sim.traces import open_trace
from fallow.sim.traces.summit import COLUMNS, NODES, SummitHoles

DAY_S = 86400.0


def opened(days: float, begin_day: float = 0.0) -> SummitHoles:
    found = open_trace("summit", days=days, begin_day=begin_day)
    assert isinstance(found, SummitHoles)
    return found


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


def seen(days: float) -> Seen:
    """Checks on the way that nodes come and go in turn."""
    holes = opened(days)
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


def test_five_days_are_as_the_source() -> None:
    agrees(seen(5), 5)


def test_a_later_part_begins_with_as_many_as_are_idle_then() -> None:
    whole, part = opened(1), opened(1, 0.5)
    assert part.begin == whole.begin + DAY_S / 2
    before = [(joined, left) for at, joined, left in whole.changes() if at <= part.begin]
    (at, joined, left), *_ = part.changes()
    assert (at, len(joined), left) == (part.begin, sum(len(came) - len(went) for came, went in before), ())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0,x,1", "'x'"),
        ("100,90,1", "it ends before it begins"),
        (f"0,10,{NODES}\n5,10,1", f"more than {NODES} nodes are idle at once"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "holes.csv"
    path.write_text(f"{','.join(COLUMNS)}\n{row}\n")
    with pytest.raises(FallowError, match=message) as refused:
        open_trace(path)
    assert refused.value.code == Exit.DATA
