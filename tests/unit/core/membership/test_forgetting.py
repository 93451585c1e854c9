"""A run that goes on for long: what the head knows of it, and writes at each change, does not grow."""

from __future__ import annotations

import gc
import types
from pathlib import Path
from typing import Any

import pytest

from fallow.config import Config, Membership
from fallow.core import records
from fallow.core.membership import events as ev
from fallow.core.membership.names import member_name
from fallow.core.protocol.agents import Progress
from fallow.head.slurm import accounts
from fallow.model import AllocationKind, ChangeKind
from runs import new_book, new_run
from talk import CONTRACT, Played, Talk, settle


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
        made.settled = True
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
    monkeypatch.setattr("fallow.head.state.book.KEPT_GENERATIONS", 60)
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
