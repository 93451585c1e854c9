"""A run that goes on for long: what the head knows of it, and writes at each change, does not grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fallow.config import Checkpoint, Membership
from fallow.core import events as ev
from fallow.core.allocations import Allocation
from fallow.core.timing import Timing
from fallow.files import Paths
from fallow.head import accounts
from fallow.head.book import Book, Run
from fallow.head.forgetting import KEPT_REPORTS, old_reports, reports
from fallow.head.peers import Peers
from fallow.head.turn import Turn, agent_peer
from fallow.model import (
    PROTOCOL,
    Active,
    AgentHello,
    AgentLeft,
    AllocationKind,
    Beat,
    ChangeKind,
    Dismiss,
    FromPeer,
    Left,
    Parts,
    RunSpec,
    RunStatus,
    Vote,
    WorkerExit,
    WorkerHello,
    WorkerKey,
    WorkerPhase,
    WorkerReady,
)


class Life:
    """A run whose members come and go."""

    def __init__(self, folder: Path, *, local: bool) -> None:
        self.paths = Paths(state=folder / "state", runtime=folder / "runtime").create()
        timing = Timing(prepare_s=10, start_s=60, lease_s=1e9, progress_s=1e9)
        self.names = iter(f"{number:012x}" for number in range(10**9))
        self.book = Book(self.paths, timing=timing, public_key="k" * 40, new_id=lambda: next(self.names)[::-1])
        self.peers = Peers(Membership(lease_s=600.0), Checkpoint())
        self.at, self.now, self.step = 1.0, 1e9, 0
        self.run: Run = self.book.create(
            RunSpec(run="", name="r", min_nodes=1, max_nodes=8, local=local), self.at, self.now
        )
        self.run.roster.limit = 8
        self.turn = self.new_turn()
        self.told: list[Any] = []

    def new_turn(self) -> Turn:
        self.turn = Turn(self.book, self.at, self.now)
        return self.turn

    def hear(self, peer: str, message: FromPeer) -> None:
        self.peers.hear(self.turn, peer, message)

    def say(self, worker: str, message: FromPeer) -> None:
        self.hear(self.run.record.worker_keys[worker], message)

    def come(self) -> str:
        """A node comes, and its worker is ready."""
        made = self.book.new_allocation(self.run, AllocationKind.HARVEST, self.now)
        hello = AgentHello(
            agent="n1", token=made.token, protocol=PROTOCOL, version="0", job_id=made.token, node="n1", slots=1, pid=1
        )
        self.hear(agent_peer(made, "n1"), hello)
        (worker,) = made.workers
        self.hear(agent_peer(made, "n1"), WorkerKey(worker=worker, public_key=f"key of {worker}"))
        hello_ = WorkerHello(worker=worker, protocol=PROTOCOL, pid=5, version="0", torch="2", address="127.0.0.1")
        self.say(worker, hello_)
        self.say(worker, WorkerReady(worker=worker, signature="s", layout=["w"], shards=8, global_batch=16))
        return worker

    def change(self) -> None:
        """The change under way goes through."""
        change = self.run.roster.change
        assert change is not None
        self.step += 10
        for worker in change.participants:
            self.say(worker, Vote(worker=worker, generation=change.generation, ok=True))
        for worker in change.leavers:
            self.say(worker, Left(worker=worker, generation=change.replaces, step=self.step))
        for worker in change.members:
            beat = Beat(
                worker=worker, generation=change.generation, prepared=change.generation, step=self.step, held=False
            )
            self.say(worker, beat)
            active = Active(
                worker=worker, generation=change.generation, first_step=self.step, pause_s=0.1, parts=Parts()
            )
            self.say(worker, active)
        assert self.run.roster.status is RunStatus.TRAINING

    def allocation(self, worker: str) -> Allocation:
        return self.run.allocation_of(worker)

    def exits(self, worker: str, signal: int | None = None) -> None:
        """Its process ends, and then its agent."""
        made = self.allocation(worker)
        code = 0 if signal is None else None
        self.hear(agent_peer(made, "n1"), WorkerExit(worker=worker, code=code, signal=signal))

    def agent_ends(self, made: Allocation) -> None:
        self.hear(agent_peer(made, "n1"), AgentLeft(code=0))
        # A poll shows that its job is over.
        made.settled = True
        self.book.close(self.run, made)

    def pass_time(self, seconds: float = 300.0) -> None:
        self.at, self.now = self.at + seconds, self.now + seconds
        turn = self.new_turn()
        for made in self.run.live_allocations():
            self.run.agent_seen[made.token, "n1"] = self.at
        for worker in self.run.roster.workers:
            self.run.machine._watch.hear(worker, self.at)
        self.peers.tick(turn)
        accounts.note(turn)
        accounts.settle(turn, self.now)
        old_reports(self.run)

    def live_on(self, changes: int) -> None:
        """Somebody comes, somebody goes: released, or killed every third time."""
        for number in range(changes // 2):
            self.come()
            self.change()
            oldest = self.run.roster.members[0]
            made = self.allocation(oldest)
            if number % 3:
                self.turn.release_allocation(self.run, made, "its time is over")
                self.change()
                self.exits(oldest)
            else:
                made.restarts["n1"] = 0
                self.turn.apply(self.run, ev.ReleaseWanted(at=self.at, workers=[oldest], reason="x"))
                self.exits(oldest, signal=9)
                self.change()
            self.agent_ends(made)
            self.run.roster.limit = 8
            self.pass_time()


def size(run: Run) -> int:
    return len(msgspec.msgpack.encode(run.record))


def counts(life: Life) -> dict[str, int]:
    run = life.run
    return {
        "principals": len(life.book.principals),
        "beats": len(run.beats),
        "agents": len(run.agent_seen),
        "workers": len(run.roster.workers),
        "keys": len(run.record.worker_keys),
        "allocations": len(run.record.allocations),
        "heard": len(run.machine._watch._heard),
        "sent": len(run.machine._effects._sent),
        "reports": len(run.roster.history),
    }


@pytest.mark.parametrize("local", [False, True])
def test_after_a_thousand_changes_no_more_is_known_and_written_than_after_a_hundred(
    tmp_path: Path, local: bool
) -> None:
    life = Life(tmp_path, local=local)
    life.come()
    life.change()
    life.live_on(100)
    known, written = counts(life), size(life.run)
    life.live_on(900)
    assert all(count <= known[what] + 2 for what, count in counts(life).items()), (known, counts(life))
    assert size(life.run) < 1.1 * written + 500
    whole = reports(life.run)
    assert len(whole) == 1001
    numbers = [report.generation for report in whole]
    assert numbers == sorted(set(numbers))
    assert whole[0].kind is ChangeKind.START
    assert len(life.run.roster.history) < KEPT_REPORTS + 10
    assert life.run.roster.front == life.step == 10 * 1001


def test_one_that_may_still_run_is_told_to_end_however_long_it_was_silent(tmp_path: Path) -> None:
    life = Life(tmp_path, local=True)
    first, second = life.come(), life.come()
    life.change()
    life.change()
    made = life.allocation(second)
    life.peers.agent_gone(life.turn, life.run, made, "n1", "silent")
    life.change()
    for _ in range(20):
        life.pass_time()
    assert life.run.roster.workers[second].phase is WorkerPhase.GONE
    life.new_turn()
    life.say(second, Beat(worker=second, generation=2, prepared=2, step=5, held=False))
    assert [type(message) for _, message in life.turn.messages] == [Dismiss]
    assert life.run.roster.members == [first]


def test_one_whose_place_another_will_take_is_not_forgotten_before(tmp_path: Path) -> None:
    life = Life(tmp_path, local=False)
    worker = life.come()
    life.change()
    made = life.allocation(worker)
    made.restarts["n1"] = 1  # the first crash is made good at once
    life.exits(worker, signal=11)
    assert list(made.again) == [worker]
    life.pass_time(0.5)
    assert worker in life.run.roster.workers
    assert made.live
    life.pass_time(5.0)
    assert made.workers == ["w1"]
    assert list(life.run.roster.workers) == ["w1"]
    assert made.exited == []
