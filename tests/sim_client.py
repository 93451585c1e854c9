"""The real head's Slurm side in virtual time: `Harvest`, `SlurmCalls`, `PacedClient` and `Agents` over a simulated
cluster, with nodes that do as they are told."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import msgspec

from fallow import __version__
from fallow.config import Config
from fallow.core.allocations import Allocation
from fallow.core.membership.messages import Contract, Switch
from fallow.core.protocol.agents import Beat, Hello, Left
from fallow.files import Paths
from fallow.head.deadlines import Deadlines
from fallow.head.loop.inbox import Due, Inbox, Polled, Submitted
from fallow.head.loop.turn import Turn, agent_peer
from fallow.head.peers.agents import Agents
from fallow.head.slurm.calls import SlurmCalls
from fallow.head.slurm.harvest import Harvest
from fallow.head.state.book import Book, Run
from fallow.model import (
    AllocationState,
    ChangeKind,
    ClusterConfig,
    ClusterState,
    Doing,
    Exit,
    JobInfo,
    JobRequest,
    OwnerView,
    RunSpec,
)
from fallow.sim.head import ANSWER_S
from fallow.sim.requests_queue import SBATCH_S
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import (
    POLL_REQUESTS,
    Active,
    Ended,
    Happening,
    Measured,
    Notice,
    Options,
    RunPlan,
    Started,
    Wanted,
)
from fallow.sim.work import Work
from fallow.slurm import parse
from fallow.slurm.paced import PacedClient
from runs import Nodes

BAR_AFTER = 1 << 30
"""Failures; what happens to nodes here is never their fault."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nobody waits: when nothing is left to do, it is the time of the next timer."""

    def __init__(self, now: float) -> None:
        self._virtual = now
        super().__init__()

    def time(self) -> float:
        return self._virtual

    def _run_once(self) -> None:
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            self._timer_cancelled_count -= 1
        if timers and not self._ready:  # type: ignore[attr-defined]
            self._virtual = max(self._virtual, timers[0]._when)
        super()._run_once()  # type: ignore[misc]


class Puppets(Nodes):
    """Nodes of a run that take part in each change at once.

    Args:
        run: whose nodes they are.
        shards: of a step.
        pause_s: for so long all stop at each change but the first.
    """

    def __init__(self, run: Run, shards: int, pause_s: float) -> None:
        super().__init__(run, Contract(signature="s", shards=shards, global_batch=shards))
        self._pause_s = pause_s

    def arrive(self, turn: Turn, node: int, generation: int, step: int = 0) -> None:
        change = self.run.root.change
        pause_s = 0.0 if change is None or change.kind is ChangeKind.START else self._pause_s
        switch = Switch(generation=generation, first_step=step, pause_s=pause_s)
        self.say(turn, node, generation=generation, has_state=True, switch=switch, doing=Doing.WORKING)


class SimClient:
    """`SlurmClient` over an engine."""

    def __init__(self, engine: SlurmSim, head: RealHead) -> None:
        self.polls = 0
        self.poll_requests = POLL_REQUESTS
        self.backend = "simulated"
        self._engine, self._head = engine, head

    async def config(self) -> ClusterConfig:
        return self._engine.config()

    async def poll(self, names_prefix: str) -> ClusterState:
        self.polls += 1
        self._head.catch_up()
        cluster = self._engine.poll()
        await asyncio.sleep(ANSWER_S)
        self._head.catch_up()
        return cluster

    async def submit(self, request: JobRequest) -> str:
        given = dict(option.removeprefix("--").partition("=")[::2] for option in request.options)
        await asyncio.sleep(SBATCH_S)
        self._head.catch_up()
        wanted = Wanted(
            token=request.token,
            partition=given["partition"],
            minutes=parse.count(given["time"]),
            node=given.get("nodelist", ""),
            exclude=frozenset(parse.nodes(given.get("exclude", ""))),
            nice=parse.count(given["nice"]),
        )
        job_id = self._engine.submit(wanted)
        self._head.has_job(job_id, request.token)
        return job_id

    async def cancel(self, job_ids: Sequence[str], signal: str | None = None) -> None:
        self._head.catch_up()
        for job_id in job_ids:
            self._engine.cancel(job_id)
        self._head.news.set()

    async def find(self, token: str) -> list[JobInfo]:
        raise NotImplementedError

    async def owner(self) -> OwnerView:
        raise NotImplementedError

    async def test_only(self, request: JobRequest) -> str:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing was started."""


class RealHead:
    """See above. `play` it to an end; what it asked for is in the engine."""

    def __init__(
        self,
        engine: SlurmSim,
        runs: Work,
        plans: Sequence[RunPlan],
        options: Options,
        config: Config,
        folder: Path,
        loop: VirtualLoop,
    ) -> None:
        self._engine, self._runs, self._costs, self._loop = engine, runs, options.costs, loop
        paths = Paths(state=folder / "state", runtime=folder / "run").create()
        names = iter(f"{i:012x}" for i in range(1 << 20))
        membership = msgspec.structs.replace(config.membership, bar_after=BAR_AFTER)
        self.book = Book(paths, msgspec.structs.replace(config, membership=membership), lambda: next(names))
        self.harvest = Harvest(config)
        self._config = config
        self._agents = Agents()
        self._deadlines = Deadlines(self._agents.hearing)
        self._nodes: dict[str, Puppets] = {}
        "by run"
        self._inbox = Inbox()
        client = PacedClient(
            SimClient(engine, self),
            queries_per_min=config.slurm.queries_per_min,
            submits_per_min=config.slurm.submits_per_min,
            clock=loop.time,
            wall=loop.time,
        )
        self._calls = SlurmCalls(client, paths, self.harvest, self._inbox)
        self.news = asyncio.Event()
        self._jobs: dict[str, str] = {}
        self._leaving: dict[str, float] = {}
        "token -> when its node has left"
        for plan in plans:
            self._add(plan)

    def _add(self, plan: RunPlan) -> None:
        spec = RunSpec(
            run="",
            name=plan.run,
            min_nodes=plan.min_nodes,
            max_nodes=plan.max_nodes,
            script=f"#!/bin/sh\n# {plan.rate}\nfallow run -- true\n",
            cwd="/tmp",
            weight=plan.weight,
            harvest_partitions=list(plan.partitions),
        )
        run = self.book.create(spec, self._loop.time(), self._loop.time())
        run.record.base_wanted, run.record.slots = False, 1
        self._nodes[run.id] = Puppets(run, plan.shards, self._costs.absorb[0])

    async def play(self, until: float) -> None:
        tasks = [
            asyncio.ensure_future(each())
            for each in (*self._calls.sources(self.book).values(), self._world, self._turns)
        ]
        await asyncio.sleep(until - self._loop.time())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]

    # -- turns ------------------------------------------------------------------------------------------------------

    def _turn(self) -> Turn:
        return Turn(self.book, self._loop.time(), self._loop.time())

    async def _turns(self) -> None:
        while True:
            item = await self._inbox.get()
            turn, answer = self._turn(), None
            match item:
                case Polled(cluster):
                    self._calls.take_poll(turn, cluster)
                case Due():
                    answer = self._calls.take_due(turn, item)
                case Submitted():
                    self._calls.take_submission(turn, item)
            self._carry_out(turn)
            if answer is not None:
                answer()

    def _carry_out(self, turn: Turn) -> None:
        if turn.began:
            self.harvest.plan_again(turn)
        if turn.taken:
            self.harvest.neighbours.taken(turn.now)
            self._calls.pace()
        if turn.failures:
            raise turn.failures[0].error
        for run_id, token in turn.submissions:
            self._calls.submit(run_id, token)
        if turn.cancels:
            self._calls.cancel([job for _, _, job in turn.cancels])
        for run in self.book.runs.values():
            for allocation in run.live_allocations():
                if allocation.state is AllocationState.RELEASING and allocation.token not in self._leaving:
                    self._leave(run, allocation)
        self.news.set()

    # -- the world --------------------------------------------------------------------------------------------------

    async def _world(self) -> None:
        while True:
            while not self._inbox.empty():  # noqa: ASYNC110
                # A job's agent speaks after sbatch has answered.
                await asyncio.sleep(0)
            self.catch_up()
            self.news.clear()
            due = min(self._engine.next_at(), self._runs.next_at(), self._tick_at(), *self._leaving.values(), 1e18)
            try:
                async with asyncio.timeout_at(due):
                    await self.news.wait()
            except TimeoutError:
                pass

    def catch_up(self) -> None:
        """Play what has happened by now: the cluster, the runs, then what is due to us, and what follows from that."""
        now = self._loop.time()
        while min(self._engine.next_at(), self._runs.next_at()) <= now or self._engine.now < now:
            for happening in self._engine.advance(now):
                self._told(happening)
            for each in self._runs.advance(now):
                self._told(each)
        if self._tick_at() <= now:
            turn = self._turn()
            for run in self.book.runs.values():
                run.agent_seen.update(dict.fromkeys(run.agent_seen, now))
            self._deadlines.tick(turn)
            self._carry_out(turn)
        gone = [token for token, at in self._leaving.items() if at <= now]
        for token in gone:
            del self._leaving[token]
            self._left(token)
        if gone:
            self.catch_up()

    def _tick_at(self) -> float:
        """When a walltime or somebody who waits makes us leave."""
        found = [1e18]
        for run in self.book.runs.values():
            margin_s = self._config.membership.release_margin_s + run.longest_pause_s() + run.longest_save_s()
            for a in run.live_allocations():
                if a.state is AllocationState.RUNNING and a.end_at is not None:
                    found.append(a.end_at - margin_s)
                if a.gone_by is not None:
                    found.append(a.gone_by)
        return min(found)

    def has_job(self, job_id: str, token: str) -> None:
        self._jobs[job_id] = token

    def _of(self, token: str) -> tuple[Run, Allocation] | None:
        found = ((run, run.allocations.get(token)) for run in self.book.runs.values())
        return next(((run, a) for run, a in found if a is not None and a.live), None)

    def _told(self, what: Happening | Active | Measured) -> None:
        if isinstance(what, Measured):
            run = self.book.get(what.run)
            run.record.curve.observe(what.members, what.step_s, what.lasted_s, what.at)
            return
        found = self._of(self._jobs.get(getattr(what, "job_id", ""), ""))
        if found is None:
            return
        run, allocation = found
        turn = self._turn()
        match what:
            case Started():
                (node,) = what.nodes
                self._runs.join(run.spec.name, node, what.job_id, turn.now)
                hello = Hello(
                    host=node,
                    token=allocation.token,
                    version=__version__,
                    job_id=what.job_id,
                    boot=1,
                    slots=1,
                    entry=f"{node}:1 secret",
                )
                self._agents.hear(turn, f"{allocation.public_key} {node}", hello, turn.at)
            case Active():
                allocation.active_at = turn.now
                self._nodes[run.id].ready(turn, *allocation.members)
                self._nodes[run.id].settle(turn)
            case Notice() if allocation.agents:
                self._agents.hear(turn, self._peer(allocation), Beat(warned=15), turn.at)
            case Ended() if allocation.agents:
                self._runs.lost(run.spec.name, list(allocation.agents), turn.now)
                self._gone(turn, run, allocation, 137)
        self._carry_out(turn)

    @staticmethod
    def _peer(allocation: Allocation) -> str:
        return agent_peer(allocation, next(iter(allocation.agents)))

    def _leave(self, run: Run, allocation: Allocation) -> None:
        """The members of an allocation leave, as they were told to."""
        self._leaving[allocation.token] = self._runs.release(run.spec.name, list(allocation.agents), self._loop.time())
        turn = self._turn()
        self._nodes[run.id].settle(turn)
        self._carry_out(turn)

    def _left(self, token: str) -> None:
        found = self._of(token)
        if found is not None:
            run, allocation = found
            turn = self._turn()
            self._gone(turn, run, allocation, Exit.NO_RESTART)
            self._carry_out(turn)
            self._engine.left(allocation.job_id or "")

    def _gone(self, turn: Turn, run: Run, allocation: Allocation, code: int) -> None:
        self._leaving.pop(allocation.token, None)
        self._agents.hear(turn, self._peer(allocation), Left(code=code), turn.at)
        self._nodes[run.id].settle(turn)


def play_real(
    engine: SlurmSim, runs: Work, plans: Sequence[RunPlan], options: Options, config: Config, folder: Path, until: float
) -> RealHead:
    """Play the real head until then."""
    loop = VirtualLoop(engine.now)
    clock = SimpleNamespace(monotonic=loop.time, time=loop.time)
    try:
        with patch("fallow.head.slurm.calls.time", clock):
            return loop.run_until_complete(_play(engine, runs, plans, options, config, folder, until, loop))
    finally:
        loop.close()


async def _play(
    engine: SlurmSim,
    runs: Work,
    plans: Sequence[RunPlan],
    options: Options,
    config: Config,
    folder: Path,
    until: float,
    loop: VirtualLoop,
) -> RealHead:
    head = RealHead(engine, runs, plans, options, config, folder, loop)
    await head.play(until)
    return head
