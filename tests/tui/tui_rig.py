"""A head made of a queue, clocks that stand still, and a look at the screen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from textual.pilot import Pilot

from fallow.model import (
    AllocationKind,
    AllocationState,
    AllocationView,
    EventRecord,
    HeadView,
    MemberPhase,
    MemberView,
    NodeOwner,
    NodeView,
    RunStatus,
    RunView,
    Snapshot,
)
from fallow_tui.app import TopApp

DEADLINE_S = 60.0
START = 1_790_000_000.0


def member(node: str, rank: int | None = 0, phase: MemberPhase = MemberPhase.MEMBER, **more: Any) -> MemberView:
    values: dict[str, Any] = {
        "member": f"m-{node}",
        "node": node,
        "token": f"t-{node}",
        "allocation": AllocationKind.HARVEST,
        "phase": phase,
        "rank": rank,
        "workers": 1,
        "step": 120,
        "ends_in_s": 300.0,
        "last_seen_s": 0.5,
    }
    return MemberView(**values | more)


def run_view(run: str = "digits-1", members: list[MemberView] | None = None, **more: Any) -> RunView:
    members = [member("n1", allocation=AllocationKind.BASE), member("n2", 1)] if members is None else members
    values: dict[str, Any] = {
        "run": run,
        "name": run.rsplit("-", 1)[0],
        "status": RunStatus.TRAINING,
        "min_nodes": 1,
        "max_nodes": 4,
        "limit": 4,
        "generation": 7,
        "step": 120,
        "total_steps": 1000,
        "epoch": 0,
        "loss": 0.731,
        "samples_per_s": 1234.0,
        "members": members,
        "allocations": [_allocation(view) for view in members],
        "change": None,
    }
    return RunView(**values | more)


def _allocation(view: MemberView) -> AllocationView:
    """The job of a member."""
    of_it = {"token": view.token, "kind": view.allocation, "nodes": [view.node], "ends_in_s": view.ends_in_s}
    return AllocationView(**of_it, state=AllocationState.RUNNING, job_id="71", partition="gpu")


def node_view(node: str, owner: NodeOwner = NodeOwner.IDLE, run: str | None = None, **more: Any) -> NodeView:
    return NodeView(node=node, partitions=["gpu"], state="IDLE", owner=owner, run=run, **more)


def snapshot(at: float = START, last_event: int = 0, **more: Any) -> Snapshot:
    head = HeadView(
        version="0.1.0",
        host="login1",
        pid=4242,
        term=3,
        uptime_s=60.0,
        cluster="meadow",
        slurm_version="25.11.2",
        slurm_error=None,
        poll_age_s=2.0,
        poll_interval_s=10.0,
        polls=6,
        agents=2,
        workers=2,
    )
    nodes = [
        node_view("n1", NodeOwner.OURS, "digits-1"),
        node_view("n2", NodeOwner.OURS, "digits-1"),
        node_view("n3", NodeOwner.OTHERS),
        node_view("n4"),
    ]
    values: dict[str, Any] = {"at": at, "head": head, "nodes": nodes, "runs": [run_view()]}
    return Snapshot(last_event=last_event, **values | more)


def event(seq: int, kind: str = "absorb", text: str = "+n2 joined", run: str | None = "digits-1") -> EventRecord:
    return EventRecord(seq=seq, at=START + seq, run=run, kind=kind, text=text)


@dataclass
class FakeSource:
    """Hands out what the test puts in; remembers what it was asked for."""

    name: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refuse: Exception | None = None
    _asked: asyncio.Event = field(default_factory=asyncio.Event)
    _items: asyncio.Queue[Snapshot | EventRecord | Exception] = field(default_factory=asyncio.Queue)

    async def subscribe(self) -> AsyncIterator[Snapshot | EventRecord]:
        while True:
            item = await self._items.get()
            try:
                if isinstance(item, Exception):
                    raise item
                yield item
            finally:
                self._items.task_done()

    async def call(self, method: str, **params: Any) -> None:
        self.calls.append((method, params))
        self._asked.set()
        if self.refuse is not None:
            raise self.refuse

    async def was_asked(self) -> None:
        """Waits for the first request."""
        async with asyncio.timeout(DEADLINE_S):
            await self._asked.wait()

    async def take(self, *items: Snapshot | EventRecord | Exception) -> None:
        """Gives the items to the monitor and waits until it has taken them."""
        for item in items:
            self._items.put_nowait(item)
        async with asyncio.timeout(DEADLINE_S):
            await self._items.join()


class Clock:
    """Stands still until moved."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass
class Rig:
    """The monitor on a screen, with everything around it."""

    app: TopApp
    source: FakeSource
    monotonic: Clock
    pilot: Pilot[None]

    async def send(self, *items: Snapshot | EventRecord | Exception) -> None:
        """Gives the items to the monitor and waits until they are on the screen."""
        await self.source.take(*items)
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    def screen(self) -> list[str]:
        """What is on the screen, line by line."""
        return ["".join(segment.text for segment in strip) for strip in self.app.screen._compositor.render_strips()]

    def text(self) -> str:
        return "\n".join(self.screen())


@asynccontextmanager
async def opened(
    *items: Snapshot | EventRecord | Exception,
    size: tuple[int, int] = (120, 40),
    read_only: bool = False,
    notifications: bool = False,
) -> AsyncIterator[Rig]:
    """The monitor as it shows these items."""
    source, monotonic = FakeSource(), Clock(100.0)
    app = TopApp(source, read_only=read_only, monotonic=monotonic, wall=Clock(START), retry_s=0.0)
    async with app.run_test(size=size, notifications=notifications) as pilot:
        rig = Rig(app, source, monotonic, pilot)
        await rig.send(*items)
        yield rig
