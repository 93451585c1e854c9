"""The head's Slurm side without processes: on a scripted cluster, or with polls that a test makes up."""

from concurrent.futures import wait
from pathlib import Path
from typing import Any

import msgspec

from builders import cluster, job, node, partition, site
from fallow.config import Config
from fallow.config import Harvest as HarvestSection
from fallow.core.allocations import Agent, Allocation
from fallow.head.api.operations import Operations
from fallow.head.loop.turn import Turn
from fallow.head.slurm import accounts
from fallow.head.slurm.harvest import Harvest
from fallow.head.state.registry import Run
from fallow.model import AllocationKind, AllocationState, ClusterConfig, JobInfo
from fallow.slurm.client import SubmitRejected
from runs import CONTRACT, NOW, Nodes, new_book, new_run
from scripted_slurm import ScriptedSlurm

POLL_S = 30.0
NODES = [f"n{i}" for i in range(1, 5)]


class Site:
    """A head's harvest and the cluster that it sees."""

    def __init__(self, folder: Path, slurm: ScriptedSlurm, section: HarvestSection | None = None) -> None:
        self.slurm = slurm
        self.config = Config(harvest=section or HarvestSection(partitions=["scavenge"]))
        self.book = new_book(folder, self.config)
        self.harvest = Harvest(self.config)
        self.events: list[tuple[str, str]] = []
        self.notes: dict[str, bytes] = {}

    def run(self, *options: str, nodes: int = 2) -> Run:
        """A run that can use so many nodes, has none, and whose script is known to work."""
        now, script = self.slurm.now, "#!/bin/sh\nfallow run -- true\n"
        run = new_run(self.book, now=now, max_nodes=nodes, script=script, cwd="/tmp", harvest_options=list(options))
        run.record.base_wanted, run.record.slots = False, 1
        return run

    def turn(self) -> Turn:
        return Turn(self.book, self.slurm.now, self.slurm.now)

    async def poll(self, after_s: float = POLL_S, times: int = 1) -> None:
        for _ in range(times):
            await self._poll(after_s)

    async def _poll(self, after_s: float) -> None:
        self.slurm.advance(after_s)
        turn = self.turn()
        site = await self.slurm.config()
        self.harvest.polled(turn, await self.slurm.poll(), site)
        for run_id, token in turn.submissions:
            run = self.book.runs[run_id]
            request = self.harvest.request(self.book.paths, run, run.allocations[token])
            try:
                self.harvest.note_submission(turn, run, token, await self.slurm.submit(request))
            except SubmitRejected as refusal:
                self.harvest.note_refusal(turn, run, token, refusal.reason)
        await self.slurm.cancel([job for _, _, job in turn.cancels])
        self.events += [(record.kind, record.text) for record in turn.records]
        self.notes |= turn.notes

    def kinds(self, kind: str) -> list[str]:
        return [text for each, text in self.events if each == kind]


def config() -> ClusterConfig:
    return ClusterConfig(
        cluster="fake",
        slurm_version="22.05.8",
        preempt_type="preempt/partition_prio",
        select_type="select/cons_tres",
        scheduler_parameters="bf_interval=30,bf_max_job_user=4",
    )


class Desk:
    """A book with one run, and polls of a cluster of four idle nodes."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        self.book = new_book(folder)
        self.harvest = Harvest(self.book.config)
        self.operations = Operations(self.book, self.harvest)
        self.at = 0.0
        self.run = new_run(self.book, name="train", max_nodes=4, script="#!/bin/sh\n", **spec)
        # As after the first agent: one worker per node.
        self.run.record.slots = 1
        self.nodes = Nodes(self.run)

    def turn(self) -> Turn:
        return Turn(self.book, self.at, NOW + self.at)

    def do(self, method: str, **params: object) -> Turn:
        turn = self.turn()
        self.operations.handle(turn, method, {"run": "train", **params})
        return turn

    def poll(self, *jobs: JobInfo, after_s: float = 30.0) -> Turn:
        self.at += after_s
        turn = self.turn()
        partitions = [
            partition("p", NODES, preempt_mode="REQUEUE"),
            partition("high", NODES, priority_tier=2),
        ]
        seen = cluster([node(n, gpus=4) for n in NODES], jobs, at=NOW + self.at, partitions=partitions)
        self.harvest.polled(turn, seen, site(preempt_type="preempt/partition_prio"))
        wait([run.left_job_id for run in self.book.runs.values() if run.left_job_id is not None])
        return turn

    def note(self) -> None:
        turn = self.turn()
        turn.dirty.add(self.run.id)
        accounts.note(turn)

    def hold(
        self,
        kind: AllocationKind = AllocationKind.HARVEST,
        state: AllocationState = AllocationState.RUNNING,
        **more: object,
    ) -> Allocation:
        allocation = self.book.new_allocation(self.run, kind, NOW, **more)
        allocation.state = state
        if state is not AllocationState.UNKNOWN:
            allocation.job_id = str(100 + self.run.record.next_allocation)
        if state is AllocationState.RUNNING:
            allocation.start_at, allocation.agents, allocation.nodes = NOW, {"n1": Agent()}, ["n1"]
        return allocation

    def train(self, *hosts: str, restarts: bool = False) -> list[int]:
        """Let the run train on these nodes, each an allocation of its own; returns their numbers."""
        turn = self.turn()
        self.nodes.contract = msgspec.structs.replace(CONTRACT, restarts=restarts)
        numbers = [self.nodes.come(turn, self.hold(), host) for host in hosts]
        self.nodes.ready(turn, *numbers)
        self.nodes.settle(turn)
        return numbers

    def job(self, allocation: Allocation, state: str = "RUNNING", limit_s: float = 600.0, **more: object) -> JobInfo:
        if state == "RUNNING":
            more |= {"nodes": ["n1"], "start_at": NOW, "end_at": NOW + limit_s}
        return job(
            allocation.job_id or "1",
            state,
            name=allocation.token,
            user="me",
            time_limit_s=limit_s,
            exclusive=True,
            **more,
        )
