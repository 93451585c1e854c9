"""A day of a head and its store: a busy cluster, a run of a hundred nodes, and nothing that grows.

Turns, records, plans and the store are the real ones. Time, Slurm and the agents are played.
"""

import asyncio
import gc
import random
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec.structs import replace

from fallow.config import Config, Membership, Site
from fallow.config import Harvest as HarvestSection
from fallow.core.allocations import Allocation
from fallow.core.membership.messages import Gather, Gathered, Order
from fallow.core.protocol import AgentLeft, BeatReply, EndAgent, Ended, FromAgent, Progress, ToAgent
from fallow.files import Paths
from fallow.head import deadlines
from fallow.head.loop.durable import Durable
from fallow.head.loop.monitoring import Metrics
from fallow.head.loop.turn import Turn
from fallow.head.peers import agents
from fallow.head.slurm import accounts
from fallow.head.slurm.harvest import Harvest
from fallow.head.state.registry import Registry
from fallow.sim.slurm import SlurmSim
from fallow.sim.slurm.engine import SimClient
from fallow.sim.types import Ended as JobEnded
from fallow.sim.types import Notice, SimJob, Started
from runs import CONTRACT as SMALL
from runs import NOW, arrived, new_run
from sim_cases import job, site, tiers
from talk import Played, hello

DAY_S = 86_400.0
CONTRACT = replace(SMALL, shards=1 << 20, total_steps=None)
NODES, SLOTS = 100, 8
POLL_S, START_S = 30.0, 20.0
OTHERS_EVERY_S, KILL_EVERY_S = 300.0, 900.0
"""Somebody's job needs one to three of our nodes for half an hour on average, and a node's workers are killed."""
GENERATIONS_KEPT = 20
"""Fewer than change during the warm-up, so that it fills the report."""
MORE = 1.15
"""By how much what the head holds may vary: members come and go."""
LOGGED_BYTES = 1000
"""Most that the event log gets for one change of the membership, submissions and jobs included."""


class Agent(Played):
    """Obeys each order at once. Its workers vote for every group, and switch as soon as they may."""

    def __init__(self, allocation: Allocation, host: str, job_id: str, at: float) -> None:
        first = hello(allocation, host, job_id=job_id, slots=SLOTS)
        super().__init__(None, allocation.run, allocation, first)  # type: ignore[arg-type]
        self.job_id, self.ready_at, self.warned = job_id, at + START_S, 0
        self.outbox: list[FromAgent] = [first]
        self.is_alive, self.is_over = True, False
        self.at, self.step = at, 0

    def beat_at(self, at: float, step: int) -> None:
        """The heartbeat that is due. Args: step: that members have finished."""
        self.at, self.step = at, step
        pids = tuple(range(1, SLOTS + 1))
        progress = Progress(reached=(0, self.step), loss=1.0 / (1.0 + at), shards=8, pace_s=0.01, pids=pids)
        if not self.is_alive or not self.node:
            self.report = None
            self.outbox.append(self.next_beat(warned=self.warned) if self.node else self.hello)
            return
        is_accepted = self.order is not None and self.order.accepted
        ready = CONTRACT if at >= self.ready_at and not is_accepted else None
        step = self.step if self.report is not None and self.report.generation else 0
        self.outbox.append(self.next_beat(warned=self.warned, progress=progress, ready=ready, step=step))

    def kill(self) -> None:
        """SIGKILL hits one of its workers."""
        self.end_workers(code=None, signal=9)

    def end_workers(self, **how: Any) -> None:
        if self.is_alive and self.node:
            self.is_alive = False
            self.outbox.append(Ended(node=self.node, boot=self.hello.boot, report=self.report, **how))

    def hear(self, message: ToAgent) -> None:
        super().hear(message)
        self.heard.clear()
        match message:
            case Order() if self.is_alive and message is self.order:
                self._obey(message)
            case Gathered() if self.is_alive and self.report is not None and not message.missing:
                self._say(prepared=max(self.report.prepared, message.generation))
            case BeatReply(boot=boot) if boot > self.hello.boot:
                self.hello = replace(self.hello, boot=boot, node=0)
                self.report, self.order, self.is_alive, self.ready_at = None, None, True, self.at + START_S
                self.outbox.append(self.hello)
            case EndAgent(code=code) if not self.is_over:
                self.end_workers(code=code, is_ordered=True)
                self.outbox.append(AgentLeft(code=code))
                self.is_over = True

    def _obey(self, order: Order) -> None:
        plan, said = order.plan, self.report
        assert said is not None
        given_up = max(said.given_up, order.broken)
        if order.end is not None:
            self.end_workers(code=order.end.code, is_ordered=True)
        elif plan is None:
            self._say(given_up=given_up)
        elif plan.generation > said.prepared:
            given_up = max(given_up, plan.replaces * plan.interrupt)
            if plan.leave:
                self._say(given_up=given_up, prepared=plan.generation)
            else:
                part = msgspec.msgpack.encode([b"8 bytes."] * SLOTS)
                self.outbox.append(Gather(node=self.node, generation=plan.generation, key="control/0", part=part))
                self._say(given_up=given_up)
        elif order.committed == plan.generation > max(said.generation, said.passed_boundary):
            given_up = max(given_up, plan.replaces)
            if plan.leave:
                self._say(given_up=given_up, passed_boundary=plan.generation)
                self.end_workers(code=0)
            else:
                self._say(given_up=given_up, **arrived(plan.generation, self.step))

    def _say(self, **what: Any) -> None:
        self.outbox.append(replace(self.next_beat(warned=self.warned, **what), brief=True))


class Client(SimClient):
    """Slurm answers at once."""

    answer_s = sbatch_s = 0.0


class Day:
    """A head with one run that takes every idle node of a cluster.

    Args:
        paths: its files.
        durable: its store.
        beat_s: seconds between heartbeats; the clock goes on by so much at a time.
    """

    def __init__(self, paths: Paths, durable: Durable, beat_s: float) -> None:
        membership = Membership(beat_s=beat_s, lease_s=6 * beat_s)
        harvest = HarvestSection(partitions=["scavenge"], max_minutes=480)
        config = Config(membership=membership, harvest=harvest, site=Site(harvest_unseen=True))
        self.beat_s, self.durable, self.chance = beat_s, durable, random.Random(7)
        self.book, self.harvest, self.metrics = Registry(paths, config), Harvest(config), Metrics(None)
        self.slurm = Client(SlurmSim(site(NODES, partitions=tiers(NODES), preempt=True), 0, NOW, self._others()))
        script = {"script": "#!/bin/sh\nfallow run -- true\n", "cwd": "/tmp"}
        self.run = new_run(self.book, now=NOW, max_nodes=NODES, **script)
        self.run.record.base_wanted = False
        self.agents: dict[str, Agent] = {}
        "by peer"
        self.at = self.polled_at = self.steps = 0.0
        self.kinds: Counter[str] = Counter()
        "lines of the event log by kind"
        self.log_bytes = 0

    def _others(self) -> Iterator[SimJob]:
        at = NOW + 900.0
        for number in range(1, 10_000):
            at += self.chance.expovariate(1 / OTHERS_EVERY_S)
            lasts_s, nodes = self.chance.uniform(600.0, 3000.0), self.chance.randint(1, 3)
            yield job(str(number), at, nodes, 7200.0, lasts_s, "normal")

    async def live(self, seconds: float) -> None:
        """Play so many seconds."""
        end = self.at + seconds
        while self.at < end:
            self.at += self.beat_s
            self.steps += self.beat_s * len(self.run.roster.members) / NODES
            self._take_from_slurm()
            if self.at % KILL_EVERY_S < self.beat_s and self.run.roster.members:
                self._agent_of(self.chance.choice(self.run.roster.members)).kill()
            for agent in self.agents.values():
                agent.beat_at(self.at, int(self.steps))
            await self._turn(is_tick=True)
            while any(agent.outbox for agent in self.agents.values()):
                await self._turn()
            for agent in [agent for agent in self.agents.values() if agent.is_over]:
                del self.agents[agent.peer]
                self.slurm.engine.note_exit(agent.job_id)

    def _agent_of(self, node: int) -> Agent:
        return next(agent for agent in self.agents.values() if agent.node == node)

    def _take_from_slurm(self) -> None:
        """Agents come with their jobs, hear of Slurm's warnings, and are gone with their jobs."""
        by_job = {agent.job_id: agent for agent in self.agents.values()}
        for event in self.slurm.engine.advance(NOW + self.at):
            match event:
                case Started(job_id=job_id, nodes=(host,)):
                    allocation = self.run.allocations[self.slurm.engine.name_of(job_id)]
                    agent = Agent(allocation, host, job_id, self.at)
                    self.agents[agent.peer] = by_job[job_id] = agent
                case Notice(job_id=job_id) if job_id in by_job:
                    by_job[job_id].warned = 15
                case JobEnded(job_id=job_id) if job_id in by_job:
                    self.agents.pop(by_job[job_id].peer, None)

    async def _turn(self, *, is_tick: bool = False) -> None:
        """As in `head.app`: decide, write it down, carry it out."""
        turn = Turn(self.book, self.at, NOW + self.at)
        for agent in self.agents.values():
            said, agent.outbox = agent.outbox, []
            for message in said:
                agents.hear(turn, agent.peer, message, self.at)
        if is_tick:
            deadlines.tick(turn)
            if self.at - self.polled_at >= POLL_S:
                self.polled_at = self.at
                self.harvest.polled(turn, await self.slurm.poll(), await self.slurm.config())
        accounts.note(turn)
        for run_id, token in turn.submissions:
            allocation = self.run.allocations[token]
            job_id = await self.slurm.submit(self.harvest.request(self.book.paths, self.run, allocation))
            self.harvest.note_submission(turn, self.book.runs[run_id], token, job_id)
        assert not turn.failures, turn.failures[0].error
        for event in await self.durable.write(turn):
            self.metrics.count_event(event)
            self.kinds[event.kind] += 1
            self.log_bytes += len(msgspec.msgpack.encode(event))
        await self.slurm.cancel([job_id for _, _, job_id in turn.cancels])
        self.book.take_revoked()
        for peer, message in turn.messages:
            if peer in self.agents:
                self.agents[peer].hear(message)

    async def size(self) -> "Size":
        """What the head knows now."""
        stored = await self.durable.store.load("")
        return Size(
            memory_bytes=held_bytes(self.book, self.harvest, self.durable, self.metrics),
            records=len(stored),
            record_bytes=sum(len(value) for _, value in stored.values()),
        )


class Size(NamedTuple):
    memory_bytes: int
    records: int
    record_bytes: int


def held_bytes(*roots: Any) -> int:
    """Size of all that these hold on to, and the head's modules, directly or not."""
    ours = "fallow.core.", "fallow.head.", "fallow.model."
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith(ours)]
    seen, found, size = set[int](), [*roots, *modules], 0
    # The event loop holds the test itself.
    code = (type, types.ModuleType, types.FunctionType, types.MethodType, asyncio.AbstractEventLoop)
    while found:
        one = found.pop()
        if id(one) not in seen and not isinstance(one, code):
            seen.add(id(one))
            size += sys.getsizeof(one)
            found += gc.get_referents(one)
    return size


@pytest.mark.parametrize(
    ("seconds", "beat_s"),
    [(DAY_S / 10, 10.0), pytest.param(DAY_S, 5.0, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
async def test_nothing_that_a_head_holds_grows_over_a_day(
    seconds: float, beat_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fallow.head.state.registry.KEPT_GENERATIONS", GENERATIONS_KEPT)
    paths = Paths(tmp_path / "state", tmp_path / "run").create()
    durable = Durable(paths, None)
    await durable.open()
    try:
        await durable.begin_term()
        day = Day(paths, durable, beat_s)
        await day.live(0.4 * seconds)
        warm = await day.size()
        assert len(day.run.generations) == GENERATIONS_KEPT
        for _ in range(3):
            before, log_bytes, changes = day.kinds.copy(), day.log_bytes, day.run.root.generation
            await day.live(0.2 * seconds)
            size = await day.size()
            assert all(now < MORE * once for now, once in zip(size, warm, strict=True)), (size, warm)
            assert (day.log_bytes - log_bytes) / (day.run.root.generation - changes) < LOGGED_BYTES
            assert {"absorb", "eject", "release"} <= (day.kinds - before).keys()
            assert len(day.run.roster.members) > NODES / 2
    finally:
        await durable.close()
    # They are labels of metrics.
    assert all(re.fullmatch("[a-z-]+", kind) for kind in day.kinds), day.kinds
