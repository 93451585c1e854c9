"""A make-believe cluster for `fallow top --demo`, for tests and for pictures. Seeded: the same story every time."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from fallow.model import (
    AllocationKind,
    AllocationState,
    AllocationView,
    EventRecord,
    Exit,
    FallowError,
    HeadView,
    MemberPhase,
    MemberView,
    NodeOwner,
    NodeView,
    RunStatus,
    RunView,
    Snapshot,
)

START_S = 6.0
"""From allocation to member."""
LEAVE_S = 2.0
POLL_S = 5.0
WARM_UP = 200
"""Seconds of story before the first picture, so that the timeline has something to tell."""


@dataclass(slots=True)
class _Node:
    name: str
    owner: NodeOwner = NodeOwner.IDLE
    until: float = 0.0
    "when the present owner's time ends"
    run: str | None = None
    kind: AllocationKind = AllocationKind.HARVEST
    phase: MemberPhase = MemberPhase.STARTING
    since: float = 0.0
    number: int = 0
    "of the run's member there, in order of arrival"


@dataclass(slots=True)
class _Run:
    run: str
    name: str
    base: int
    most: int
    total: int
    rate: float
    step: float = 0.0
    generation: int = 0
    nodes: list[_Node] = field(default_factory=list)
    arrivals: int = 0


class DemoCluster:
    """Virtual time only: `advance` moves it by one second and returns what happened."""

    def __init__(self, seed: int = 7, nodes: int = 24, start: float = 0.0) -> None:
        self.at = start
        self._random = random.Random(seed)
        self._started = start
        self._seq = 0
        self._nodes = [_Node(f"gpu{number:03}") for number in range(1, nodes + 1)]
        self._runs = [
            _Run("llama-sft-0412", "llama-sft", 2, 10, 42_000, 310.0, step=18_240),
            _Run("vit-b16-sweep3", "vit-b16", 2, 6, 9_000, 880.0, step=2_210),
            _Run("gnn-ogb", "gnn-ogb", 1, 4, 3_600, 2400.0, step=3_180),
        ]
        free = list(self._nodes)
        for run in self._runs:
            for _ in range(run.base):
                self._take(run, free.pop(0), AllocationKind.BASE, 5400.0)
        for node in free:
            if self._random.random() < 0.8:
                self._give_to_others(node)
        self._nodes[-1].owner = NodeOwner.DOWN

    def advance(self) -> list[EventRecord]:
        """One second passes."""
        self.at += 1.0
        events: list[EventRecord] = []
        for node in self._nodes:
            self._move(node, events)
        for run in self._runs:
            members = [node for node in run.nodes if node.phase is MemberPhase.MEMBER]
            run.step = min(run.total, run.step + 0.6 * len(members) ** 0.9)
        return events

    def snapshot(self) -> Snapshot:
        runs = [self._view(run) for run in self._runs]
        head = HeadView(
            version="0.1.0",
            host="login1",
            pid=4242,
            term=3,
            uptime_s=7200.0 + self.at - self._started,
            cluster="meadow",
            slurm_version="25.11.2",
            slurm_error=None,
            poll_age_s=self.at % POLL_S,
            poll_interval_s=POLL_S,
            polls=int((self.at - self._started) / POLL_S),
            agents=sum(len(run.members) for run in runs),
            workers=sum(len(run.members) for run in runs),
        )
        nodes = [
            NodeView(
                node=node.name,
                partitions=["gpu"],
                state={NodeOwner.IDLE: "idle", NodeOwner.DOWN: "down*", NodeOwner.PLANNED: "planned"}.get(
                    node.owner, "allocated"
                ),
                owner=node.owner,
                run=node.run,
                gpus=4,
                ends_in_s=node.until - self.at if node.run else None,
            )
            for node in self._nodes
        ]
        return Snapshot(at=self.at, head=head, nodes=nodes, runs=runs, last_event=self._seq)

    def _move(self, node: _Node, events: list[EventRecord]) -> None:
        run = next((run for run in self._runs if node in run.nodes), None)
        if run is not None:
            self._move_ours(node, run, events)
        elif node.owner is NodeOwner.OTHERS and self.at >= node.until:
            node.owner, node.until = NodeOwner.IDLE, self.at + self._random.uniform(2, 9)
        elif node.owner is NodeOwner.PLANNED and self.at >= node.until:
            self._give_to_others(node)
        elif node.owner is NodeOwner.IDLE and self.at >= node.until:
            self._offer(node, events)

    def _move_ours(self, node: _Node, run: _Run, events: list[EventRecord]) -> None:
        if node.phase is MemberPhase.STARTING and self.at - node.since >= START_S:
            node.phase = MemberPhase.MEMBER
            run.generation += 1
            kind = "start" if run.generation == 1 else "absorb"
            pause = self._random.uniform(0.09, 0.22)
            events.append(
                self._event(run, kind, f"+{node.name} joined at step {int(run.step)} after {pause:.2f} s of pause")
            )
        elif node.phase is MemberPhase.MEMBER and self._random.random() < 0.0004:
            events.append(self._event(run, "eject", f"-{node.name} stopped answering; one step was done again"))
            self._drop(node, run)
        elif node.phase is MemberPhase.MEMBER and self.at >= node.until:
            why = f"job {self._random.randint(71_000, 72_000)} of another user needs it"
            events.append(self._event(run, "release", f"-{node.name} leaves at step {int(run.step)}: {why}"))
            node.phase, node.since = MemberPhase.LEAVING, self.at
        elif node.phase is MemberPhase.LEAVING and self.at - node.since >= LEAVE_S:
            self._drop(node, run)

    def _drop(self, node: _Node, run: _Run) -> None:
        run.nodes.remove(node)
        run.generation += 1
        node.run = None
        if self._random.random() < 0.7:
            node.owner, node.until = NodeOwner.PLANNED, self.at + self._random.uniform(2, 6)
        else:
            node.owner, node.until = NodeOwner.IDLE, self.at + self._random.uniform(4, 12)

    def _offer(self, node: _Node, events: list[EventRecord]) -> None:
        wanting = [run for run in self._runs if len(run.nodes) < run.most]
        hole = self._random.uniform(25, 160)
        if not wanting or self._random.random() < 0.3:
            node.owner, node.until = NodeOwner.PLANNED, self.at + self._random.uniform(2, 8)
            return
        run = min(wanting, key=lambda run: len(run.nodes) / run.most)
        self._take(run, node, AllocationKind.HARVEST, hole)
        events.append(self._event(run, "submit", f"asks for {node.name}: idle, and likely to be so for {hole:.0f} s"))

    def _take(self, run: _Run, node: _Node, kind: AllocationKind, seconds: float) -> None:
        node.owner, node.run, node.kind = NodeOwner.OURS, run.run, kind
        node.phase, node.since, node.until = MemberPhase.STARTING, self.at, self.at + seconds
        node.number, run.arrivals = run.arrivals, run.arrivals + 1
        run.nodes.append(node)

    def _give_to_others(self, node: _Node) -> None:
        node.owner, node.until = NodeOwner.OTHERS, self.at + self._random.uniform(30, 240)

    def _event(self, run: _Run, kind: str, text: str) -> EventRecord:
        self._seq += 1
        return EventRecord(seq=self._seq, at=self.at, run=run.run, kind=kind, text=text)

    def _view(self, run: _Run) -> RunView:
        members = [
            MemberView(
                member=f"n{node.number}",
                node=node.name,
                token=f"{run.run}-{node.name}",
                allocation=node.kind,
                phase=node.phase,
                rank=number if node.phase is MemberPhase.MEMBER else None,
                workers=1,
                step=int(run.step),
                ends_in_s=node.until - self.at,
                last_seen_s=0.4,
                shards=2 if node.phase is MemberPhase.MEMBER else 0,
            )
            for number, node in enumerate(run.nodes)
        ]
        size = sum(member.phase is MemberPhase.MEMBER for member in members)
        moving = [member.node for member in members if member.phase is not MemberPhase.MEMBER]
        status = RunStatus.TRAINING if size else RunStatus.WAITING
        if run.step >= run.total:
            status = RunStatus.FINISHED
        return RunView(
            run=run.run,
            name=run.name,
            status=status,
            min_nodes=run.base,
            max_nodes=run.most,
            limit=run.most,
            generation=run.generation,
            step=int(run.step),
            total_steps=run.total,
            epoch=int(run.step) // 1000,
            loss=6.0 / (1.0 + run.step / 900) + 0.9,
            samples_per_s=run.rate * size**0.97 * self._random.uniform(0.98, 1.02),
            members=members,
            allocations=[
                AllocationView(
                    token=f"{run.run}-{node.name}",
                    kind=node.kind,
                    state=AllocationState.RUNNING,
                    job_id=str(70_000 + int(node.name[3:])),
                    partition="gpu",
                    nodes=[node.name],
                    ends_in_s=node.until - self.at,
                )
                for node in run.nodes
            ],
            change=f"waiting for {', '.join(moving)}" if moving else None,
            created_at=self._started,
        )


class DemoSource:
    """The make-believe cluster in real time, one second at a time."""

    name = "demo"

    def __init__(self, seed: int = 7, wall: Callable[[], float] = time.time, tick_s: float = 1.0) -> None:
        self._cluster = DemoCluster(seed, start=wall() - WARM_UP)
        self._tick_s = tick_s

    async def subscribe(self) -> AsyncIterator[Snapshot | EventRecord]:
        yield self._cluster.snapshot()
        for second in itertools.count():
            if second >= WARM_UP:
                await asyncio.sleep(self._tick_s)
            for event in self._cluster.advance():
                yield event
            yield self._cluster.snapshot()

    async def call(self, method: str, **params: Any) -> Any:
        raise FallowError(f"{method}: the cluster is made up; it takes no requests", Exit.USAGE)
