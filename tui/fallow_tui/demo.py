"""A simulated cluster for `fallow top --demo`, for tests and for pictures. The same seed gives the same events."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, zip_longest
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
"""Seconds from an allocation to the membership of its node."""
LEAVE_S = 2.0
POLL_S = 5.0
WARM_UP = 200
"""Seconds that are simulated before the first picture, so that the timeline is not empty."""


@dataclass(slots=True)
class _Node:
    name: str
    owner: NodeOwner = NodeOwner.DOWN
    run: str | None = None
    kind: AllocationKind = AllocationKind.HARVEST
    phase: MemberPhase = MemberPhase.STARTING
    ends_at: float = 0.0
    "Unix time at which our job on the node ends"
    number: int = 0
    "number of the run's member on the node, in order of arrival"


@dataclass(slots=True)
class _Run:
    run: str
    name: str
    base_nodes: int
    max_nodes: int
    total_steps: int
    samples_per_s: float
    step: float
    generation: int = 0
    nodes: list[_Node] = field(default_factory=list)
    arrivals: int = 0


class DemoCluster:
    """The simulated cluster. `advance` moves its virtual time by one second and returns the events."""

    def __init__(self, seed: int = 7, nodes: int = 24, start: float = 0.0) -> None:
        self.at = self._started = start
        self._random = random.Random(seed)
        self._events: list[EventRecord] = []
        "events of the current second"
        self._seq = 0
        self._runs = [
            _Run("llama-sft-0412", "llama-sft", 2, 10, 98_000, 310.0, 18_240.0),
            _Run("vit-b16-sweep3", "vit-b16", 2, 6, 90_000, 880.0, 2_210.0),
            _Run("gnn-ogb", "gnn-ogb", 1, 4, 96_000, 2400.0, 3_180.0),
        ]
        self._nodes = [_Node(f"gpu{number:03}") for number in range(1, nodes + 1)]
        base_runs = [run for run in self._runs for _ in range(run.base_nodes)]
        # The last node stays down.
        self._lifetimes = [self._lifetime(node, run) for node, run in zip_longest(self._nodes[:-1], base_runs)]
        self._next_change_at = [start + next(life) for life in self._lifetimes]
        "times at which the nodes' states change next"

    def advance(self) -> list[EventRecord]:
        """Move the time by one second; return its events."""
        self.at += 1.0
        self._events = []
        for number, life in enumerate(self._lifetimes):
            if self.at >= self._next_change_at[number]:
                self._next_change_at[number] = self.at + next(life)
        for run in self._runs:
            members = [node for node in run.nodes if node.phase is MemberPhase.MEMBER]
            run.step = min(run.total_steps, run.step + 0.6 * len(members) ** 0.9)
        return self._events

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
                ends_in_s=node.ends_at - self.at if node.run else None,
            )
            for node in self._nodes
        ]
        return Snapshot(at=self.at, head=head, nodes=nodes, runs=runs, last_event=self._seq)

    def _lifetime(self, node: _Node, run: _Run | None) -> Iterator[float]:
        """States of a node, one after the other. Yields how many seconds each lasts."""
        lasts_s, chance = self._random.uniform, self._random.random
        if run is not None:
            yield from self._serve(node, run, AllocationKind.BASE, 5400.0)
        while True:
            node.owner = NodeOwner.PLANNED
            yield lasts_s(2, 8)
            node.owner = NodeOwner.OTHERS
            yield lasts_s(30, 240)
            node.owner = NodeOwner.IDLE
            yield lasts_s(2, 9)
            while chance() < 0.7 and (candidates := [run for run in self._runs if len(run.nodes) < run.max_nodes]):
                run, hole_s = min(candidates, key=lambda run: len(run.nodes) / run.max_nodes), lasts_s(25, 160)
                self._add_event(run, "submit", f"asks for {node.name}: idle, and likely to be so for {hole_s:.0f} s")
                yield from self._serve(node, run, AllocationKind.HARVEST, hole_s)
                if chance() < 0.7:
                    break
                node.owner = NodeOwner.IDLE
                yield lasts_s(4, 12)

    def _serve(self, node: _Node, run: _Run, kind: AllocationKind, seconds: float) -> Iterator[float]:
        """The time of a node in a run, from the start of the job to its end."""
        node.owner, node.run, node.kind = NodeOwner.OURS, run.run, kind
        node.phase, node.ends_at = MemberPhase.STARTING, self.at + seconds
        node.number, run.arrivals = run.arrivals, run.arrivals + 1
        run.nodes.append(node)
        yield START_S
        node.phase = MemberPhase.MEMBER
        run.generation += 1
        pause_s = self._random.uniform(0.09, 0.22)
        how = f"joined at step {int(run.step)} after {pause_s:.2f} s of pause"
        self._add_event(run, "start" if run.generation == 1 else "absorb", f"+{node.name} {how}")
        is_lost = self._random.random() < 0.04
        yield (seconds - START_S) * (self._random.random() if is_lost else 1.0)
        if is_lost:
            self._add_event(run, "eject", f"-{node.name} stopped answering; one step was done again")
        else:
            why = f"job {self._random.randint(71_000, 72_000)} of another user needs it"
            self._add_event(run, "release", f"-{node.name} leaves at step {int(run.step)}: {why}")
            node.phase = MemberPhase.LEAVING
            yield LEAVE_S
        run.nodes.remove(node)
        run.generation += 1
        node.run = None

    def _add_event(self, run: _Run, kind: str, text: str) -> None:
        self._seq += 1
        self._events.append(EventRecord(seq=self._seq, at=self.at, run=run.run, kind=kind, text=text))

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
                ends_in_s=node.ends_at - self.at,
                last_seen_s=0.4,
                shards=2 if node.phase is MemberPhase.MEMBER else 0,
            )
            for number, node in enumerate(run.nodes)
        ]
        size = sum(member.phase is MemberPhase.MEMBER for member in members)
        changing_nodes = [member.node for member in members if member.phase is not MemberPhase.MEMBER]
        return RunView(
            run=run.run,
            name=run.name,
            status=RunStatus.TRAINING if size else RunStatus.WAITING,
            min_nodes=run.base_nodes,
            max_nodes=run.max_nodes,
            limit=run.max_nodes,
            generation=run.generation,
            step=int(run.step),
            total_steps=run.total_steps,
            epoch=int(run.step) // 1000,
            loss=6.0 / (1.0 + run.step / 900) + 0.9,
            samples_per_s=run.samples_per_s * size**0.97 * self._random.uniform(0.98, 1.02),
            members=members,
            allocations=[
                AllocationView(
                    token=f"{run.run}-{node.name}",
                    kind=node.kind,
                    state=AllocationState.RUNNING,
                    job_id=str(70_000 + int(node.name[3:])),
                    partition="gpu",
                    nodes=[node.name],
                    ends_in_s=node.ends_at - self.at,
                )
                for node in run.nodes
            ],
            change=f"waiting for {', '.join(changing_nodes)}" if changing_nodes else None,
            created_at=self._started,
        )


class DemoSource:
    """The simulated cluster in real time, one second at a time."""

    name = "demo"

    def __init__(self, seed: int = 7, wall: Callable[[], float] = time.time, tick_s: float = 1.0) -> None:
        self._cluster = DemoCluster(seed, start=wall() - WARM_UP)
        self._tick_s = tick_s

    async def subscribe(self) -> AsyncIterator[Snapshot | EventRecord]:
        yield self._cluster.snapshot()
        for second in count():
            if second >= WARM_UP:
                await asyncio.sleep(self._tick_s)
            for event in self._cluster.advance():
                yield event
            yield self._cluster.snapshot()

    async def call(self, method: str, **params: Any) -> Any:
        raise FallowError(f"{method}: the cluster is simulated and takes no requests", Exit.USAGE)
