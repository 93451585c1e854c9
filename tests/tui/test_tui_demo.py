"""The make-believe cluster tells the same story every time."""

from __future__ import annotations

import pytest

from fallow.model import EventRecord, FallowError, Snapshot
from fallow_tui.demo import DemoCluster, DemoSource
from fallow_tui.view import View


def _story(seed: int, seconds: int) -> tuple[View, list[EventRecord]]:
    cluster, view, events = DemoCluster(seed), View(), []
    for _ in range(seconds):
        events += cluster.advance()
        view.apply(cluster.snapshot(), cluster.at)
    return view, events


def test_the_story_has_growth_and_shrinkage_on_nodes_that_are_idle() -> None:
    view, events = _story(7, 300)
    assert {"start", "absorb", "release"} <= {event.kind for event in events}
    rows = view.timeline(100, 2.0)
    assert any(len({cell.owner for cell in cells}) >= 3 for cells in rows.values())


async def test_the_source_streams_and_takes_no_requests() -> None:
    source = DemoSource(tick_s=0.0, wall=lambda: 1000.0)
    async for item in source.subscribe():
        if isinstance(item, Snapshot) and item.at > 1000.0:
            break
    with pytest.raises(FallowError, match="made up"):
        await source.call("shrink", run=item.runs[0].run, by=1)
