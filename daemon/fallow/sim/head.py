"""The policy `ours`: the head's own Slurm code (`head.slurm`) in virtual time, over a simulated cluster.

The head's code reads the polls, plans the requests and paces the calls of sbatch. This module simulates what surrounds
the head: the time, and agents that report their start, a signal, or their end.
"""

import asyncio
from collections.abc import Sequence
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from fallow import __version__
from fallow.config import Config, Membership, Site
from fallow.config import Harvest as HarvestSection
from fallow.core.allocations import Allocation
from fallow.core.membership import events as ev
from fallow.core.membership.machine import Machine
from fallow.core.membership.messages import Contract, Report
from fallow.core.membership.names import member_name
from fallow.core.membership.records import Node, Root
from fallow.core.membership.roster import Roster
from fallow.core.neighbour.preemption import as_for_us
from fallow.core.protocol import AgentLeft, Beat, Hello
from fallow.files import Paths
from fallow.head import deadlines
from fallow.head.loop.faults import Faults
from fallow.head.loop.inbox import Inbox, Work, resolve
from fallow.head.loop.turn import Turn, agent_peer
from fallow.head.peers.agents import hear
from fallow.head.slurm.calls import SlurmCalls
from fallow.head.slurm.harvest import Harvest
from fallow.head.state.registry import Registry, Run, timing
from fallow.head.state.stored import RunRecord, StoredRun
from fallow.model import (
    AllocationKind,
    AllocationState,
    ChangeKind,
    ClusterState,
    Exit,
    GenerationReport,
    MemberPhase,
    Parts,
    RunSpec,
    RunStatus,
)
from fallow.sim.slurm import SlurmSim
from fallow.sim.slurm.engine import SimClient
from fallow.sim.slurm.view import config as config_of
from fallow.sim.types import Ended, FirstStep, Measurement, Notice, Options, RunPlan, SimEvent, Started
from fallow.sim.work import Head
from fallow.slurm.paced import PacedClient
from fallow.threads import FileCalls
from fallow.wire.keys import KEY_LENGTH

NEVER = 1 << 30
"""Failures after which a node is barred. No failure of the simulation is a node's fault."""

SHARDS = 16
"""Shards per node of the largest world: so many that the curves of simulated runs have no steps of whole shards."""

SIGTERM, KILLED = 15, 137
"""The signal with which Slurm warns a job, and the exit code of a killed job."""


class VirtualHead(Head):
    """Our head. Arguments: see `Head`."""

    def __init__(self, engine: SlurmSim, plans: Sequence[RunPlan], options: Options) -> None:
        super().__init__(engine, plans, options)
        config = self._config = _config(engine, options)
        self._registry = _Registry(config, options.costs.absorb[1])
        self.harvest = Harvest(config)
        self._inbox = Inbox()
        paced = PacedClient(
            SimClient(engine),
            queries_per_min=config.slurm.queries_per_min,
            submits_per_min=config.slurm.submits_per_min,
            clock=self.loop.time,
            wall=lambda: self.loop.now,
        )
        self._calls = SlurmCalls(paced, self._registry, self.harvest, self._inbox, FileCalls(), _NoFaults())
        self._leaving_tokens: set[str] = set()
        "tokens of the allocations that are about to leave"
        self._deadline_timers: dict[str, tuple[float, asyncio.TimerHandle | None]] = {}
        "run -> (Unix time of its next deadline, timer)"
        for plan in plans:
            self._add(plan)
        for serve in (*self._calls.sources().values(), self._turns):
            self.loop.run_task(serve)

    def _add(self, plan: RunPlan) -> None:
        """Add a run whose script has worked before, and whose nodes are all harvested."""
        now = self.loop.now
        spec = RunSpec(
            run=plan.run,
            name=plan.run,
            min_nodes=plan.min_nodes,
            max_nodes=plan.max_nodes,
            # Runs of one script learn from each other.
            script=f"#!/bin/sh\n# {plan.rate}\n",
            cwd="/",
            harvest_partitions=list(plan.partitions),
            created_at=now,
        )
        root = Root(run=plan.run, minimum=plan.min_nodes, maximum=plan.max_nodes, limit=plan.max_nodes)
        record = RunRecord(base_wanted=False, slots=1)
        self._registry.add(StoredRun(spec, record, Roster(root), {}), 0, self.loop.time())

    # -- turns ------------------------------------------------------------------------------------------------------

    def _turn(self) -> Turn:
        return Turn(self._registry, self.loop.time(), self.loop.now)

    async def _turns(self) -> None:
        """The head's loop of turns, without writes to the store."""
        while True:
            item = await self._inbox.get()
            turn = self._turn()
            assert isinstance(item, Work)
            outcome = item.act(turn)
            self._carry_out(turn)
            if item.answer is not None:
                resolve(item.answer, outcome)

    def _carry_out(self, turn: Turn) -> None:
        if turn.failures:
            raise turn.failures[0].error
        self._calls.carry_out(turn)
        for run_id in turn.dirty:
            run = self._registry.runs[run_id]
            run.roster.unwritten.clear()
            for allocation in run.live_allocations():
                must_leave = allocation.state is AllocationState.RELEASING and bool(allocation.agents)
                if must_leave and allocation.token not in self._leaving_tokens:
                    self._start_leaving(run, allocation)
            self._schedule_deadline(run)

    def _schedule_deadline(self, run: Run) -> None:
        at = deadlines.next_at(run, self._config.membership)
        scheduled_at, timer = self._deadline_timers.get(run.id, (inf, None))
        if at != scheduled_at:
            if timer is not None:
                timer.cancel()
            self._deadline_timers[run.id] = at, self.loop.post(at, self._watch_deadlines, run) if at < inf else None

    def _watch_deadlines(self, run: Run) -> None:
        """Act on the deadlines of a run that have passed."""
        del self._deadline_timers[run.id]
        turn = self._turn()
        deadlines.watch_time(turn, run)
        turn.dirty.add(run.id)
        self._carry_out(turn)

    # -- reports of the nodes ---------------------------------------------------------------------------------------

    def hear(self, event: SimEvent) -> None:
        if isinstance(event, Measurement):
            curve = self._registry.runs[event.run].record.curve
            curve.observe(event.members, event.step_s, event.lasted_s, event.at)
            return
        token = self.engine.name_of(event.job_id)
        run = next((run for run in self._registry.runs.values() if token in run.allocations), None)
        if run is None or not run.allocations[token].is_live:
            return
        allocation = run.allocations[token]
        turn = self._turn()
        match event:
            case Started():
                self._report_start(turn, run, allocation, event)
            case FirstStep():
                allocation.active_at = turn.now
                shards = SHARDS * self._plans[run.id].max_nodes
                ready = Contract(signature="", shards=shards, global_batch=shards)
                for host, agent in allocation.agents.items():
                    report = Report(node=agent.node, boot=agent.boot, seq=1, term=0, edition=1, ready=ready)
                    turn.apply(run, ev.Reported(at=turn.at, host=host, report=report))
            case Notice() if allocation.agents:
                hear(turn, _peer(allocation), Beat(warned=SIGTERM), turn.at)
            case Ended() if allocation.agents:
                self.runs.lose(run.id, allocation.agents)
                self._report_left(turn, run, allocation, KILLED)
        self._carry_out(turn)

    def _report_start(self, turn: Turn, run: Run, allocation: Allocation, started: Started) -> None:
        (node,) = started.nodes
        hello = Hello(
            host=node,
            token=allocation.token,
            version=__version__,
            job_id=started.job_id,
            boot=1,
            slots=1,
            entry=f"{node}:1 -",
        )
        hear(turn, agent_peer(allocation, node), hello, turn.at)
        if allocation.agents:
            self.runs.join(run.id, node, started.job_id)
        else:
            # The head rejected the agent.
            self.engine.note_exit(started.job_id)

    def _start_leaving(self, run: Run, allocation: Allocation) -> None:
        """Release the node of an allocation from its run, then end the job."""
        self._leaving_tokens.add(allocation.token)
        left_at = self.runs.release(run.id, allocation.agents)
        self.loop.post(left_at, self._end_job, run, allocation)

    def _end_job(self, run: Run, allocation: Allocation) -> None:
        if allocation.is_live:
            turn = self._turn()
            self._report_left(turn, run, allocation, Exit.NO_RESTART)
            self._carry_out(turn)
            self.engine.note_exit(allocation.job_id or "")

    def _report_left(self, turn: Turn, run: Run, allocation: Allocation, code: int) -> None:
        self._leaving_tokens.discard(allocation.token)
        hear(turn, _peer(allocation), AgentLeft(code=code), turn.at)


class _InstantMachine(Machine):
    """A membership machine that admits a node at its first report and forgets a node at its end, without votes.

    `sim.work` simulates the duration of the changes. Nothing is written to a store.

    Args:
        roster, more: see `Machine`.
        pause_s: reported pause of a change in which a node joins, in seconds.
    """

    def __init__(self, roster: Roster, pause_s: float, **more: Any) -> None:
        super().__init__(roster, **more)
        self._pause_s = pause_s

    def handle(self, event: ev.Event) -> list[ev.Instruction]:
        nodes, instructions = self.roster.nodes, list[ev.Instruction]()
        match event:
            case ev.Expected():
                instructions.append(self._expect_node(event))
            case ev.Reported(report=report):
                instructions.append(self._join(report))
            case ev.Ends() if event.node in nodes:
                nodes[event.node].ends_at = event.ends_at
            case ev.Release():
                for number in event.nodes:
                    nodes[number].leaving = event.reason
            case ev.NodeEnded() if event.node in nodes:
                self._forget(nodes[event.node])
        return instructions

    def _expect_node(self, event: ev.Expected) -> ev.Admitted:
        root = self.roster.root
        number, root.next_id = root.next_id, root.next_id + 1
        self.roster.add(
            Node(id=number, host=event.host, token=event.token, boot=event.boot, slots=event.slots, entry=event.entry)
        )
        return ev.Admitted(number, event.host, event.token, event.boot)

    def _join(self, report: Report) -> GenerationReport:
        root, before, number = self.roster.root, self.roster.members, report.node
        members = [*before, number]
        root.generation, root.contract, root.status = root.generation + 1, report.ready, RunStatus.TRAINING
        self.roster.nodes[number].phase = MemberPhase.READY
        self.roster.seat(members, [number])
        return GenerationReport(
            generation=root.generation,
            kind=ChangeKind.ABSORB if before else ChangeKind.START,
            members=[member_name(n) for n in members],
            first_step=0,
            pause_s=self._pause_s if before else None,
            parts=Parts(),
            took_s=0.0,
        )

    def _forget(self, node: Node) -> None:
        self.roster.seat([number for number in self.roster.members if number != node.id], [])
        node.phase, node.exited = MemberPhase.GONE, True
        self.roster.forget(node)


class _Registry(Registry):
    """A registry without files, of runs whose members join and leave at once."""

    def __init__(self, config: Config, pause_s: float) -> None:
        self._pause_s = pause_s
        nowhere, self._numbers = Path("/nonexistent"), count()
        super().__init__(Paths(state=nowhere, runtime=nowhere), config, lambda: f"{next(self._numbers):06x}")

    def add(self, stored: StoredRun, revision: int, at: float) -> Run:
        run = super().add(stored, revision, at)
        run.machine = _InstantMachine(
            run.roster, self._pause_s, term=self.term, timing=timing(self.config.membership), at=at
        )
        return run

    def make_keys(self, spec: RunSpec, kind: AllocationKind, token: str) -> str:
        return f"{next(self._numbers):0{KEY_LENGTH}x}"

    def close(self, run: Run, allocation: Allocation) -> None:
        self.principals.pop(allocation.public_key, None)


class _NoFaults(Faults):
    """An error ends the simulation."""

    def note(self, source: str, error: BaseException, run: str | None = None) -> NoReturn:
        raise error


def _config(engine: SlurmSim, options: Options) -> Config:
    """The default configuration with the settings of `options`."""
    at_first = ClusterState(at=engine.now, nodes=[], jobs=[], partitions=list(engine.site.partitions))
    preempts = any(p.preempts for p in as_for_us(at_first, config_of(engine.site), None).partitions)
    return Config(
        # The trace has all jobs of other users, so none is hidden from our user.
        site=Site(harvest_unseen=True),
        harvest=HarvestSection(allow_without_preemption=not preempts),
        slurm=options.slurm,
        membership=Membership(bar_after=NEVER),
    )


def _peer(allocation: Allocation) -> str:
    return agent_peer(allocation, next(iter(allocation.agents)))
