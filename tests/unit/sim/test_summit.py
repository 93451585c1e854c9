"""Holes as on Summit: what is known of the source is in the file."""

from __future__ import annotations

import pytest

from fallow.sim.traces import open_trace
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.shipped import SUMMIT_NODES

DAYS = 5.0
DAY_S = 86400.0


def test_five_days_are_as_the_source_and_nodes_come_and_go_in_turn() -> None:
    holes = open_trace("summit", Window(days=DAYS))
    assert holes.changes is not None
    events, since, lengths, node_s, last = [], dict[int, float](), list[float](), 0.0, holes.begin
    for at, joined, left in holes.changes:
        assert (holes.begin <= last < at < holes.end or not events) and (at - holes.begin) % 10 == 0
        node_s += len(since) * (at - last)
        lengths += [at - begun for begun in map(since.pop, left) if begun > holes.begin]
        assert since.keys().isdisjoint(joined) and set(joined) <= set(range(SUMMIT_NODES))
        since.update(dict.fromkeys(joined, at))
        events.append((bool(joined), bool(left)))
        last = at
    node_s += len(since) * (holes.end - last)
    lengths.sort()

    quantiles = {0.1: 91, 0.25: 162, 0.5: 475, 0.75: 1397, 0.9: 3269, 0.95: 4723}
    assert {part: lengths[int(part * len(lengths))] for part in quantiles} == pytest.approx(quantiles, rel=0.15)
    usable = {10: 0.992, 30: 0.975, 60: 0.950, 120: 0.903, 300: 0.798, 600: 0.669}
    found = {cost: sum(max(0.0, length - cost) for length in lengths) / sum(lengths) for cost in usable}
    assert found == pytest.approx(usable, abs=0.015)
    assert node_s / (DAYS * DAY_S) == pytest.approx(391, rel=0.15)
    assert len(lengths) / DAYS == pytest.approx(28367, rel=0.1)
    assert len(events) / DAYS == pytest.approx(23883 / 14.9, rel=0.1)
    joins, leaves = map(sum, zip(*events, strict=True))
    assert joins / DAYS == pytest.approx(14691 / 14.9, rel=0.1)
    assert leaves / DAYS == pytest.approx(11015 / 14.9, rel=0.15)
