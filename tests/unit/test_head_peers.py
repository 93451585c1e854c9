"""Peers of another protocol are refused in words, and nothing comes of what they say."""

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
from fallow.head.book import Book, Principal, Run
from fallow.head.peers import Peers
from fallow.head.turn import Turn, agent_peer
from fallow.model import (
    PROTOCOL,
    Active,
    AgentBeat,
    AgentEnd,
    AgentHello,
    AgentLeft,
    AgentPlan,
    AllocationKind,
    AllocationState,
    Beat,
    BeatAck,
    Checkpointed,
    CheckpointFailed,
    Exit,
    FromPeer,
    Held,
    Notice,
    Parts,
    Refused,
    RunSpec,
    StopWorker,
    Vote,
    Welcome,
    WorkerExit,
    WorkerHello,
    WorkerReady,
)


@pytest.fixture
def turn(tmp_path: Path) -> Turn:
    paths = Paths(state=tmp_path / "state", runtime=tmp_path / "runtime").create()
    timing = Timing(prepare_s=10, start_s=60, lease_s=10)
    return Turn(Book(paths, timing=timing, public_key="k" * 40, new_id=lambda: "123456abcdef"), at=1.0, now=1000.0)


@pytest.fixture
def run(turn: Turn) -> Run:
    return turn.book.create(RunSpec(run="", name="r", min_nodes=1, max_nodes=2), turn.at, turn.now)


@pytest.fixture
def allocation(turn: Turn, run: Run) -> Allocation:
    return turn.book.new_allocation(run, AllocationKind.BASE, turn.now)


def hear(turn: Turn, peer: str, message: FromPeer) -> None:
    Peers(Membership(), Checkpoint()).hear(turn, peer, message)


def agent(allocation: Allocation, protocol: int) -> AgentHello:
    return AgentHello(
        agent="n1", token=allocation.token, protocol=protocol, version="0.0", job_id="7", node="n1", slots=1, pid=1
    )


def worker(protocol: int) -> WorkerHello:
    return WorkerHello(worker="w0", protocol=protocol, pid=5, version="0.0", torch="2", address="127.0.0.1")


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_an_agent_of_another_protocol_is_refused(turn: Turn, run: Run, allocation: Allocation, protocol: int) -> None:
    hear(turn, f"{allocation.public_key} n1", agent(allocation, protocol))
    ((_, refusal),) = turn.messages
    assert isinstance(refusal, Refused)
    assert refusal.code == Exit.NO_RESTART
    assert f"version 0.0 (protocol {protocol}), the head" in refusal.message
    assert f"(protocol {PROTOCOL}); use one Fallow version" in refusal.message
    assert not allocation.agents
    assert not run.roster.workers


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_worker_of_another_protocol_is_refused(turn: Turn, run: Run, allocation: Allocation, protocol: int) -> None:
    hear(turn, f"{allocation.public_key} n1", agent(allocation, PROTOCOL))
    assert any(isinstance(message, AgentPlan) for _, message in turn.messages)
    run.record.worker_keys["w0"] = "key"
    turn.book.principals["key"] = Principal(run.id, allocation.token, "w0")
    turn.messages.clear()
    hear(turn, "key", worker(protocol))
    ((_, refusal),) = turn.messages
    assert isinstance(refusal, Refused)
    assert refusal.code == Exit.CONFIG
    assert refusal.message == f"worker w0 speaks protocol {protocol}, this head {PROTOCOL}; use one Fallow version"
    assert run.roster.workers["w0"].pid == 0
    turn.messages.clear()
    hear(turn, "key", worker(PROTOCOL))
    assert [type(message) for _, message in turn.messages] == [Welcome]
    assert run.roster.workers["w0"].pid == 5
    assert isinstance(run.machine.story[-1], ev.Said)


@pytest.mark.parametrize("goes_on", [False, True])
def test_s6_a_worker_that_was_stopped_for_a_moment_is_not_killed(
    turn: Turn, run: Run, allocation: Allocation, goes_on: bool
) -> None:
    """It does not beat yet, or not so soon: its agent says that it goes on."""
    hear(turn, f"{allocation.public_key} n1", agent(allocation, PROTOCOL))
    hear(turn, agent_peer(allocation, "n1"), AgentBeat(alive=["w0"], stopped=["w0"]))
    turn.at += 0.1
    hear(turn, agent_peer(allocation, "n1"), AgentBeat(alive=["w0"], stopped=[] if goes_on else ["w0"]))
    turn.at += 3.0
    Peers(Membership(), Checkpoint()).tick(turn)
    assert any(isinstance(message, StopWorker) for _, message in turn.messages) is not goes_on


def test_the_first_crash_on_a_node_is_made_good_at_once_and_later_ones_after_a_while(
    turn: Turn, run: Run, allocation: Allocation
) -> None:
    def crash(worker: str) -> None:
        hear(turn, agent_peer(allocation, "n1"), WorkerExit(worker=worker, code=None, signal=9))

    def started() -> list[str]:
        turn.messages.clear()
        Peers(Membership(), Checkpoint()).tick(turn)
        return [name for _, message in turn.messages if isinstance(message, AgentPlan) for name in message.workers]

    hear(turn, f"{allocation.public_key} n1", agent(allocation, PROTOCOL))
    run.roster.generation = 1  # it has trained
    crash("w0")
    assert started() == ["w1"]
    for worker, wait_s in (("w1", 2.0), ("w2", 4.0)):
        crash(worker)
        turn.now += wait_s - 0.1
        assert started() == []
        turn.now += 0.1
        assert started() == [f"w{int(worker[1:]) + 1}"]
    texts = [record.text for record in turn.records if record.kind == "restart"]
    assert [text.rpartition(" on n1 ")[2] for text in texts] == ["now", "in 2 s", "in 4 s"]


def test_members_are_told_when_the_run_has_to_be_saved(turn: Turn, run: Run, allocation: Allocation) -> None:
    """Counted from what is on disk, whoever wrote it; a failure that several saw counts once."""
    hear(turn, f"{allocation.public_key} n1", agent(allocation, PROTOCOL))
    run.record.worker_keys["w0"] = "key"
    turn.book.principals["key"] = Principal(run.id, allocation.token, "w0")

    def due_in(now: float) -> float | None:
        turn.now = now
        turn.messages.clear()
        hear(turn, "key", Beat(worker="w0", generation=1, prepared=1, step=5, held=False))
        (ack,) = [message for _, message in turn.messages if isinstance(message, BeatAck)]
        return ack.checkpoint_in_s

    assert due_in(1000.0) == 600.0, "nothing can be lost yet"
    run.record.saving.began(1000.0)
    run.roster.members = ["w0"]
    assert due_in(1400.0) == 200.0
    for _ in range(2):
        hear(turn, "key", CheckpointFailed(worker="w0", generation=1, step=5, reason="disk full"))
    assert run.record.saving.failures == 1
    turn.now = 1500.0
    for _ in range(2):
        hear(turn, "key", checkpointed(took_s=20.0))
        turn.now += 30.0
    assert run.record.saving.failures == 0
    assert due_in(1700.0) == 1480.0 + 600.0 - 20.0 - 1700.0


def test_a_checkpoint_is_dated_by_the_heads_clock(turn: Turn, run: Run, allocation: Allocation) -> None:
    """The node's clock is 995 s behind."""
    hear(turn, f"{allocation.public_key} n1", agent(allocation, PROTOCOL))
    turn.book.principals["key"] = Principal(run.id, allocation.token, "w0")
    hear(turn, "key", checkpointed(took_s=3.0))
    assert [saved.written.written_at for saved in run.roster.checkpoints] == [997.0]


def checkpointed(took_s: float) -> Checkpointed:
    return Checkpointed(
        worker="w0",
        generation=1,
        step=6,
        epoch=0,
        path="/c",
        digest="",
        nbytes=1,
        written_at=5.0,
        took_s=took_s,
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (Exit.NO_RESTART, "given back as planned"),
        (Exit.OK, "the run is over, and the rest of its batch script goes on"),
        (Exit.SOFTWARE, "its agent ended: the training failed"),
        (128 + 15, "its agent was ended by signal 15"),
        (7, "its agent ended with code 7"),
    ],
)
def test_how_an_agent_ended_is_told_in_words(
    turn: Turn, run: Run, allocation: Allocation, code: int, words: str
) -> None:
    peer = f"{allocation.public_key} n1"
    hear(turn, peer, agent(allocation, PROTOCOL))
    hear(turn, peer, AgentLeft(code=code))
    assert turn.records[-1].text == f"{allocation.token} ended: {words}"


@pytest.mark.parametrize(
    ("kind", "end_at", "taken"),
    [
        (AllocationKind.HARVEST, 5000.0, True),
        (AllocationKind.HARVEST, 1000.0, False),
        (AllocationKind.BASE, 5000.0, True),
        (AllocationKind.BASE, 1000.0, False),
    ],
)
def test_a_warning_before_its_time_means_that_slurm_takes_a_node_from_us(
    turn: Turn, run: Run, kind: AllocationKind, end_at: float, taken: bool
) -> None:
    allocation = turn.book.new_allocation(run, kind, turn.now)
    peer = f"{allocation.public_key} n1"
    hear(turn, peer, agent(allocation, PROTOCOL))
    allocation.end_at = end_at
    hear(turn, peer, Notice(signal=15))
    assert turn.taken == taken


def test_a_warning_of_a_base_job_does_not_say_that_its_owner_has_cancelled_it(
    turn: Turn, run: Run, allocation: Allocation
) -> None:
    peer = f"{allocation.public_key} n1"
    hear(turn, peer, agent(allocation, PROTOCOL))
    hear(turn, peer, Notice(signal=15))
    assert run.record.base_wanted and not run.roster.status.ended
    assert allocation.warned


@pytest.mark.parametrize("end_code", [None, Exit.OK])
def test_an_agent_that_was_given_up_is_told_to_end(
    turn: Turn, run: Run, allocation: Allocation, end_code: Exit | None
) -> None:
    """It was silent for longer than its lease, and then is there after all: its job must not go on."""
    peer = f"{allocation.public_key} n1"
    hear(turn, peer, agent(allocation, PROTOCOL))
    Peers.agent_gone(turn, run, allocation, "n1", "agent on n1 silent for 16 s")
    allocation.end_code = end_code
    assert not allocation.live
    assert turn.book.allowed(allocation.public_key), "its agent cannot be told"
    assert turn.book.paths.run(run.id).key(allocation.token).exists()
    turn.messages.clear()
    hear(turn, peer, AgentBeat(alive=["w0"], stopped=[]))
    code = Exit.NO_RESTART if end_code is None else end_code
    assert turn.messages == [(peer, AgentEnd(term=0, code=code, reason="agent on n1 silent for 16 s"))]
    # An agent whose link broke introduces itself first.
    turn.messages.clear()
    hear(turn, peer, agent(allocation, PROTOCOL))
    ((_, told),) = turn.messages
    assert isinstance(told, AgentEnd | Refused)
    assert told.code == code


@pytest.mark.parametrize(("left_s", "joins"), [(21.0, True), (19.9, False), (-5.0, False)])
@pytest.mark.parametrize("late", ["agent", "worker"])
def test_s4_who_gets_ready_with_too_little_walltime_left_is_let_go_and_not_let_in(
    turn: Turn, run: Run, allocation: Allocation, late: str, left_s: float, joins: bool
) -> None:
    """By a tick of the head, of which many come between an agent's first word and its worker's being ready."""
    peers = Peers(Membership(release_margin_s=20.0), Checkpoint())
    allocation.end_at = turn.now + left_s
    if late == "worker":
        turn.now -= 600.0
        hear(turn, f"{allocation.public_key} n1", agent(allocation, PROTOCOL))
        peers.tick(turn)
        assert allocation.state is AllocationState.RUNNING
        turn.now += 600.0
    else:
        hear(turn, f"{allocation.public_key} n1", agent(allocation, PROTOCOL))
    run.agent_seen[allocation.token, "n1"] = turn.at
    peers.tick(turn)
    run.record.worker_keys["w0"] = "key"
    turn.book.principals["key"] = Principal(run.id, allocation.token, "w0")
    hear(turn, "key", WorkerReady(worker="w0", signature="s", layout=[], shards=4, global_batch=4))
    assert (run.roster.change is not None) == joins
    ends = [message for _, message in turn.messages if isinstance(message, AgentEnd)]
    assert [(end.code, end.reason) for end in ends] == [(Exit.NO_RESTART, "walltime")] * (not joins)


def test_what_all_members_say_at_once_is_written_down_once(turn: Turn) -> None:
    """The record of a thousand is large, and the beats of those who have switched say so again."""
    run = turn.book.create(RunSpec(run="", name="r", min_nodes=2, max_nodes=2), turn.at, turn.now)
    allocation = turn.book.new_allocation(run, AllocationKind.BASE, turn.now)
    for number in range(2):
        hello = msgspec.structs.replace(agent(allocation, PROTOCOL), agent=f"n{number}", node=f"n{number}")
        hear(turn, f"{allocation.public_key} n{number}", hello)
        run.record.worker_keys[f"w{number}"] = f"key{number}"
        turn.book.principals[f"key{number}"] = Principal(run.id, allocation.token, f"w{number}")
        hear(turn, f"key{number}", WorkerReady(worker=f"w{number}", signature="s", layout=[], shards=8, global_batch=8))

    def written(number: int, message: FromPeer) -> bool:
        turn.dirty.clear()
        hear(turn, f"key{number}", message)
        return run.id in turn.dirty

    def tick() -> bool:
        turn.dirty.clear()
        turn.apply(run, ev.Ticked(at=turn.at))
        return run.id in turn.dirty

    def active(number: int) -> Active:
        return Active(worker=f"w{number}", generation=1, first_step=0, pause_s=0.1, parts=Parts())

    assert run.roster.change is not None
    assert not written(0, Vote(worker="w0", generation=1, ok=True))
    assert written(1, Vote(worker="w1", generation=1, ok=True)), "all have voted"
    assert not tick()
    assert not written(0, active(0))
    assert run.roster.workers["w0"].has_state
    assert tick()
    assert not tick()
    assert not written(0, active(0))
    assert written(1, active(1)), "the change is complete"
    assert not tick(), "that was written with it"
    assert not written(0, Held(worker="w0", generation=1, step=3, reason="a connection broke"))
    assert not tick()


def test_a_newcomer_is_told_whether_it_joins_a_training_and_how_far_that_is(
    turn: Turn, run: Run, allocation: Allocation
) -> None:
    def told(kind: type, number: int, message: FromPeer) -> Any:
        turn.messages.clear()
        hear(turn, f"key{number}", message)
        return next(said for _, said in turn.messages if isinstance(said, kind))

    run.roster.min_members = 1
    for number in range(3):
        run.record.worker_keys[f"w{number}"] = f"key{number}"
        turn.book.principals[f"key{number}"] = Principal(run.id, allocation.token, f"w{number}")
        turn.apply(run, ev.WorkerExpected(at=turn.at, worker=f"w{number}", token=allocation.token, node="n1"))

    def hello(number: int) -> Welcome:
        return told(Welcome, number, msgspec.structs.replace(worker(PROTOCOL), worker=f"w{number}"))

    def beat(number: int, step: int = 0) -> BeatAck:
        generation = min(step, 1)
        message = Beat(worker=f"w{number}", generation=generation, prepared=generation, step=step, held=False)
        return told(BeatAck, number, message)

    assert [(hello(number).joins, hello(number).step) for number in (0, 1)] == [(False, 0)] * 2
    hear(turn, "key0", WorkerReady(worker="w0", signature="s", layout=[], shards=8, global_batch=8))
    assert [beat(number).joins for number in (0, 1)] == [False, True], "the first begins without the second"
    hear(turn, "key0", Vote(worker="w0", generation=1, ok=True))
    hear(turn, "key0", Active(worker="w0", generation=1, first_step=0, pause_s=0.0, parts=Parts()))
    beat(0, step=7)
    assert (hello(2).joins, hello(2).step) == (True, 7)
    turn.apply(run, ev.WorkerGone(at=turn.at, worker="w0", reason="killed by signal 9"))
    assert (hello(2).joins, beat(1).joins) == (False, False), "nobody is left: they begin together"
