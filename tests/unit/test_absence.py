"""A head that was away ejects nobody who went on: the head's inbox, peers and machine, in simulated time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fallow.config import Checkpoint, Membership
from fallow.core import events as ev
from fallow.core.allocations import Allocation
from fallow.core.lease_clock import RECONNECT_S
from fallow.core.timing import Timing
from fallow.files import Paths
from fallow.head.book import Book, Principal
from fallow.head.inbox import Heard, Inbox, Tick
from fallow.head.peers import Peers
from fallow.head.turn import Turn
from fallow.model import (
    PROTOCOL,
    Active,
    AgentBeat,
    AgentHello,
    AllocationKind,
    AllocationState,
    Beat,
    Doing,
    FromPeer,
    Parts,
    RunSpec,
    RunStatus,
    Vote,
    WorkerExit,
    WorkerHello,
    WorkerPhase,
    WorkerReady,
)

LEASE_S = 15.0
BEAT_S = 0.5
TICK_S = 0.25
UNIX = 1_000_000.0


class World:
    """One run whose members finish a step with each beat, and the head's loop over it.

    Nodes that are `cut` train, but the head does not hear them. Nodes that are `dead` do nothing, and the others wait
    for them. `step_s` is what a step takes.
    """

    def __init__(self, folder: Path, members: int, standbys: int = 0, step_s: float = BEAT_S) -> None:
        paths = Paths(state=folder / "state", runtime=folder / "runtime").create()
        timing = Timing(lease_s=LEASE_S)
        self.book = Book(paths, timing=timing, public_key="k" * 40, new_id=iter("abcdefghijkl").__next__, validate=True)
        self.peers = Peers(Membership(lease_s=LEASE_S, beat_s=BEAT_S), Checkpoint())
        self.inbox = Inbox()
        self.at = 10.0
        self.step_s = step_s
        self.cut: set[int] = set()
        self.dead: set[int] = set()
        self.died_at: float | None = None
        self.turns: list[Turn] = []
        self.run = self.book.create(
            RunSpec(run="", name="r", min_nodes=members, max_nodes=members), self.at, UNIX + self.at
        )
        self.allocations: list[Allocation] = []
        for number in range(members + standbys):
            self.join(number)
        for number in range(members):
            self.say(number, Vote(worker=f"w{number}", generation=1, ok=True))
        for number in range(members):
            began = Active(worker=f"w{number}", generation=1, first_step=0, pause_s=0.1, parts=Parts())
            self.say(number, began)
        self.began_at = self.at
        assert self.roster.members == [f"w{number}" for number in range(members)]
        assert self.roster.status is RunStatus.TRAINING

    @property
    def roster(self):  # type: ignore[no-untyped-def]
        return self.run.roster

    def join(self, number: int) -> None:
        allocation = self.book.new_allocation(self.run, AllocationKind.BASE, UNIX)
        self.allocations.append(allocation)
        hello = AgentHello(
            agent="a",
            token=allocation.token,
            version="0.0",
            job_id=str(number),
            node=f"n{number}",
            slots=1,
            pid=1,
        )
        self.put(f"{allocation.public_key} a", hello)
        self.loop()
        name, key = f"w{number}", f"{number}" * 40
        self.run.record.worker_keys[name] = key
        self.book.principals[key] = Principal(self.run.id, allocation.token, name)
        self.say(
            number,
            WorkerHello(worker=name, pid=5, version="0.0", torch="2", address="127.0.0.1"),
        )
        self.say(number, WorkerReady(worker=name, signature="s", layout=[], shards=8, global_batch=8))

    # -- what the nodes do --------------------------------------------------------------------------------------

    def put(self, peer: str, message: FromPeer) -> None:
        self.inbox.put_nowait(Heard(peer, message))

    def say(self, number: int, message: FromPeer) -> None:
        self.put(f"{number}" * 40, message)
        self.loop()

    def beat(self, numbers: Sequence[int] | None = None) -> None:
        """All nodes that can be heard say how things stand."""
        stopped_at = self.at if self.died_at is None else self.died_at
        for number in range(len(self.allocations)) if numbers is None else numbers:
            worker = self.roster.workers.get(f"w{number}")
            if number in self.cut | self.dead or worker is None:
                continue
            trains = worker.phase in (WorkerPhase.MEMBER, WorkerPhase.LEAVING)
            waits = trains and self.died_at is not None
            message = Beat(
                worker=f"w{number}",
                generation=self.roster.generation if trains else 0,
                prepared=self.roster.generation if trains else 0,
                step=int((stopped_at - self.began_at) / self.step_s) if trains else 0,
                held=False,
                doing=Doing.WAITING if waits else Doing.WORKING if trains else Doing.OUTSIDE,
                stalled_s=self.at - stopped_at if waits else (self.at - self.began_at) % self.step_s,
            )
            self.put(f"{number}" * 40, message)
            self.put(f"{self.allocations[number].public_key} a", AgentBeat(alive=[f"w{number}"]))

    def die(self, *numbers: int) -> None:
        self.dead |= set(numbers)
        self.died_at = self.at

    # -- what the head does -------------------------------------------------------------------------------------

    def loop(self) -> None:
        """The head's loop until nothing waits."""
        while not self.inbox.empty():
            try:
                self.inbox.take().send(None)
            except StopIteration as taken:
                items = taken.value
            turn = Turn(self.book, self.at, UNIX + self.at)
            for item in items:
                if isinstance(item, Tick):
                    self.peers.tick(turn)
                else:
                    assert isinstance(item, Heard)
                    self.peers.hear(turn, item.peer, item.message)
            self.turns.append(turn)

    def live(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """The head is well for so long; returns for how long it was until the condition held."""
        began_at = self.at
        while self.at - began_at < seconds and not until():
            self.at += TICK_S
            if int(self.at / TICK_S) % int(BEAT_S / TICK_S) == 0:
                self.beat()
            self.inbox.put_nowait(Tick())
            self.loop()
        return self.at - began_at

    def stall(self, seconds: float) -> None:
        """The loop stands still, as when it waits for its store, and its sockets are read all the while."""
        self.at += TICK_S
        self.inbox.put_nowait(Tick())
        for _ in range(int((seconds - TICK_S) / BEAT_S)):
            self.at += BEAT_S
            self.beat()
        self.loop()

    def freeze(self, seconds: float) -> None:
        """The process stands still (SIGSTOP): on waking up its clock is heard before its sockets are."""
        self.at += seconds
        self.inbox.put_nowait(Tick())
        self.loop()

    # -- what came of it ----------------------------------------------------------------------------------------

    def told(self, kind: str) -> list[str]:
        return [record.text for turn in self.turns for record in turn.records if record.kind == kind]

    def nobody_lost(self) -> None:
        assert self.told("eject") + self.told("lost") + self.told("abort") == []
        assert self.roster.generation == 1
        assert self.roster.high == 1
        assert not any(turn.cancels for turn in self.turns)
        assert all(allocation.live for allocation in self.allocations)
        assert all(worker.phase is not WorkerPhase.GONE for worker in self.roster.workers.values())


@pytest.mark.parametrize("seconds", [5.0, 20.0, 60.0, 600.0])
@pytest.mark.parametrize("how", ["stall", "freeze"])
def test_d1_a_head_that_stood_still_ejects_nobody(tmp_path: Path, how: str, seconds: float) -> None:
    world = World(tmp_path, members=4)
    world.live(20.0)
    getattr(world, how)(seconds)
    world.live(60.0)
    world.nobody_lost()
    assert world.roster.front == int((world.at - world.began_at) / BEAT_S)


@pytest.mark.parametrize("seconds", [20.0, 60.0, 600.0])
@pytest.mark.parametrize("step_s", [BEAT_S, 100.0])
def test_d1_a_head_that_was_cut_off_ejects_nobody_however_late_the_last_is_heard_again(
    tmp_path: Path, seconds: float, step_s: float
) -> None:
    """Connections come back one by one, 30 s apart where the last retransmission was just missed."""
    world = World(tmp_path, members=3, standbys=1, step_s=step_s)
    world.live(20.0)
    world.cut = {0, 1, 2, 3}
    world.live(seconds)
    for number, wait_s in ((2, 10.0), (0, 18.0), (3, 2.0), (1, 60.0)):
        world.cut.discard(number)
        world.live(wait_s)
    world.nobody_lost()


def test_a_member_that_only_the_head_cannot_hear_stays_as_long_as_the_others_step_on(tmp_path: Path) -> None:
    world = World(tmp_path, members=3)
    world.live(10.0)
    world.cut = {1}
    world.live(600.0)
    world.nobody_lost()
    world.cut = set()
    world.live(5.0)
    world.nobody_lost()
    assert world.roster.workers["w1"].step == world.roster.front


def test_a_member_that_only_the_head_cannot_hear_stays_while_the_others_compute_a_long_step(tmp_path: Path) -> None:
    """They do not wait for it yet, so nothing says that it is gone."""
    world = World(tmp_path, members=2, step_s=200.0)
    world.live(10.0)
    world.cut = {1}
    world.live(150.0)
    world.nobody_lost()


@pytest.mark.parametrize("stalled_s", [0.0, 20.0])
def test_a_node_that_died_is_given_up_after_its_lease(tmp_path: Path, stalled_s: float) -> None:
    """The same after an absence of the head in which it died: the others have waited for it by then."""
    world = World(tmp_path, members=3)
    world.live(10.0)
    world.die(1)
    if stalled_s:
        world.stall(stalled_s)
    took_s = world.live(60.0, until=lambda: "w1" not in world.roster.members or world.roster.change is not None)
    assert LEASE_S - 2.0 <= took_s <= LEASE_S + 1.0
    assert world.roster.change is not None
    assert world.roster.change.members == ["w0", "w2"]
    (told,) = world.told("eject")
    assert told.startswith("w1 on n1 is gone: ")
    world.live(RECONNECT_S if stalled_s else TICK_S)
    assert world.allocations[1].state is AllocationState.ENDED
    assert world.allocations[0].live


def test_where_all_members_are_silent_nothing_is_done_and_no_standby_begins_alone(tmp_path: Path) -> None:
    """They train on: the link of the head to their network is down, not that to the standby."""
    world = World(tmp_path, members=2, standbys=1)
    world.live(10.0)
    world.cut = {0, 1}
    world.live(600.0)
    world.nobody_lost()
    world.cut = set()
    world.live(5.0)
    world.nobody_lost()


def test_a_standby_that_fell_silent_is_let_go(tmp_path: Path) -> None:
    """Nobody waits for it, so it gets no more than its lease."""
    world = World(tmp_path, members=2, standbys=1)
    world.live(10.0)
    world.cut = {2}
    took_s = world.live(60.0, until=lambda: not world.roster.alive("w2"))
    assert LEASE_S <= took_s <= LEASE_S + 1.0
    assert world.roster.members == ["w0", "w1"]
    assert world.roster.generation == 1


def test_a_worker_that_is_silent_where_its_agent_is_heard_hangs(tmp_path: Path) -> None:
    """The only member: nobody else could wait for it, but the network to its node is known to work."""
    world = World(tmp_path, members=1)
    world.live(10.0)
    world.cut = {0}
    peer = f"{world.allocations[0].public_key} a"
    for _ in range(2 * int(LEASE_S)):
        world.put(peer, AgentBeat(alive=["w0"]))
        world.live(1.0)
    (told,) = world.told("eject")
    assert told.startswith("w0 on n0 is gone: silent for 15.")


def test_votes_that_lie_in_the_inbox_count_however_late_the_head_reads_them(tmp_path: Path) -> None:
    world = World(tmp_path, members=2)
    world.live(5.0)
    world.run.roster.max_members = world.run.roster.limit = 3
    world.join(2)
    assert world.roster.change is not None
    generation = world.roster.change.generation
    world.at += TICK_S
    world.inbox.put_nowait(Tick())
    for number in range(3):
        world.put(f"{number}" * 40, Vote(worker=f"w{number}", generation=generation, ok=True))
    world.at += 120.0
    world.loop()
    assert world.told("abort") == []
    assert world.roster.members == ["w0", "w1", "w2"]
    assert world.roster.generation == generation


def test_the_last_member_is_not_taken_for_gone_by_silence_and_a_standby_begins_when_its_end_is_proved(
    tmp_path: Path,
) -> None:
    """One member died, as its agent says, while the other is cut off from the head: that one holds the state."""
    world = World(tmp_path, members=2, standbys=1)
    world.live(10.0)
    world.cut = {1}
    world.put(f"{world.allocations[0].public_key} a", WorkerExit(worker="w0", code=None, signal=9))
    world.live(600.0)
    assert world.roster.alive("w1")
    assert world.told("lost") == []
    assert (world.roster.generation, world.roster.members) == (1, ["w0", "w1"])
    assert world.roster.change is not None
    assert world.roster.change.members == ["w1"]
    turn = Turn(world.book, world.at, UNIX + world.at)
    world.peers.agent_gone(turn, world.run, world.allocations[1], "a", "its job ended")
    assert world.roster.change.members == ["w2"]


def test_a_leaver_whose_node_went_with_it_holds_up_nobody(tmp_path: Path) -> None:
    """It passed the boundary, as the new generation's being active shows, and nobody waits for it any more."""
    world = World(tmp_path, members=2)
    world.live(10.0)
    turn = Turn(world.book, world.at, UNIX + world.at)
    turn.apply(world.run, ev.ReleaseWanted(at=world.at, workers=["w1"], reason="walltime"))
    for number in range(2):
        world.say(number, Vote(worker=f"w{number}", generation=2, ok=True))
    world.say(0, Active(worker="w0", generation=2, first_step=9, pause_s=0.1, parts=Parts()))
    world.cut = {1}
    assert world.roster.change is not None
    took_s = world.live(60.0, until=lambda: world.roster.change is None)
    assert LEASE_S <= took_s <= LEASE_S + 1.0
    assert world.roster.members == ["w0"]
    assert [report.kind for report in world.roster.history] == ["start", "release"]


def test_a_newcomer_that_does_not_hear_of_its_change_after_an_absence_is_asked_again(tmp_path: Path) -> None:
    """The change is given up, for the members need not wait, but not the newcomer."""
    world = World(tmp_path, members=2)
    world.live(5.0)
    world.run.roster.max_members = world.run.roster.limit = 3
    world.join(2)
    for number in range(2):
        world.say(number, Vote(worker=f"w{number}", generation=2, ok=True))
    world.live(20.0)
    world.cut = {0, 1, 2}
    world.live(20.0)
    world.cut = {2}
    world.live(20.0)
    assert len(world.told("abort")) == 1
    assert world.roster.change is None, "it cannot hear of another one"
    world.cut = set()
    world.live(2.0)
    assert world.told("eject") == []
    assert world.roster.change is not None
    assert world.roster.change.members == ["w0", "w1", "w2"]


@settings(max_examples=20, deadline=None)
@given(
    how=st.sampled_from(["stall", "freeze"]),
    left_s=st.floats(0.3, 3.0),
    away_s=st.floats(2.0, 60.0),
    voted=st.sets(st.sampled_from([0, 2]), max_size=1),
)
@example(how="freeze", left_s=0.3, away_s=60.0, voted={0})
def test_a_head_that_was_away_takes_up_the_interrupting_change_that_was_under_way(
    how: str, left_s: float, away_s: float, voted: set[int]
) -> None:
    """Its members' votes lie unread: the group is neither given up nor built without them."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), members=3)
        world.live(1.0)
        world.die(1)
        world.put(f"{world.allocations[1].public_key} a", WorkerExit(worker="w1", code=None, signal=9))
        world.loop()
        change = world.roster.change
        assert change is not None
        for number in voted:
            world.say(number, Vote(worker=f"w{number}", generation=change.generation, ok=True))
        world.live(Timing().rebuild_s - left_s)
        if how == "freeze":
            world.freeze(away_s)
        for number in {0, 2} - voted:
            world.put(f"{number}" * 40, Vote(worker=f"w{number}", generation=change.generation, ok=True))
        if how == "stall":
            world.stall(away_s)
        world.loop()
        assert world.told("abort") == []
        assert (world.roster.generation, world.roster.members) == (change.generation, ["w0", "w2"])
