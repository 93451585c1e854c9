"""A run that is large or goes on for long costs no more for each node and change."""

import gc
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from fallow.config import Config, Membership
from fallow.core import records
from fallow.core.membership import events as ev
from fallow.core.membership.names import member_name
from fallow.core.protocol import Beat, Progress
from fallow.core.training.slow_links import Member, find_suspect
from fallow.head.loop.turn import Turn, agent_peer
from fallow.head.peers.agents import hear
from fallow.head.slurm import accounts
from fallow.model import AllocationKind, ChangeKind
from runs import CONTRACT, NOW, Nodes, hold, new_book, new_run
from talk import Played, Talk, settle

FEW, MANY = 30, 300


def lines(what: Callable[[], object]) -> int:
    """Lines that are run."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        what()
    finally:
        sys.settrace(before)
    return count


class World:
    """A training on so many nodes of one base job."""

    def __init__(self, folder: Path, size: int) -> None:
        book = new_book(folder / str(size))
        self.run = new_run(book, min_nodes=size, max_nodes=size)
        self.turn = Turn(book, at=1.0, now=NOW)
        self.nodes = Nodes(self.run, msgspec.structs.replace(CONTRACT, shards=size))
        self.hosts = [f"h{number}" for number in range(size)]
        self.allocation = hold(self.turn, self.run, *self.hosts)
        for host in self.hosts:
            self.nodes.come(self.turn, self.allocation, host)
        self.nodes.ready(self.turn, *self.run.roster.nodes)
        self.nodes.settle(self.turn)

    def beat(self) -> None:
        """Every agent's heartbeat comes and is answered, and nothing is new."""
        for host, agent in self.allocation.agents.items():
            said = self.nodes.said[agent.node]
            beat = Beat(report=msgspec.structs.replace(said, seq=said.seq + 1))
            turn = Turn(self.turn.registry, at=1.0, now=NOW)
            hear(turn, agent_peer(self.allocation, host), beat, 1.0)
            assert len(turn.messages) == 1

    def lose(self) -> None:
        """One is killed; the others vote for a generation without it and go over."""
        self.nodes.end(self.turn, 7, None, signal=9)
        self.nodes.settle(self.turn)
        assert len(self.run.roster.members) == len(self.hosts) - 1

    def absorb(self) -> None:
        """Another takes the place of one that is gone; all vote for a generation with it and go over."""
        self.nodes.ready(self.turn, self.nodes.come(self.turn, self.allocation, self.hosts[6]))
        self.nodes.settle(self.turn)
        assert len(self.run.roster.members) == len(self.hosts)

    def tick(self) -> None:
        """All deadlines are looked at."""
        self.turn.apply(self.run, ev.Ticked(at=2.0))


@pytest.mark.parametrize("what", [World.beat, World.lose, World.tick, World.absorb])
def test_a_node_costs_the_same_however_many_there_are(what: Callable[[World], None], tmp_path: Path) -> None:
    few, many = World(tmp_path, FEW), World(tmp_path, MANY)
    if what is World.absorb:
        few.lose()
        many.lose()
    assert lines(lambda: what(many)) / MANY < 1.2 * lines(lambda: what(few)) / FEW


def test_a_slow_link_is_looked_for_at_the_same_cost_for_each_node_however_many_there_are() -> None:
    def ring(size: int) -> list[Member]:
        """Members that each have a busy connection to the next."""
        return [
            Member(node=f"h{n}", index=n, harvested=True, pace_s=0.1, busy_links={f"h{(n + 1) % size}": 0.6})
            for n in range(size)
        ]

    few, many = ring(FEW), ring(MANY)
    assert lines(lambda: find_suspect(many)) / MANY < 1.2 * lines(lambda: find_suspect(few)) / FEW


# -- for long ---------------------------------------------------------------------------------------------------------


class Life:
    """A run whose nodes come and go."""

    def __init__(self, folder: Path) -> None:
        membership = Membership(lease_s=1e9, progress_s=1e9, start_timeout_s=1e9)
        book = new_book(folder, Config(membership=membership))
        self.talk = Talk(book)
        self.run = new_run(book)
        self.run.root.limit = 8
        self.there: list[Played] = []
        self.step = 0

    def come(self) -> Played:
        """A node comes, and becomes a member."""
        made = self.talk.book.new_allocation(self.run, AllocationKind.HARVEST, self.talk.now)
        agent = self.talk.play(self.run, made, "h1", job_id=made.token).greet()
        self.there.append(agent)
        agent.beat(ready=CONTRACT, progress=Progress(scalars={"loss": 1.0}))
        self.settle()
        return agent

    def settle(self) -> None:
        self.talk.tick()
        self.step += 10
        settle(self.run, *self.there, step=self.step)

    def go(self, agent: Played, *, killed: bool) -> None:
        """It is released, or its workers are killed. Then its agent ends, and so does its job."""
        made = self.run.allocations[agent.hello.token]
        if killed:
            self.talk.turn.apply(self.run, ev.Release(at=self.talk.at, nodes=(agent.node,), reason="x"))
            agent.end(None, signal=9)
            self.there.remove(agent)
            self.settle()
        else:
            self.talk.turn.release_allocation(self.run, made, "its time is over")
            self.settle()
            agent.end(0)
            self.there.remove(agent)
        agent.leave()
        made.is_settled = True
        self.talk.book.close(self.run, made)

    def pass_time(self) -> None:
        self.talk.pass_s(300.0)
        for agent in self.there:
            agent.beat()
        self.talk.tick()
        accounts.note(self.talk.turn)
        accounts.settle(self.talk.turn, self.talk.now)
        self.talk.events.clear()
        # As when the turn was written down and carried out.
        self.run.roster.unwritten.clear()
        self.talk.book.take_revoked()

    def live_on(self, changes: int) -> None:
        """Somebody comes, somebody goes: released, or killed every third time."""
        for number in range(changes // 2):
            self.come()
            self.go(self.there[0], killed=number % 3 == 0)
            self.run.root.limit = 8
            self.pass_time()
        self.talk.forget_played()

    def stored(self) -> int:
        """Bytes of all records of the run but the reports of its generations."""
        run, roster = self.run, self.run.roster
        lists = [roster.root, roster.history, roster.checkpoints, roster.failures]
        all_records = [run.record, *run.allocations.values(), *lists, *roster.nodes.values()]
        return sum(len(records.encode(record)) for record in all_records)


def objects(root: Any) -> int:
    """How many objects one holds on to, directly or not."""
    seen, found = set[int](), [root]
    code = (type, types.ModuleType, types.FunctionType, types.MethodType)
    while found:
        one = found.pop()
        if id(one) not in seen and not isinstance(one, code):
            seen.add(id(one))
            found += gc.get_referents(one)
    return len(seen)


def test_after_hundreds_of_changes_no_more_is_known_and_written_than_after_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fallow.head.state.registry.KEPT_GENERATIONS", 60)
    life = Life(tmp_path)
    first = life.come()
    assert life.run.generations[0].kind is ChangeKind.START
    life.live_on(100)
    known, written = objects(life.talk.book), life.stored()
    life.live_on(500)
    assert objects(life.talk.book) < 1.05 * known
    assert life.stored() < 1.05 * written
    numbers = [report.generation for report in life.run.generations]
    assert numbers == list(range(numbers[-1] - 59, numbers[-1] + 1))
    assert first.node not in life.run.roster.nodes
    assert life.run.generations[-1].members == [member_name(life.there[0].node)]
    assert life.run.roster.front == life.step
