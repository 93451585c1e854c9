"""What the head makes of what agents say, and what it answers."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fallow.config import Checkpoint as CheckpointSection
from fallow.config import Config, Membership
from fallow.core.allocations import Allocation, begin_again
from fallow.core.membership import events as ev
from fallow.core.membership.messages import Checkpoint, Fault, Gather, Gathered, Order, Problem
from fallow.core.membership.records import HostBar
from fallow.core.protocol import Admitted, AgentRefused, BeatReply, EndAgent, EndNoted, Introduce, Progress, Setup
from fallow.head.peers.agents import note_agent_end
from fallow.head.state.registry import Run
from fallow.head.state.stored import StoredRun
from fallow.model import AllocationKind, AllocationState, Exit, MemberPhase, RunStatus
from fallow.processes import Process
from runs import hold, new_book, new_run
from talk import CONTRACT, NOW, Played, Talk, settle

MEMBERSHIP = Membership(lease_s=10.0, head_patience_s=100.0)


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    return Talk(new_book(tmp_path, Config(membership=MEMBERSHIP)))


@pytest.fixture
def run(talk: Talk) -> Run:
    return new_run(talk.book, max_nodes=4)


@pytest.fixture
def allocation(talk: Talk, run: Run) -> Allocation:
    return talk.book.new_allocation(run, AllocationKind.BASE, talk.now)


def harvested(talk: Talk, run: Run, host: str, slots: int = 1, **more: Any) -> Played:
    """A node that was harvested and whose agent has come."""
    made = hold(talk.turn, run, host, job_id=f"job-{host}", **more)
    return talk.play(run, made, host, job_id=f"job-{host}", slots=slots).greet()


def training(talk: Talk, run: Run, *hosts: str, slots: int = 1) -> list[Played]:
    """Nodes that train together, each with an allocation of its own."""
    played = [harvested(talk, run, host, slots) for host in hosts]
    for one in played:
        one.beat(ready=CONTRACT)
    settle(run, *played)
    assert run.root.status is RunStatus.TRAINING
    return played


def test_a_message_counts_from_its_receipt_not_from_the_turn_that_handles_it(talk: Talk, run: Run) -> None:
    node = harvested(talk, run, "h1")
    received_at = talk.turn.at - 7.0
    talk.take([(node.peer, node.next_beat(), received_at)])
    assert list(run.agent_seen.values()) == [received_at]


# -- it comes ---------------------------------------------------------------------------------------------------------


def test_an_agent_that_comes_is_told_all_that_its_workers_need(talk: Talk, run: Run, allocation: Allocation) -> None:
    agent = talk.play(run, allocation, slots=2).greet()
    setup = agent.only(Setup)
    assert (setup.run, setup.max_workers, setup.patience_s) == (run.id, 4 * 2, float("inf"))
    assert agent.only(Admitted) == Admitted(node=1, boot=1)
    assert [order.node for order in agent.all(Order)] == [1]
    assert (allocation.state, allocation.job_id, run.record.slots) == (AllocationState.RUNNING, "7", 2)
    assert (allocation.members, allocation.hosts) == ([1], ["h1"])
    patience_s = harvested(talk, run, "h2").only(Setup).patience_s
    assert patience_s == MEMBERSHIP.head_patience_s + 120.0, "only a base job waits for a silent head to its end"


def test_a_hello_may_be_said_any_number_of_times(talk: Talk, run: Run, allocation: Allocation) -> None:
    agent = talk.play(run, allocation)
    for _ in range(3):
        agent.greet()
        assert agent.only(Admitted) == Admitted(node=1, boot=1)
        assert agent.only(Order).node == 1, "it may not have heard the last one"
    assert list(run.roster.nodes) == [1]
    assert talk.texts("node") == [f"h1 came with {allocation.token}"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"token": "other"}, "its key belongs to"),
        ({"job_id": "8", "host": "h2"}, "belongs to job 7, this is job 8"),
        ({"host": "barred"}, "node barred is barred from run"),
    ],
)
def test_an_agent_that_has_no_business_here_is_refused_in_words(
    talk: Talk, run: Run, allocation: Allocation, said: dict[str, Any], words: str
) -> None:
    talk.play(run, allocation).greet()
    talk.book.runs[run.id].roster.failures.bars |= _bars("barred")
    host = said.get("host", "h3")
    stranger = talk.play(run, allocation, **{"host": host, **said})
    stranger.greet()
    refused = stranger.only(AgentRefused)
    assert refused.code == Exit.NO_RESTART
    assert words in refused.message
    assert list(allocation.agents) == ["h1"] and list(run.roster.nodes) == [1]
    assert allocation.told_to_end


def _bars(host: str) -> dict[str, HostBar]:
    return {host: HostBar(times=1, until=1e9, reason="bad")}


@pytest.mark.parametrize("why", ["ended", "barred"])
def test_one_that_trains_is_told_to_end_where_a_stranger_is_refused(
    talk: Talk, run: Run, allocation: Allocation, why: str
) -> None:
    """An agent that was admitted goes on when it is refused: another version's head may be there for a while."""
    agent = talk.play(run, allocation).greet()
    other = talk.play(run, allocation, "h2").greet()
    if why == "ended":
        run.root.status = RunStatus.CANCELLED
    else:
        run.roster.failures.bars |= _bars("h1")
    for _ in range(3):
        agent.greet()
        assert agent.only(EndAgent).code == Exit.NO_RESTART
    assert len(talk.texts("refuse")) == 1
    if why == "barred":
        assert other.beat().all(BeatReply)
    else:
        forgotten = talk.play(run, allocation, "h3").greet(node=9)
        assert forgotten.only(EndAgent).code == Exit.NO_RESTART, "no record knows it, and it had been admitted"
        assert "is cancelled" in talk.play(run, allocation, "h4").greet().only(AgentRefused).message


def test_numbers_that_were_reserved_are_given_whatever_order_agents_come_in(talk: Talk) -> None:
    local = new_run(talk.book, local=True)
    made = [talk.book.new_allocation(local, AllocationKind.HARVEST, talk.now, reserved=n) for n in (1, 2, 3)]
    agents = [talk.play(local, allocation, allocation.token) for allocation in made]
    for number in (2, 0, 1):
        agents[number].greet()
    assert [agent.node for agent in agents] == [1, 2, 3]
    assert agents[0].start_again(2).only(Admitted).node == 4, "a second start has a number of its own"


# -- it is to go before it comes --------------------------------------------------------------------------------------


def test_a_late_agent_of_an_allocation_whose_members_still_leave_does_not_stay(talk: Talk, run: Run) -> None:
    made = hold(talk.turn, run, "h1", "h2", job_id="7")
    first = talk.play(run, made, "h1").greet()
    first.beat(ready=CONTRACT)
    settle(run, first)
    talk.turn.release_allocation(run, made, "somebody waits")
    assert made.end_code is None, "its member has to leave at a boundary"
    late = talk.play(run, made, "h2").greet()
    assert run.roster.nodes[late.node].phase is MemberPhase.GONE
    assert late.order is not None and late.order.end is not None
    # Whoever starts its agent anew there does not come back in either.
    again = talk.play(run, made, "h2", process="another").greet()
    again.start_again(again.news.boot)
    assert run.roster.nodes[again.node].phase is MemberPhase.GONE
    assert run.root.status is RunStatus.TRAINING


def test_an_allocation_that_was_to_be_cancelled_is_released_when_its_agent_comes(talk: Talk, run: Run) -> None:
    made = hold(talk.turn, run, "h1", state=AllocationState.PENDING, job_id="7", sent_by=talk.now)
    talk.turn.cancel(run, made, "not needed")
    agent = talk.play(run, made, "h1").greet()
    assert agent.only(EndAgent).reason == "not needed"
    assert made.state is AllocationState.RELEASING


@pytest.mark.parametrize(("left_s", "joins"), [(21.0, True), (19.9, False)])
@pytest.mark.parametrize("late", ["agent", "worker"])
def test_s4_who_gets_ready_with_too_little_walltime_left_is_let_go_and_not_let_in(
    tmp_path: Path, late: str, left_s: float, joins: bool
) -> None:
    """By a tick of the head, of which many come between an agent's first word and its workers' being ready."""
    talk = Talk(new_book(tmp_path, Config(membership=Membership(release_margin_s=20.0))))
    run = new_run(talk.book)
    allocation = hold(talk.turn, run, "h1", job_id="7")
    allocation.end_at = talk.now + left_s + (600.0 if late == "worker" else 0.0)
    agent = talk.play(run, allocation).greet()
    if late == "worker":
        talk.tick()
        assert allocation.state is AllocationState.RUNNING
        talk.pass_s(300.0)
        agent.beat()
        talk.pass_s(300.0)
    talk.tick()
    ends = agent.all(EndAgent)
    assert [(end.code, end.reason) for end in ends] == [(Exit.NO_RESTART, "walltime")] * (not joins)
    agent.beat(ready=CONTRACT)
    talk.tick()
    assert (run.machine.ballot is not None) == joins


# -- another agent, another node --------------------------------------------------------------------------------------


def test_another_agent_in_the_same_allocation_starts_workers_of_its_own(talk: Talk, run: Run) -> None:
    """A batch script may call `fallow run` again. What the workers before had promised nobody may promise again."""
    one, other = training(talk, run, "h1", "h2")
    before = one.node
    again = talk.play(run, run.allocations[one.hello.token], "h1", job_id="job-h1", process="another").greet()
    assert not again.all(Admitted), "no number of the workers before"
    assert again.news.boot == 2
    assert again.start_again(2).only(Admitted) == Admitted(node=3, boot=2)
    assert run.roster.nodes[before].proved_gone
    assert run.machine.voting is not None and run.machine.voting.members == [other.node]
    # It is as good as any other, and its own starts go on from there.
    again.beat(ready=CONTRACT)
    settle(run, other, again)
    settle(run, other, again)
    assert run.roster.members == [other.node, 3]
    again.end(1)
    talk.tick()
    assert again.idle().news.boot == 3


def test_another_agent_that_ends_at_once_takes_what_was_there_with_it(talk: Talk, run: Run) -> None:
    one, _ = training(talk, run, "h1", "h2")
    allocation = run.allocations[one.hello.token]
    again = talk.play(run, allocation, "h1", job_id="job-h1", process="another").greet()
    again.leave(Exit.TEMPFAIL)
    assert run.roster.nodes[one.node].proved_gone
    assert not allocation.is_live


def test_workers_of_a_requeued_job_are_not_those_of_its_first_attempt(talk: Talk, run: Run) -> None:
    """The node of that attempt stays on record for as long as its generation is the newest."""
    (first,) = training(talk, run, "h1")
    allocation = run.allocations[first.hello.token]
    first.end(None, signal=9)
    note_agent_end(talk.turn, run, allocation, "h1", "Slurm has requeued its job")
    begin_again(allocation, talk.now)
    again = talk.play(run, allocation, "h1", job_id="job-h1", process="again").greet()
    assert first.node in run.roster.nodes
    assert again.start_again(again.news.boot).only(Admitted).node == 2
    again.beat(ready=CONTRACT)
    settle(run, again)
    assert run.roster.members == [2]


def test_who_reports_for_a_node_of_another_allocation_changes_nothing_and_is_asked_who_it_is(
    talk: Talk, run: Run
) -> None:
    """A store that went back has given the number to another job on the same host."""
    one = training(talk, run, "h1")[0]
    other = talk.play(run, hold(talk.turn, run, "h1", job_id="8"), "h1", job_id="8", node=one.node)
    assert one.report is not None
    other.greet()
    assert other.node != one.node
    forged = msgspec.structs.replace(one.report, seq=10**6, step=500)
    other.report = forged
    other.beat(progress=Progress(epoch=7))
    assert other.only(Introduce) == Introduce(node=one.node)
    other.hello = msgspec.structs.replace(other.hello, node=one.node)
    assert other.end(1).only(EndNoted) == EndNoted(node=one.node, boot=1)
    known = run.roster.nodes[one.node]
    assert (known.phase, known.step) == (MemberPhase.MEMBER, 0)
    one.beat(boot=2, progress=Progress(epoch=7))
    assert one.only(Introduce) == Introduce(node=one.node), "another start of its workers"
    assert run.progress[one.node].epoch == 0


def test_an_agent_that_was_forgotten_is_asked_who_it_is(talk: Talk, run: Run) -> None:
    one = training(talk, run, "h1")[0]
    run.allocations[one.hello.token].agents.clear()
    assert one.beat().heard == [Introduce(node=one.node)]
    assert one.greet().only(Admitted) == Admitted(node=one.node, boot=1)
    assert one.beat().all(BeatReply)


# -- it is there ------------------------------------------------------------------------------------------------------


def test_each_heartbeat_is_answered(talk: Talk, run: Run) -> None:
    one = harvested(talk, run, "h1")
    allocation = run.allocations[one.hello.token]
    one.beat(ready=CONTRACT)
    assert allocation.active_at is None
    talk.pass_s(5.0)
    settle(run, one)
    talk.pass_s(5.0)
    allocation.end_at = talk.now + 300.0
    one.beat(step=7, progress=Progress(epoch=2, reached=(2, 5)))
    assert (one.news.step, one.news.epoch, one.news.reached, one.news.ends_in_s) == (7, 2, (2, 5), 300.0)
    assert (one.news.boot, one.news.term) == (1, 0)
    assert allocation.active_at == NOW + 5.0, "its first step is noted once"
    one.beat(brief=True, step=8)
    assert (run.progress[one.node].epoch, run.reached, run.step) == (2, (2, 5), 8), "a brief one tells no progress"


@pytest.mark.parametrize(
    ("kind", "end_at", "asked_at", "taken"),
    [
        (AllocationKind.HARVEST, NOW + 4000.0, None, True),
        (AllocationKind.HARVEST, NOW + 4000.0, NOW - 1.0, False),  # by our own scancel
        (AllocationKind.HARVEST, NOW, None, False),
        (AllocationKind.BASE, NOW + 4000.0, None, True),
    ],
)
def test_a_warning_before_its_time_means_that_slurm_takes_a_node_from_us(
    talk: Talk, run: Run, kind: AllocationKind, end_at: float, asked_at: float | None, taken: bool
) -> None:
    allocation = hold(talk.turn, run, "h1", kind=kind, job_id="7")
    agent = talk.play(run, allocation).greet()
    allocation.end_at, allocation.asked_at = end_at, asked_at
    agent.beat(warned=15)
    assert (talk.turn.poll_soon, allocation.was_warned) == (taken, taken)
    assert len(talk.texts("release")) == 1
    agent.beat(warned=15)
    assert not talk.turn.poll_soon, "the same warning, said again"
    assert len(talk.texts("release")) == 1


# -- checkpoints ------------------------------------------------------------------------------------------------------


def saved(step: int, took_s: float = 3.0, generation: int = 1) -> Checkpoint:
    return Checkpoint(path=f"/c{step}", generation=generation, step=step, written_at=5.0, took_s=took_s)


def test_members_are_told_when_the_run_has_to_be_saved(talk: Talk, run: Run) -> None:
    """Counted from what is on disk, whoever wrote it."""
    one, two = (harvested(talk, run, host) for host in ("h1", "h2"))
    assert one.beat().news.checkpoint_in_s == 600.0, "nothing can be lost yet"
    for agent in (one, two):
        agent.beat(ready=CONTRACT)
    settle(run, one, two)
    talk.pass_s(400.0)
    assert (one.beat().news.checkpoint_in_s, one.news.checkpoints_asked) == (200.0, 0)
    run.record.checkpoints_asked += 1
    assert one.beat().news.checkpoints_asked == 1, "somebody asks for one"
    talk.pass_s(100.0)
    for agent in (one, two):
        agent.beat(saved=saved(6, took_s=20.0, generation=run.root.generation))
        talk.pass_s(30.0)
    talk.pass_s(140.0)
    assert one.beat().news.checkpoint_in_s == 480.0 + 600.0 - 20.0 - 700.0


def test_each_checkpoint_counts_also_where_an_older_one_goes_for_it(talk: Talk, run: Run) -> None:
    one = training(talk, run, "h1")[0]
    for number in range(1, 6):
        talk.pass_s(600.0)
        one.beat(saved=saved(number, took_s=3.0), step=number)
        assert one.news.checkpoint_in_s == 594.0, "it began 3 s ago, and the next one takes as long"
    written_at = [known.checkpoint.written_at for known in run.roster.checkpoints.saved]
    assert sorted(written_at) == [talk.now - 603.0, talk.now - 3.0], "by the head's clock; the node's is far behind"


def test_a_checkpoint_that_could_not_be_written_is_put_off_ever_longer(talk: Talk, run: Run) -> None:
    agents = training(talk, run, "h1", "h2")
    talk.pass_s(600.0)
    waits = []
    for step in range(3):
        for agent in agents:
            agent.beat(unsaved=Problem(reason="disk full", generation=1, step=step + 1))
        waits.append(agents[0].beat().news.checkpoint_in_s)
        talk.pass_s(0.5)
    assert waits == [10.0, 20.0, 40.0], "once for all members"
    last = agents[0].next_beat(saved=saved(9, took_s=5.0, generation=run.root.generation)).report
    agents[0].end(None, signal=9, report=last)
    assert (run.record.saving.failures, run.record.saving.safe_at) == (0, talk.now - 5.0), "its last words count"


def test_without_periodic_checkpoints_none_is_ever_due(tmp_path: Path) -> None:
    talk = Talk(new_book(tmp_path, Config(checkpoint=CheckpointSection(interval_s=0.0))))
    one = training(talk, new_run(talk.book), "h1")[0]
    assert one.beat().news.checkpoint_in_s is None


# -- it goes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end_code", [None, Exit.OK])
def test_an_agent_that_was_given_up_is_told_to_end(
    talk: Talk, run: Run, allocation: Allocation, end_code: Exit | None
) -> None:
    """It was taken for gone, and then is there after all: its job must not go on."""
    agent = talk.play(run, allocation).greet()
    note_agent_end(talk.turn, run, allocation, "h1", "its job ended")
    allocation.end_code = end_code
    assert not allocation.is_live
    assert talk.book.is_allowed(allocation.public_key), "its agent cannot be told"
    assert not talk.book.take_revoked()
    code = Exit.NO_RESTART if end_code is None else end_code
    agent.beat()
    (end,) = agent.heard
    assert isinstance(end, EndAgent)
    assert end.code == code and "its job ended" in end.reason
    # One whose connection broke introduces itself first.
    assert agent.greet().only(EndAgent).code == code
    agent.end(0)
    assert agent.all(EndNoted), "else it would wait"


def test_the_first_crash_on_a_node_is_made_good_at_once_and_later_ones_after_a_while(talk: Talk, run: Run) -> None:
    agent, other = training(talk, run, "h1", "h2")

    def wanted() -> int:
        talk.tick()
        return agent.idle().news.boot

    agent.end(None, signal=9)
    settle(run, other)
    assert wanted() == 2
    for boot, wait_s in ((2, 2.0), (3, 4.0)):
        agent.start_again(boot).end(None, signal=9)
        talk.pass_s(wait_s - 0.1)
        assert wanted() == boot
        talk.pass_s(0.1)
        assert wanted() == boot + 1
    texts = talk.texts("restart")
    assert [text.rpartition(" restarted ")[2] for text in texts] == ["now", "in 2 s", "in 4 s"]
    agent.start_again(4).end(None, signal=9)
    allocation = run.allocations[agent.hello.token]
    assert (allocation.agents["h1"].retry_at, allocation.end_code) == (talk.now + 8.0, None)
    talk.turn.release_allocation(run, allocation, "somebody waits")
    assert agent.idle().only(EndAgent).code == Exit.NO_RESTART, "a restart that waits keeps no node that is to go"


@pytest.mark.parametrize(
    ("slots", "code", "slot", "text"),
    [
        (1, None, 0, "killed by signal 9"),
        (2, None, 1, "worker n0.1 was killed by signal 9"),
        (2, 3, 0, "worker n0.0 exited with 3 (no room)"),
        (2, None, None, "killed by signal 9"),
    ],
)
def test_the_end_of_a_node_names_the_worker_that_ended_first(
    talk: Talk, run: Run, slots: int, code: int | None, slot: int | None, text: str
) -> None:
    agent, _ = training(talk, run, "h1", "h2", slots=slots)
    agent.end(code, signal=9 if code is None else None, tail="no room", slot=slot)
    assert talk.texts("eject") == [f"n0 (h1) is gone: {text}"]


def test_a_stack_of_workers_that_hung_is_kept(talk: Talk, run: Run) -> None:
    agent, other = training(talk, run, "h1", "h2")
    talk.pass_s(1.0)
    agent.beat(stopped_s=1.0)
    other.beat()
    talk.tick(0.5)
    assert run.roster.nodes[agent.node].phase is MemberPhase.GONE
    agent.end(None, signal=9, tail="Thread 0x1 (most recent call first):\n  in forward")
    assert [text.rpartition(" on ")[2] for text in talk.texts("stack")] == ["h1 hung here"]


# -- silence ----------------------------------------------------------------------------------------------------------


def beat_all(talk: Talk, seconds: int, *agents: Played) -> None:
    """Seconds pass, in which these are heard."""
    for _ in range(seconds):
        talk.pass_s(1.0)
        for agent in agents:
            agent.beat()
        talk.tick()


def test_a_standby_that_is_not_heard_is_waited_for_as_long_as_it_waits_for_a_head(talk: Talk, run: Run) -> None:
    """Of a member the membership alone judges, and nobody waits for this one."""
    other, cut_off = training(talk, run, "h1", "h3")
    standby = harvested(talk, run, "h2")
    allocation = run.allocations[standby.hello.token]
    beat_all(talk, 90, other)
    assert run.roster.nodes[standby.node].phase is MemberPhase.SILENT
    assert allocation.is_live
    beat_all(talk, 20, other)
    assert not allocation.is_live
    assert not run.roster.nodes[standby.node].proved_gone, "silence proves nothing"
    assert run.roster.nodes[cut_off.node].phase is MemberPhase.MEMBER
    assert run.allocations[cut_off.hello.token].hosts == ["h3"]


def test_one_that_was_only_silent_is_taken_back(talk: Talk, run: Run) -> None:
    made = hold(talk.turn, run, "h1", "h2", job_id="7")
    one, two = (talk.play(run, made, host).greet() for host in ("h1", "h2"))
    two.beat(ready=CONTRACT)
    settle(run, two)
    one.end(1)
    beat_all(talk, 12, two)
    assert made.hosts == ["h2"] and made.is_live
    one.idle()
    assert made.hosts == ["h1", "h2"]


def test_s2_a_head_that_was_away_blames_nobody(talk: Talk, run: Run) -> None:
    """Agents come back one after the other, within the time that connections take."""
    dead, other = training(talk, run, "h1", "h2")
    allocation = run.allocations[dead.hello.token]
    dead.end(None, signal=9)
    settle(run, other)
    allocation.agents["h1"].retry_at = talk.now + 10_000.0
    talk.pass_s(600.0)
    talk.tick()
    assert allocation.is_live, "nobody is heard: the head is away"
    beat_all(talk, 25, other)
    assert allocation.is_live
    dead.idle()
    beat_all(talk, 9, other)
    assert allocation.is_live
    beat_all(talk, 5, other)
    assert not allocation.is_live


@pytest.mark.parametrize(
    ("job_id", "workers", "is_running"),
    [("local-7", (8,), True), ("local-7", (8,), False), ("local-7", (), False), ("7", (8,), True), ("7", (8,), False)],
)
def test_an_agent_of_a_local_run_is_gone_when_its_processes_are(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, job_id: str, workers: tuple[int, ...], is_running: bool
) -> None:
    """No Slurm tells of it. Under Slurm the job's id names no process, and its workers have to do."""
    alive = {7, 8} if is_running else set()
    monkeypatch.setattr(
        "fallow.head.deadlines.find_process", lambda pid: Process("", "R", 1, "0") if pid in alive else None
    )
    run = new_run(talk.book, local=True)
    allocation = talk.book.new_allocation(run, AllocationKind.HARVEST, talk.now)
    agent = talk.play(run, allocation, job_id=job_id).greet()
    if workers:
        agent.beat(progress=Progress(pids=workers))
    beat_all(talk, 8)
    assert allocation.is_live
    beat_all(talk, 8)
    assert allocation.is_live is is_running
    assert run.roster.alive(agent.node) is is_running


# -- the end of a run -------------------------------------------------------------------------------------------------


def test_a_failed_run_ends_everywhere_and_the_rest_of_the_script_hears_so(talk: Talk, run: Run) -> None:
    one, two = training(talk, run, "h1", "h2")
    for agent in (one, two):
        agent.beat(fault=Fault(code=1, message="ValueError: bad", signature="same", traceback="Traceback: bad"))
    assert run.root.status is RunStatus.FAILED
    ends = [agent.beat().only(EndAgent) for agent in (one, two)]
    assert [end.code for end in ends] == [Exit.SOFTWARE, Exit.NO_RESTART], "the main member's goes on with its script"
    assert all("Traceback: bad" in end.reason and "ValueError: bad" in end.reason for end in ends)


@pytest.mark.parametrize("is_warned", [False, True])
def test_the_rest_of_the_script_runs_in_no_job_that_slurm_takes_away(talk: Talk, run: Run, is_warned: bool) -> None:
    """Its script would be killed amid those lines."""
    made = hold(talk.turn, run, "h1", kind=AllocationKind.BASE, job_id="7")
    base, other = talk.play(run, made, "h1").greet(), harvested(talk, run, "h2")
    for one in (base, other):
        one.beat(ready=CONTRACT)
    settle(run, base, other)
    if is_warned:
        base.beat(warned=15)
    other.beat(fault=Fault(code=1, message="ValueError: bad", signature="same", traceback=""))
    base.beat(fault=Fault(code=1, message="ValueError: bad", signature="same", traceback=""))
    assert run.root.status is RunStatus.FAILED
    codes = [run.allocations[one.hello.token].end_code for one in (base, other)]
    rest, over = Exit.SOFTWARE, Exit.NO_RESTART
    assert codes == ([over, rest] if is_warned else [rest, over])


def test_nobody_is_elected_when_a_run_is_cancelled(talk: Talk, run: Run) -> None:
    agents = training(talk, run, "h1", "h2")
    talk.turn.apply(run, ev.Cancel(at=talk.at, reason="by hand"))
    assert [agent.beat().only(EndAgent).code for agent in agents] == [Exit.NO_RESTART] * 2
    agents[0].leave()
    talk.tick(11.0)
    assert not run.live_allocations(), "who falls silent then is forgotten"


# -- what is written --------------------------------------------------------------------------------------------------


def absorbing(talk: Talk, run: Run) -> tuple[Played, Played, int]:
    """One that trains, one with which it is to go on, and the number of that generation, on which they vote."""
    one, two = (harvested(talk, run, host) for host in ("h1", "h2"))
    for what in ({"ready": CONTRACT}, {"prepared": 1}, {"generation": 1, "has_state": True}):
        one.beat(**what)
    two.beat(ready=CONTRACT)
    assert run.machine.voting is not None
    return one, two, run.machine.voting.change.generation


def part(agent: Played, generation: int, node: int = 0) -> Gather:
    """What an agent says, of itself or of another node."""
    return Gather(node=node or agent.node, generation=generation, key="k", part=agent.hello.host.encode())


def test_parts_of_all_nodes_are_answered_together_and_each_node_speaks_for_itself(talk: Talk, run: Run) -> None:
    one, two, generation = absorbing(talk, run)
    two.say(part(two, generation))
    two.say(part(two, generation, node=one.node))
    assert not two.all(Gathered)
    one.say(part(one, generation))
    answer = Gathered(generation=generation, key="k", parts=(b"h1", b"h2"))
    assert one.only(Gathered) == two.only(Gathered) == answer


def test_members_of_a_committed_generation_can_meet_through_a_head_that_comes_back(talk: Talk, run: Run) -> None:
    """Scripts that are restarted meet only after the commit."""
    one, two, generation = absorbing(talk, run)
    for agent in (one, two):
        agent.beat(prepared=generation)
    assert run.root.generation == generation
    two.say(part(two, generation))
    talk.book.add(StoredRun(run.spec, run.record, run.roster, run.allocations), run.revision, talk.at)
    for agent in (one, two):
        agent.beat().say(part(agent, generation))
    answer = Gathered(generation=generation, key="k", parts=(b"h1", b"h2"))
    assert one.only(Gathered) == two.only(Gathered) == answer
