"""The make-believe cluster tells the same story every time, and obeys."""

from __future__ import annotations

import pytest

from fallow.model import EventRecord, FallowError, MemberPhase, NodeOwner, RunStatus
from fallow_tui.demo import DemoCluster, DemoSource
from fallow_tui.view import View


def _story(seed: int, seconds: int) -> tuple[View, list[EventRecord]]:
    cluster, view, events = DemoCluster(seed), View(), []
    for _ in range(seconds):
        events += cluster.advance()
        view.apply(cluster.snapshot(), cluster.at)
    return view, events


def test_same_seed_same_story() -> None:
    assert _story(3, 200)[1] == _story(3, 200)[1]
    assert _story(3, 200)[1] != _story(4, 200)[1]


def test_the_story_has_growth_and_shrinkage_on_nodes_that_are_idle() -> None:
    view, events = _story(7, 300)
    assert {"start", "absorb", "release"} <= {event.kind for event in events}
    rows = view.timeline(100, 2.0)
    assert any(len({cell.owner for cell in cells}) >= 3 for cells in rows.values())


def test_operator_requests_are_carried_out() -> None:
    cluster = DemoCluster()
    for _ in range(60):
        cluster.advance()
    run = cluster.snapshot().runs[0]
    cluster.act("drain", {"run": run.run, "nodes": [run.members[0].node]})
    cluster.advance()
    assert cluster.snapshot().runs[0].members[0].phase is MemberPhase.LEAVING
    cluster.act("cancel", {"run": run.run})
    for _ in range(5):
        cluster.advance()
    snapshot = cluster.snapshot()
    assert snapshot.runs[0].status is RunStatus.CANCELLED
    assert not any(node.run == run.run for node in snapshot.nodes if node.owner is NodeOwner.OURS)
    with pytest.raises(FallowError, match="no run nobody"):
        cluster.act("grow", {"run": "nobody", "by": 1})


async def test_the_source_streams_and_takes_requests() -> None:
    source = DemoSource(tick_s=0.0, wall=lambda: 1000.0)
    items = source.subscribe()
    kinds: set[str] = set()
    asked = False
    async for item in items:
        if isinstance(item, EventRecord):
            kinds.add(item.kind)
        elif not asked and item.at > 1000.0:
            await source.call("shrink", run=item.runs[0].run, by=1)
            asked = True
        elif asked and "shrink" in kinds:
            break
    assert "absorb" in kinds
