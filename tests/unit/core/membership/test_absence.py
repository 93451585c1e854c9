"""A head that was away ejects nobody who went on: the head's inbox, conversations and machine, in simulated time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fallow.config import Config, Membership
from fallow.core.membership import events as ev
from fallow.core.membership.messages import Switch
from fallow.core.membership.state import Ballot
from fallow.core.membership.watch import Timing
from fallow.core.protocol.agents import FromAgent
from fallow.head.loop.inbox import Heard, Inbox, Tick
from fallow.head.peers.agents import agent_gone
from fallow.head.peers.hearing import RECONNECT_S
from fallow.model import AllocationKind, ChangeKind, Doing, MemberPhase, RunStatus
from runs import hold, new_book, new_run
from talk import CONTRACT, Played, Talk, settle

LEASE_S = 15.0
BEAT_S = 0.5
MEMBERSHIP = Membership(lease_s=LEASE_S, beat_s=BEAT_S)
TICK_S = 0.25


class World:
    """One run whose members finish a step with each beat, and the head's loop over it.

    Nodes that are `cut` train, but the head does not hear them, nor they the head. Nodes that are `dead` do nothing,
    and the others wait for them. `step_s` is what a step takes.
    """

    def __init__(self, folder: Path, members: int, standbys: int = 0, step_s: float = BEAT_S) -> None:
        book = new_book(folder, Config(membership=MEMBERSHIP), validate=True)
        self.talk = Talk(book)
        self.inbox = Inbox()
        self.step_s = step_s
        self.dead: set[int] = set()
        self.died_at: float | None = None
        self.cancelled: list[str] = []
        self.run = new_run(book, min_nodes=members, max_nodes=members)
        self.agents: list[Played] = []
        self.talk.pass_s(10.0)
        for _ in range(members + standbys):
            self.join()
        settle(self.talk, self.run, *self.agents)
        self.began_at = self.at
        assert self.run.roster.members == [agent.node for agent in self.agents[:members]]
        assert self.run.root.status is RunStatus.TRAINING

    @property
    def at(self) -> float:
        return self.talk.at

    @property
    def ballot(self) -> Ballot:
        """The change that is under way; there must be one."""
        ballot = self.run.machine.state.ballot
        assert ballot is not None
        return ballot

    @property
    def is_calm(self) -> bool:
        return self.run.machine.state.ballot is None

    def join(self) -> None:
        host = f"h{len(self.agents)}"
        allocation = hold(self.talk.turn, self.run, host, kind=AllocationKind.BASE, job_id=host)
        agent = self.talk.play(self.run, allocation, host, job_id=host).greet()
        self.agents.append(agent)
        agent.beat(ready=CONTRACT, doing=Doing.OUTSIDE)

    def cut(self, *numbers: int) -> None:
        """From now on the head and these do not hear each other; all others do."""
        self.talk.unreachable = {self.agents[number].peer for number in numbers}

    # -- what the nodes do --------------------------------------------------------------------------------------

    def put(self, number: int, message: FromAgent) -> None:
        self.inbox.put_nowait(Heard(self.agents[number].peer, message, self.at))

    def beat(self, numbers: Sequence[int] | None = None) -> None:
        """All nodes that can be heard say how things stand."""
        for number in range(len(self.agents)) if numbers is None else numbers:
            agent = self.agents[number]
            if number in self.dead or agent.peer in self.talk.unreachable or agent.report is None:
                continue
            if not agent.report.generation:
                self.put(number, agent.next_beat())
                continue
            stopped_at, waits = (self.at, False) if self.died_at is None else (self.died_at, True)
            step = int((stopped_at - self.began_at) / self.step_s)
            stalled_s = self.at - stopped_at if waits else (self.at - self.began_at) % self.step_s
            doing = Doing.WAITING if waits else Doing.WORKING
            self.put(number, agent.next_beat(step=step, doing=doing, stalled_s=stalled_s))

    def die(self, *numbers: int) -> None:
        self.dead |= set(numbers)
        self.died_at = self.at

    def vote(self, *numbers: int) -> None:
        """They are ready for the generation that is voted on; what it interrupts they have given up."""
        for number in numbers:
            self.put(number, self.agents[number].next_beat(**self.a_vote(number)))
        self.loop()

    def a_vote(self, number: int) -> dict[str, int]:
        change = self.ballot.change
        interrupted = change.replaces if change.interrupt and self.agents[number].node in self.run.roster.members else 0
        return {"prepared": change.generation, "given_up": interrupted}

    # -- what the head does -------------------------------------------------------------------------------------

    def loop(self) -> None:
        """The head's loop until nothing waits."""
        while not self.inbox.empty():
            try:
                self.inbox.take().send(None)
            except StopIteration as taken:
                items = taken.value
            if isinstance(items[0], Tick):
                self.talk.tick()
            else:
                self.talk.take([(item.peer, item.message, item.at) for item in items])
            self.cancelled += [token for _, token, _ in self.talk.turn.cancels]

    def live(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """The head is well for so long; returns for how long it was until the condition held."""
        began_at = self.at
        while self.at - began_at < seconds and not until():
            self.talk.pass_s(TICK_S)
            if int(self.at / TICK_S) % int(BEAT_S / TICK_S) == 0:
                self.beat()
            self.inbox.put_nowait(Tick())
            self.loop()
        return self.at - began_at

    def stall(self, seconds: float) -> None:
        """The loop stands still, as when it waits for its store, and its sockets are read all the while."""
        self.talk.pass_s(TICK_S)
        self.inbox.put_nowait(Tick())
        for _ in range(int((seconds - TICK_S) / BEAT_S)):
            self.talk.pass_s(BEAT_S)
            self.beat()
        self.loop()

    def freeze(self, seconds: float) -> None:
        """The process stands still (SIGSTOP): on waking up its clock is heard before its sockets are."""
        self.talk.pass_s(seconds)
        self.inbox.put_nowait(Tick())
        self.loop()

    # -- what came of it ----------------------------------------------------------------------------------------

    def told(self, kind: str) -> list[str]:
        return self.talk.texts(kind)

    def phase(self, number: int) -> MemberPhase:
        return self.run.roster.nodes[self.agents[number].node].phase

    def nodes(self, *numbers: int) -> list[int]:
        return [self.agents[number].node for number in numbers]

    def nobody_lost(self) -> None:
        assert self.told("eject") + self.told("lost") + self.told("abort") == []
        assert (self.run.root.generation, self.run.root.highest) == (1, 1)
        assert not self.cancelled
        assert all(allocation.live for allocation in self.run.allocations.values())
        assert all(node.alive for node in self.run.roster.nodes.values())


@pytest.mark.parametrize("seconds", [5.0, 20.0, 60.0, 600.0])
@pytest.mark.parametrize("how", ["stall", "freeze"])
def test_d1_a_head_that_stood_still_ejects_nobody(tmp_path: Path, how: str, seconds: float) -> None:
    world = World(tmp_path, members=4)
    world.live(20.0)
    getattr(world, how)(seconds)
    world.live(60.0)
    world.nobody_lost()
    assert world.run.roster.front == int((world.at - world.began_at) / BEAT_S)


@pytest.mark.parametrize("seconds", [20.0, 60.0, 600.0])
@pytest.mark.parametrize("step_s", [BEAT_S, 100.0])
def test_d1_a_head_that_was_cut_off_ejects_nobody_however_late_the_last_is_heard_again(
    tmp_path: Path, seconds: float, step_s: float
) -> None:
    """Connections come back one by one, 30 s apart where the last retransmission was just missed."""
    world = World(tmp_path, members=3, standbys=1, step_s=step_s)
    world.live(20.0)
    world.cut(0, 1, 2, 3)
    world.live(seconds)
    left = [0, 1, 2, 3]
    for number, wait_s in ((2, 10.0), (0, 18.0), (3, 2.0), (1, 60.0)):
        left.remove(number)
        world.cut(*left)
        world.live(wait_s)
    world.nobody_lost()


def test_a_member_that_only_the_head_cannot_hear_stays_as_long_as_the_others_step_on(tmp_path: Path) -> None:
    world = World(tmp_path, members=3)
    world.live(10.0)
    world.cut(1)
    world.live(700.0)
    world.nobody_lost()
    world.cut()
    world.live(5.0)
    world.nobody_lost()
    assert world.run.roster.nodes[world.agents[1].node].step == world.run.roster.front


def test_a_member_that_only_the_head_cannot_hear_stays_while_the_others_compute_a_long_step(tmp_path: Path) -> None:
    """They do not wait for it yet, so nothing says that it is gone."""
    world = World(tmp_path, members=2, step_s=200.0)
    world.live(10.0)
    world.cut(1)
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
    took_s = world.live(60.0, until=lambda: not world.is_calm)
    assert LEASE_S - 2.0 <= took_s <= LEASE_S + 1.0
    assert world.ballot.members == world.nodes(0, 2)
    (told,) = world.told("eject")
    assert told.startswith("n1 (h1) is gone: silent for 15.")
    world.vote(0, 2)
    world.died_at = None
    settle(world.talk, world.run, world.agents[0], world.agents[2], step=world.run.roster.front)
    held = [world.run.allocations[agent.hello.token] for agent in world.agents]
    world.live(Membership().head_patience_s - 60.0)
    assert all(allocation.live for allocation in held), "it may come back"
    world.live(90.0)
    assert [allocation.live for allocation in held] == [True, False, True]
    assert not world.run.roster.nodes[world.agents[1].node].proved_gone


def test_where_all_members_are_silent_nothing_is_done_and_no_standby_begins_alone(tmp_path: Path) -> None:
    """They train on: the link of the head to their network is down, not that to the standby."""
    world = World(tmp_path, members=2, standbys=1)
    world.live(10.0)
    world.cut(0, 1)
    world.live(600.0)
    world.nobody_lost()
    world.cut()
    world.live(5.0)
    world.nobody_lost()


def test_a_standby_that_fell_silent_is_let_go(tmp_path: Path) -> None:
    """Nobody waits for it, so it gets no more than its lease."""
    world = World(tmp_path, members=2, standbys=1)
    world.live(10.0)
    world.cut(2)
    took_s = world.live(60.0, until=lambda: world.phase(2) is not MemberPhase.READY)
    assert LEASE_S <= took_s <= LEASE_S + 1.0
    assert world.run.roster.members == world.nodes(0, 1)
    assert world.run.root.generation == 1


def test_votes_that_lie_in_the_inbox_count_however_late_the_head_reads_them(tmp_path: Path) -> None:
    world = World(tmp_path, members=2)
    world.live(5.0)
    world.run.root.maximum = world.run.root.limit = 3
    world.join()
    generation = world.ballot.change.generation
    world.talk.pass_s(TICK_S)
    world.inbox.put_nowait(Tick())
    for number in range(3):
        world.put(number, world.agents[number].next_beat(**world.a_vote(number)))
    world.talk.pass_s(120.0)
    world.loop()
    assert world.told("abort") == []
    assert world.run.roster.members == world.nodes(0, 1, 2)
    assert world.run.root.generation == generation


def test_the_last_member_is_not_taken_for_gone_by_silence_and_a_standby_begins_when_its_end_is_proved(
    tmp_path: Path,
) -> None:
    """One member died, as its agent says, while the other is cut off from the head: that one holds the state."""
    world = World(tmp_path, members=2, standbys=1)
    world.live(10.0)
    world.cut(1)
    world.agents[0].end(None, signal=9)
    world.live(600.0)
    assert world.phase(1) is MemberPhase.MEMBER
    assert world.told("lost") == []
    assert (world.run.root.generation, world.run.roster.members) == (1, world.nodes(0, 1))
    assert world.ballot.members == world.nodes(1)
    agent = world.agents[1]
    agent_gone(world.talk.turn, world.run, world.run.allocations[agent.hello.token], "h1", "its job ended")
    world.live(2.0)
    assert world.ballot.members == world.nodes(2)


def test_a_leaver_whose_node_went_with_it_holds_up_nobody(tmp_path: Path) -> None:
    """It passed the boundary, as a member of the new generation shows, and nobody waits for it any more."""
    world = World(tmp_path, members=2)
    world.live(10.0)
    world.talk.turn.apply(world.run, ev.Release(at=world.at, nodes=(world.agents[1].node,), reason="walltime"))
    world.live(TICK_S)
    world.vote(0, 1)
    world.agents[0].beat(generation=2, has_state=True, switch=Switch(generation=2, first_step=9))
    assert not world.is_calm
    world.cut(1)
    took_s = world.live(60.0, until=lambda: world.is_calm)
    assert LEASE_S <= took_s <= LEASE_S + 1.0
    assert world.run.roster.members == world.nodes(0)
    assert [report.kind for report in world.run.generations] == [ChangeKind.START, ChangeKind.RELEASE]


def test_a_newcomer_that_does_not_hear_of_its_change_after_an_absence_is_asked_again(tmp_path: Path) -> None:
    """The change is given up, for the members need not wait, but not the newcomer."""
    world = World(tmp_path, members=2)
    world.live(5.0)
    world.run.root.maximum = world.run.root.limit = 3
    world.join()
    world.vote(0, 1)
    world.live(20.0)
    world.cut(0, 1, 2)
    world.live(20.0)
    world.cut(2)
    world.live(20.0)
    assert len(world.told("abort")) == 1
    assert world.is_calm, "it cannot hear of another one"
    world.cut()
    world.live(2.0)
    assert world.told("eject") == []
    assert world.ballot.members == world.nodes(0, 1, 2)


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
        world.agents[1].end(None, signal=9)
        generation = world.ballot.change.generation
        world.vote(*voted)
        world.live(Timing().rebuild_s - left_s)
        if how == "freeze":
            world.freeze(away_s)
        for number in {0, 2} - voted:
            world.put(number, world.agents[number].next_beat(**world.a_vote(number)))
        if how == "stall":
            world.stall(away_s)
        world.loop()
        assert world.told("abort") == []
        assert (world.run.root.generation, world.run.roster.members) == (generation, world.nodes(0, 2))


def test_d1_agents_without_workers_are_not_given_up_after_an_absence_either(tmp_path: Path) -> None:
    """Their connections come back one by one, too."""
    world = World(tmp_path, members=2, standbys=1)
    world.live(10.0)
    world.agents[2].end(1)
    world.dead.add(2)
    allocation = world.run.allocations[world.agents[2].hello.token]
    allocation.agents["h2"].again_at = world.talk.now + 1e6
    world.freeze(600.0)
    world.live(RECONNECT_S - 1.0)
    assert allocation.live
    world.live(5.0)
    assert not allocation.live
