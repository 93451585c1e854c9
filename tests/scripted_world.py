"""A run of members in threads, whose memberships follow each other as a test says; see `scripted_group`."""

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import builders
from fallow.core.membership.failures import Stranger
from fallow.core.membership.messages import Checkpoint, Contract, End, Finish, Plan
from fallow.core.protocol import BeatReply, Setup
from fallow.core.training.audit import audit
from fallow.model import SampleReport
from fallow.worker.api.run import Run
from fallow.worker.data.ledger import read_ledger
from fallow.worker.loop.generations import Released
from fallow.worker.session.head_status import HeadStatus
from fallow.worker.session.orders import Answered, Dismissed, Orders, OthersEnded
from fallow.worker.session.status import Progress
from fallow.worker.transport.build import Upcoming
from fallow.worker.transport.group import Connections, Group
from fallow.worker.transport.groups import Groups
from fallow.worker.transport.stream import Streams
from fallow.worker.transport.waits import Node
from scripted_group import Board, Generation, Killed, ProcessGroup, ScriptedGroup

DEADLINE_S = 60.0


class ScriptedSession:
    """A member's conversation with a head that does what the test says."""

    is_main = False

    def __init__(self, worker: str, world: "World", setup: Setup) -> None:
        self.worker, self.setup, self._world = worker, setup, world
        self.progress, self.head_status = Progress(), HeadStatus()
        self.facts: dict[str, list[Any]] = {}
        "field of a status -> what this member has said of it, one after the other"
        self.generation = self.computed = 0
        self.group: Group | None = None
        self.run: Run | None = None
        self.head_status.take(BeatReply(term=1, joins=not world.is_first(worker)))
        self.orders = _Orders(self, world)
        self.groups = Groups("", None)
        self._offered: Upcoming | None = None

    def say(self, **facts: Any) -> None:
        for name, value in facts.items():
            self.facts.setdefault(name, []).append(value)
        self.computed = facts.get("generation", self.computed)
        if "finish" in facts:
            self._world.finished(facts["finish"])
        if "saved" in facts:
            self._world.written(facts["saved"])

    note = say

    def said(self, name: str) -> list[Any]:
        """What this member has said of a field."""
        return self.facts.get(name, [])

    def announce(self, contract: Contract, device: torch.device) -> None:
        self.say(ready=contract)

    def leave(self, last: int, left: int) -> None:
        self.say(passed_boundary=left)

    def hold(self, generation: int, reason: str) -> None: ...

    def close(self) -> None: ...

    def await_commit(self, meanwhile: Callable[[], bool], answers: Callable[[Upcoming], bool]) -> Upcoming:
        meanwhile()
        upcoming, self._offered = self._offered or self._world.next_generation(self), None
        if upcoming.plan.outcome is not None and answers(upcoming):
            self._offered = upcoming
            raise Answered(upcoming.plan.outcome)
        return upcoming


class _Orders(Orders):
    """Of a head that plans as the test says."""

    def __init__(self, session: ScriptedSession, world: "World") -> None:
        super().__init__(0, 0)
        self._session, self._world = session, world

    @property
    def switch_offered(self) -> int:
        return self._world.offered(self._session)


class World:
    """A run whose history is known beforehand.

    Args:
        folder: of the run.
        generations: one after the other, numbered from 1.
    """

    def __init__(self, folder: Path, *generations: Generation) -> None:
        self._folder, self._plans = folder, generations
        self._changed = threading.Condition()
        self._arrived: dict[int, dict[str, ScriptedSession]] = {}
        self._groups: dict[int, dict[str, ScriptedGroup]] = {}
        self._failed = False
        self._finished: Finish | None = None
        self.checkpoints: list[Checkpoint] = []
        self.sessions: dict[str, ScriptedSession] = {}

    # ----------------------------------------------------------------------------------------- as a head does

    def is_first(self, worker: str) -> bool:
        """It is in the first generation."""
        return worker in self._plans[0].members

    def offered(self, session: ScriptedSession) -> int:
        """A planned generation that this member may change over to."""
        number = session.generation + 1
        plan = self._plans[number - 1] if number <= len(self._plans) else None
        assert session.run is not None
        return number if plan is not None and plan.at_step is not None and session.run.step + 1 >= plan.at_step else 0

    def written(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is complete."""
        with self._changed:
            self.checkpoints.append(checkpoint)
            self._changed.notify_all()

    def finished(self, finish: Finish) -> None:
        """A script has ended."""
        with self._changed:
            self._finished = finish
            self._changed.notify_all()

    def next_generation(self, session: ScriptedSession) -> Upcoming:
        """Wait until all members of the next generation wait for it, and give this one its group."""
        number = self._number_for(session)
        plan = self._plans[number - 1]
        with self._changed:
            if plan.rollback:
                assert self._changed.wait_for(lambda: self.checkpoints, DEADLINE_S), "there is no checkpoint"
        planned = Plan(
            generation=number,
            replaces=number - 1,
            leave=session.worker not in plan.members,
            suspends=not plan.members,
            interrupt=plan.at_step is None,
            timeout_s=DEADLINE_S,
            outcome=plan.outcome,
            checkpoints=tuple(one.path for one in self.checkpoints[-1:]) if plan.rollback else (),
        )
        if planned.leave:
            return Upcoming(planned, is_built=True, is_committed=True)
        with self._changed:
            self._arrived.setdefault(number, {})[session.worker] = session
            self._break_others(number - 1, session.worker)
            if len(self._arrived[number]) == len(plan.members):
                self._groups[number] = self._build(number, plan)
            self._changed.notify_all()
            there = self._changed.wait_for(
                lambda: number in self._groups or self._failed or self._finished is not None, DEADLINE_S
            )
            if number not in self._groups:
                if self._finished is not None:
                    raise OthersEnded(self._finished)
                raise Dismissed(End(code=70, reason="another member failed" if there else "nobody came"))
            session.generation = number
            session.group = self._groups[number][session.worker]
        state_since = number if plan.rollback or session.worker in plan.forgotten else 0
        return Upcoming(
            planned,
            plan.ranks(session.worker),
            group=session.group,
            is_built=True,
            is_committed=True,
            state_since=state_since,
        )

    def _number_for(self, session: ScriptedSession) -> int:
        """A newcomer waits for the first generation that it is in, and so does a member that is forgotten."""
        number = session.generation + 1
        is_awaited = not session.generation or any(session.worker in plan.forgotten for plan in self._plans[number:])
        while is_awaited and session.worker not in self._plans[number - 1].members:
            number += 1
        if number > len(self._plans):
            raise Dismissed(End(code=70, reason=f"{session.worker} is in no later generation"))
        return number

    def _break_others(self, number: int, worker: str) -> None:
        """A member has lost its group elsewhere than where the test breaks it: so do the others, wherever they are."""
        groups, own = self._groups.get(number, {}), self._groups.get(number, {}).get(worker)
        breaks = self._plans[number - 1].breaks
        if own is not None and own.broken is not None and (breaks is None or own.waits_so_far < breaks.wait):
            for group in groups.values():
                group.interrupt("another member has lost it")

    def _build(self, number: int, plan: Generation) -> dict[str, ScriptedGroup]:
        size = len(plan.members)
        control, transport = Board(size), Board(size)
        streams = [Streams(number, rank, size, "127.0.0.1") for rank in range(size)]
        cards = {rank: one.card for rank, one in enumerate(streams)}
        groups: dict[str, ScriptedGroup] = {}
        for rank, name in enumerate(plan.members):
            streams[rank].cards = cards
            connections = Connections([ProcessGroup(control, rank)], ProcessGroup(transport, rank), streams[rank])
            groups[name] = ScriptedGroup(number, rank, plan, connections)
        for siblings in {plan.node(name) for name in plan.members}:
            board = Board(len(siblings))
            for place, name in enumerate(siblings):
                groups[name].node = Node(ProcessGroup(board, place), len(siblings))
        return groups

    # ---------------------------------------------------------------------------------------- as an agent does

    def train(self, script: Callable[[Run], Any]) -> dict[str, Any]:
        """Run a script on each worker that is in some generation.

        Returns:
            By name what it gave, or the exception that ended it.
        """
        names = sorted({name for plan in self._plans for name in plan.members})
        found: dict[str, Any] = {}
        for name in names:  # before anybody steps: each run adds to what the process does at every optimizer's step
            self._begin(name)
        threads = [threading.Thread(target=self._member, args=(name, script, found), daemon=True) for name in names]
        # torch reads a generator's state under that generator's lock. A collection there may hand the interpreter to a
        # thread that wants the lock, and keeps the interpreter while it waits.
        gc.disable()
        try:
            for thread in threads:
                thread.start()
            end = time.monotonic() + 2 * DEADLINE_S
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
        finally:
            gc.enable()
        assert not any(thread.is_alive() for thread in threads), "a member hangs"
        for groups in self._groups.values():
            for group in groups.values():
                group.end_transfers()  # a process that ends closes its sockets
        return found

    def _begin(self, name: str) -> None:
        setup = builders.setup(self._folder, patience_s=DEADLINE_S)
        session = self.sessions[name] = ScriptedSession(name, self, setup)
        session.run = Run(session, None)  # type: ignore[arg-type]

    def _member(self, name: str, script: Callable[[Run], Any], found: dict[str, Any]) -> None:
        session = self.sessions[name]
        run = session.run
        assert run is not None
        try:
            found[name] = script(run)
            run._finish()
        except (Killed, Released, Stranger, OthersEnded) as end:
            found[name] = end
        except BaseException as error:
            found[name] = error
            self._fail()
        finally:
            if session.group is not None and isinstance(found[name], Killed | Stranger):
                session.group.end_transfers()
            self._leave_node(session)

    def _leave_node(self, session: ScriptedSession) -> None:
        """Its process has ended, which its siblings see."""
        number = session.generation
        for name in self._plans[number - 1].node(session.worker) if number else "":
            if number in self._groups:
                self._groups[number][name].node.interrupt(f"{session.worker} is gone")

    def _fail(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()
        for groups in list(self._groups.values()):
            for group in groups.values():
                group.interrupt("another member failed")

    # ------------------------------------------------------------------------------------------------ what came out

    def samples(self, steps: int, per_step: int) -> SampleReport:
        """What the ledgers say of the first steps."""
        records = [record for file in (self._folder / "ledger").glob("*") for record in read_ledger(file)]
        return audit(records, {}, steps, per_step)
