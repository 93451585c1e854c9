"""A fake head made of a queue, clocks that stand still, and the text of the screen."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from textual.pilot import Pilot

import views
from builders import Clock
from fallow.model import AllocationKind, EventRecord, MemberPhase, MemberView, NodeOwner, NodeView, RunView, Snapshot
from fallow_tui.app import TopApp

DEADLINE_S = 60.0
TURNS = 200
"""Turns of the event loop that the rig waits for Textual; in each, Textual makes some progress."""
START = 1_790_000_000.0


def member(node: str, rank: int | None = 0, phase: MemberPhase = MemberPhase.MEMBER, **more: Any) -> MemberView:
    kind = more.pop("allocation", AllocationKind.HARVEST)
    view = views.member(node, rank=rank, phase=phase, allocation=kind, workers=1, ends_in_s=300.0)
    return views.changed(view, **{"member": f"m-{node}", "token": f"t-{node}"} | more)


def run_view(run: str = "digits-1", members: list[MemberView] | None = None, **more: Any) -> RunView:
    members = [member("n1", allocation=AllocationKind.BASE), member("n2", 1)] if members is None else members
    jobs = [
        views.allocation(each.node, token=each.token, kind=each.allocation, ends_in_s=each.ends_in_s)
        for each in members
    ]
    view = views.run(run=run, name=run.rsplit("-", 1)[0], members=members, allocations=jobs, max_nodes=4, limit=4)
    return views.changed(view, **{"generation": 7, "step": 120, "total_steps": 1000, "loss": 0.731} | more)


def node_view(node: str, owner: NodeOwner = NodeOwner.IDLE, run: str | None = None, **more: Any) -> NodeView:
    return NodeView(node=node, partitions=["gpu"], state="IDLE", owner=owner, run=run, **more)


def snapshot(at: float = START, last_event: int = 0, **more: Any) -> Snapshot:
    """A cluster with two training nodes, one idle node and one node of another user."""
    names = {"n1": NodeOwner.OURS, "n2": NodeOwner.OURS, "n3": NodeOwner.OTHERS, "n4": NodeOwner.IDLE}
    nodes = [node_view(name, owner, "digits-1" if owner is NodeOwner.OURS else None) for name, owner in names.items()]
    head = views.head(cluster="meadow", poll_age_s=2.0, poll_interval_s=10.0)
    values: dict[str, Any] = {"head": head, "nodes": nodes, "runs": [run_view()]}
    return views.changed(views.snapshot(), at=at, last_event=last_event, **values | more)


def event(seq: int, kind: str = "absorb", text: str = "+n2 joined", run: str | None = "digits-1") -> EventRecord:
    return EventRecord(seq=seq, at=START + seq, run=run, kind=kind, text=text)


@dataclass
class FakeSource:
    """A head that sends the items of the test and records its requests."""

    name: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refuse: Exception | None = None
    _has_request: asyncio.Event = field(default_factory=asyncio.Event)
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
        self._has_request.set()
        if self.refuse is not None:
            raise self.refuse

    async def was_asked(self) -> None:
        """Wait for the first request."""
        async with asyncio.timeout(DEADLINE_S):
            await self._has_request.wait()

    async def take(self, *items: Snapshot | EventRecord | Exception) -> None:
        """Give the items to the monitor, and wait until it has taken them."""
        for item in items:
            self._items.put_nowait(item)
        async with asyncio.timeout(DEADLINE_S):
            await self._items.join()


@dataclass
class Rig:
    """The monitor on a screen, with its source and clocks."""

    app: TopApp
    source: FakeSource
    monotonic: Clock
    pilot: Pilot[None]

    async def send(self, *items: Snapshot | EventRecord | Exception) -> None:
        """Give the items to the monitor, and wait until the screen shows them."""
        await self.source.take(*items)
        await self.settle()

    async def press(self, *keys: str) -> None:
        """Press each key as soon as the screen shows the effect of the previous key."""
        for key in keys:
            await self.pilot.press(key)
            await self.settle()

    async def settle(self) -> None:
        """Wait until the monitor has no work left.

        The pilot's own pause ends when the process gets little processor time, as on a busy machine. Turns of the event
        loop do not depend on the machine: each message of Textual's takes a few.
        """
        for _ in range(3):
            for _ in range(TURNS):
                await asyncio.sleep(0)
            await self.pilot.wait_for_scheduled_animations()

    def screen(self) -> list[str]:
        """Lines of the screen."""
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
    """The monitor with these items on its screen."""
    source, monotonic = FakeSource(), Clock(100.0)
    app = TopApp(source, read_only=read_only, monotonic=monotonic, wall=Clock(START), retry_s=0.0)
    async with app.run_test(size=size, notifications=notifications) as pilot:
        rig = Rig(app, source, monotonic, pilot)
        await rig.send(*items)
        yield rig
