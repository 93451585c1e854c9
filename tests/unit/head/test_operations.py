"""What operators do to runs, and how a run keeps to its budget: the head's parts without its processes."""

import errno
import math
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from fallow.config import Usage
from fallow.core.accounting.backoff import FIRST_S
from fallow.core.allocations import SUBMIT_S, Allocation
from fallow.core.holes import Part
from fallow.core.membership.messages import Checkpoint
from fallow.core.training.restarts import EVERY_S
from fallow.head.api.views import run_view
from fallow.head.loop.turn import Turn
from fallow.head.slurm import accounts
from fallow.head.slurm.demands import budget_left_node_s, demand
from fallow.head.slurm.harvest import Harvest
from fallow.head.slurm.jobs import give_up_queued
from fallow.head.state import registry
from fallow.head.state.stored import RunRecord
from fallow.model import (
    AllocationKind,
    AllocationState,
    ChangeKind,
    Exit,
    FallowError,
    GenerationReport,
    MemberPhase,
    Parts,
    RunSpec,
    RunStatus,
    Source,
)

from runs import NOW, finish, new_run  # isort: skip
from slurm_side import POLL_S, Desk  # isort: skip


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_run_is_called_by_its_name_the_beginning_of_its_id_or_one_of_its_jobs(desk: Desk) -> None:
    """Somebody who submits a script again, after it was refused or had ended, goes on calling it by its name."""
    assert desk.book.get(desk.hold(AllocationKind.BASE).job_id) is desk.run
    desk.do("cancel")
    assert desk.book.get("train") is desk.run
    again = new_run(desk.book, name="train")
    assert desk.book.get("train") is again, "that has not ended"
    other = new_run(desk.book, name="trainer")
    assert desk.book.get("traine") is other
    new_run(desk.book, name="train")
    for name, words in (("train", "3 runs"), ("tra", "4 runs"), ("", "no such run")):
        with pytest.raises(FallowError, match=words):
            desk.book.get(name)


@pytest.mark.parametrize(
    ("name", "begins"), [("my run (1).sh", "my-run-1-.sh-"), ("日本.sh", "sh-"), ("..", "run-"), ("", "run-")]
)
def test_every_job_name_makes_a_run(desk: Desk, name: str, begins: str) -> None:
    run = new_run(desk.book, name=name)
    assert run.id.startswith(begins)
    assert desk.book.paths.run(run.id).logs.is_dir()
    assert desk.book.get(name or run.id) is run


def test_pause_gives_harvested_nodes_back_and_asks_for_none(desk: Desk) -> None:
    base = desk.hold(AllocationKind.BASE, AllocationState.RELEASING)
    assert demand(desk.run, {}, NOW, asks=True).nodes == 3, "none in the place of a base job that comes again"
    desk.run.base_hold_reason = "the budget does not allow for it"
    assert demand(desk.run, {}, NOW, asks=True).nodes == 4
    base.state, base.nodes, desk.run.base_hold_reason = AllocationState.RUNNING, ["n1"], ""
    running, pending = desk.hold(), desk.hold(state=AllocationState.PENDING)
    unknown = desk.hold(state=AllocationState.UNKNOWN, sent_by=NOW)
    queued = desk.hold(state=AllocationState.UNKNOWN)
    turn = desk.do("pause")
    assert [job for _, _, job in turn.cancels] == [pending.job_id]
    # No agent of ours is left on it, so it was let go at once; the one that may exist is cancelled when it shows.
    assert running.state is AllocationState.RELEASING
    assert unknown.asked_at is not None
    assert unknown.is_live
    assert not queued.is_live, "Slurm has never heard of it"
    assert base.state is AllocationState.RUNNING
    assert desk.run.id in turn.dirty
    assert desk.poll(desk.job(base), desk.job(running)).submissions == []
    # Nor is the base job asked for again when it ends.
    base.state = AllocationState.ENDED
    assert desk.poll().submissions == []
    assert run_view(desk.run, 0.0, NOW).paused == "paused by hand"
    # Another head keeps to it until somebody resumes the run.
    desk.run.record = msgspec.msgpack.decode(msgspec.msgpack.encode(desk.run.record), type=RunRecord)
    for allocation in (base, running, pending, unknown):
        desk.book.end_allocation(desk.run, allocation, "over")
    desk.run.record.base_wanted = False
    assert desk.poll().submissions == []
    assert [record.kind for record in desk.do("resume").records] == ["resume"]
    assert len(desk.poll().submissions) == 4


def test_a_run_whose_script_is_restarted_takes_what_that_pays_for_and_says_why_a_newcomer_waits(desk: Desk) -> None:
    usual = demand(desk.run, {}, NOW, asks=True)
    desk.train("h1", restarts=True)
    assert demand(desk.run, {}, NOW, asks=True).min_minutes > EVERY_S / 60 > usual.min_minutes
    with pytest.raises(FallowError, match="only when its script does"):
        desk.do("checkpoint")
    turn = desk.turn()
    desk.nodes.ready(turn, desk.nodes.come(turn, desk.hold(), "h2"))
    desk.nodes.pass_s(turn, 60)
    assert run_view(desk.run, 60.0, NOW).message.startswith("n1 (h2) waits for another 4 min: a newcomer restarts")
    desk.do("pause")
    assert run_view(desk.run, 60.0, NOW).message == "paused by hand"


def test_a_users_own_base_job_is_given_up_only_once_its_sbatch_must_have_ended(desk: Desk) -> None:
    turn = desk.turn()
    spec = RunSpec(run="", name="other", min_nodes=1, max_nodes=2)
    new = finish(turn, desk.operations.handle(turn, "create_run", {"spec": spec}))
    run = desk.book.runs[new.run]
    for _ in range(int(SUBMIT_S / 30.0) + 2):
        desk.poll()
        assert run.root.status is RunStatus.WAITING
    desk.poll()
    desk.poll()
    assert (run.root.status, run.root.message) == (
        RunStatus.FAILED,
        "Slurm never had its job; submit the run again",
    )


@pytest.mark.parametrize("has_trained", [True, False])
def test_a_base_job_that_slurm_took_and_forgot_was_not_cancelled(desk: Desk, has_trained: bool) -> None:
    """slurmctld died before it had written it down. A run that has trained asks for it again."""
    desk.run.root.next_id = 3 if has_trained else 1
    renewed = {"was_renewed": True, "limit_s": 600.0} if has_trained else {}
    base = desk.hold(AllocationKind.BASE, AllocationState.PENDING, sent_by=NOW, **renewed)
    asked = [desk.run.allocations[token].kind for _ in range(3) for _, token in desk.poll().submissions]
    assert (base.state, asked.count(AllocationKind.BASE)) == (AllocationState.LOST, has_trained)
    if has_trained:
        assert desk.run.record.base_wanted
    else:
        forgotten = f"Slurm accepted job {base.job_id} and has forgotten it; submit the run again"
        assert (desk.run.root.status, desk.run.root.message) == (RunStatus.FAILED, forgotten)


@pytest.mark.parametrize("away_s", [POLL_S, 7200.0])
def test_a_waiting_base_job_that_vanished_was_cancelled_only_if_no_end_can_have_been_missed(
    desk: Desk, away_s: float
) -> None:
    """While the head was away the job may have started, and its node failed; Slurm forgets that after some minutes."""
    desk.run.root.next_id = 3
    base = desk.hold(AllocationKind.BASE, AllocationState.PENDING, was_renewed=True, limit_s=600.0)
    desk.poll(desk.job(base, "PENDING", submit_at=NOW))
    asked = [
        desk.run.allocations[token]
        for after_s in (away_s, POLL_S)
        for _, token in desk.poll(after_s=after_s).submissions
    ]
    was_away = away_s > POLL_S
    assert (desk.run.root.status is RunStatus.CANCELLED) is not was_away
    assert any(one.kind is AllocationKind.BASE for one in asked) is was_away


def test_a_job_that_polls_did_not_show_while_it_trained_had_its_node_to_the_end(desk: Desk) -> None:
    base = desk.hold(AllocationKind.BASE)
    desk.poll(desk.job(base, submit_at=NOW))
    for _ in range(5):
        desk.run.agent_seen[base.token, "n1"] = desk.at
        desk.poll()
    ended_at = NOW + desk.at
    desk.book.end_allocation(desk.run, base, "its agent left")
    desk.poll()
    desk.poll()
    assert base.is_settled
    assert all(span.end_at is not None and span.end_at > ended_at for span in base.spans.values())


def test_whether_the_last_poll_showed_a_job_is_written_down_when_it_changes(desk: Desk) -> None:
    """A killed head had left a poll that did not; the next ended the job as of that, hours ago."""
    base = desk.hold(AllocationKind.BASE)
    shown = desk.job(base, submit_at=NOW)
    desk.poll(shown)
    polls = [[shown], [], [], [shown], [shown]]
    assert [desk.run.id in desk.poll(*jobs).dirty for jobs in polls] == [False, True, False, True, False]
    desk.do("pause")
    desk.run.record.base_wanted = False
    desk.book.end_allocation(desk.run, base, "its agent left")
    desk.poll(shown)
    # Soon: it is no orphan yet.
    polls = [[shown], [], [shown], [shown]]
    assert [desk.run.id in desk.poll(*jobs, after_s=1.0).dirty for jobs in polls] == [False, True, True, False]


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_job_that_slurm_has_forgotten_is_over_once_its_only_agent_is_silent_for_long(
    desk: Desk, is_heard: bool
) -> None:
    """The head was away when it ended. No other agent was heard, so silence alone says nothing."""
    desk.run.root.limit = desk.run.root.maximum = 1
    base = desk.hold(AllocationKind.BASE)
    desk.run.agent_seen[base.token, "n1"] = desk.at
    desk.poll(desk.job(base, submit_at=NOW))
    kinds = []
    for _ in range(5):
        if is_heard:
            desk.run.agent_seen[base.token, "n1"] = desk.at
        kinds.append([desk.run.allocations[token].kind for _, token in desk.poll().submissions])
    assert base.is_live is is_heard
    assert kinds == ([[]] * 5 if is_heard else [[], [], [], [AllocationKind.BASE], []])


def test_a_new_head_gives_up_what_the_one_before_had_not_submitted(desk: Desk) -> None:
    desk.run.record.base_wanted = False
    queued, unknown = desk.hold(state=AllocationState.UNKNOWN), desk.hold(state=AllocationState.UNKNOWN, sent_by=NOW)
    renewed = desk.hold(AllocationKind.BASE, AllocationState.UNKNOWN, was_renewed=True)
    own = desk.hold(AllocationKind.BASE, AllocationState.UNKNOWN, sent_by=NOW + SUBMIT_S)
    turn = desk.turn()
    give_up_queued(turn, "the head ended")
    assert [a.is_live for a in (queued, unknown, renewed, own)] == [False, True, False, True]
    assert [record.kind for record in turn.records] == ["withdraw", "withdraw"]
    assert turn.cancels == []
    assert accounts.rows([desk.run], "run", None, Usage(), NOW)[-1].jobs == 2, "what was never submitted is no job"


def test_what_was_withdrawn_while_nobody_knew_of_it_is_cancelled_as_soon_as_it_shows(desk: Desk) -> None:
    unknown = desk.hold(state=AllocationState.UNKNOWN, sent_by=NOW)
    desk.do("pause")
    turn = desk.poll(desk.job(unknown, "PENDING"), after_s=1.0)
    assert turn.cancels == [(desk.run.id, unknown.token, "1")]
    assert desk.poll(desk.job(unknown, "PENDING"), after_s=1.0).cancels == [], "once, and again after a while"


def excluded(desk: Desk, turn: Turn) -> list[set[str]]:
    """Nodes that each of a turn's submissions leaves out."""
    found = []
    for run, token in turn.submissions:
        allocation = desk.book.runs[run].allocations[token]
        options = desk.harvest.request(desk.book.paths, desk.book.runs[run], allocation).options
        lists = [option.partition("=")[2] for option in options if option.startswith("--exclude=")]
        found.append({node for nodes in lists for node in nodes.split(",")})
    return found


def test_a_drained_node_is_not_asked_for_again_until_the_run_is_resumed(desk: Desk) -> None:
    held, waiting = desk.hold(), desk.hold(state=AllocationState.PENDING)
    unknown = desk.hold(state=AllocationState.UNKNOWN, sent_by=NOW)
    elsewhere = desk.hold(state=AllocationState.PENDING)
    elsewhere.part = Part("n2", 1, "", 1, 0)
    with pytest.raises(FallowError, match="holds no node n3"):
        desk.do("drain", nodes=["n1", "n3"])
    assert (held.state, desk.run.record.drained) == (AllocationState.RUNNING, [])
    turn = desk.do("drain", nodes=["n1"])
    assert held.state is AllocationState.RELEASING
    assert waiting.job_id in [job for _, _, job in turn.cancels], "Slurm could start it on the drained node"
    assert unknown.asked_at is not None
    assert elsewhere.asked_at is None
    assert run_view(desk.run, 0.0, NOW).drained == ["n1"]
    for allocation in (held, waiting, unknown, elsewhere):
        desk.book.end_allocation(desk.run, allocation, "over")
    # The head comes back; n1 is as idle as the others.
    desk.run.record = msgspec.msgpack.decode(msgspec.msgpack.encode(desk.run.record), type=RunRecord)
    turn = desk.poll()
    assert excluded(desk, turn) == [{"n1"}] * 2, "with three nodes it would be no faster"
    for _, token in turn.submissions:
        desk.book.end_allocation(desk.run, desk.run.allocations[token], "over")
    desk.do("resume")
    assert run_view(desk.run, 0.0, NOW).drained == []
    assert excluded(desk, desk.poll()) == [set()] * 4


def test_resume_ends_an_automatic_pause(desk: Desk) -> None:
    for each in range(3):
        assert desk.run.record.paused == ""
        # Two on their way together count as one.
        for _ in range(2):
            allocation = desk.hold(state=AllocationState.UNKNOWN, partition="p")
            desk.harvest.note_refusal(desk.turn(), desk.run, allocation.token, "Invalid feature specification")
        desk.at += FIRST_S * 2**each
    assert "Invalid feature specification" in run_view(desk.run, 0.0, NOW).message
    desk.run.record.fruitless.in_a_row = 5
    assert desk.poll().submissions == []
    desk.do("resume")
    assert len(desk.poll(after_s=0.5).submissions) == 4, "nor does it wait for a back-off"
    assert desk.run.record.refusals == {}


def test_shrink_and_grow_move_how_many_nodes_are_asked_for(desk: Desk) -> None:
    def asked(turn: Turn) -> int:
        return len(turn.submissions)

    desk.do("shrink", by=3)
    assert asked(desk.poll()) == 1
    desk.do("grow", by=3)
    assert asked(desk.poll()) == 3
    desk.do("shrink", by=2)
    assert [record.text.rpartition(": ")[2] for record in desk.poll().records if record.kind == "withdraw"] == [
        "the run no longer needs it"
    ] * 2
    assert len(desk.run.live_allocations()) == 2
    desk.do("grow", by=100)
    assert asked(desk.poll()) == 2, "up to its maximum"
    for method, by in (("grow", 1), ("shrink", 4)):
        with pytest.raises(FallowError) as refused:
            desk.do(method, by=by)
        assert refused.value.code is Exit.USAGE


def test_released_members_leave_and_nobody_takes_their_place(desk: Desk) -> None:
    desk.train("h1", "h2", "h3")
    turn = desk.turn()
    desk.nodes.ready(turn, desk.nodes.come(turn, desk.hold(), "h4"))
    desk.nodes.settle(turn)
    desk.do("release", members=["n1", "n2"])
    desk.nodes.pass_s(turn, 1)
    desk.nodes.settle(turn)
    assert [desk.run.roster.name(n) for n in desk.run.roster.members] == ["n0 (h1)", "n3 (h4)"]
    assert desk.run.root.limit == 2
    for member, code in (("n7", Exit.NOINPUT), ("n1", Exit.NOINPUT), ("w0", Exit.USAGE)):
        with pytest.raises(FallowError) as refused:
            desk.do("release", members=["n0", member])
        assert refused.value.code is code
    assert desk.run.roster.present(MemberPhase.LEAVING) == []


def test_a_checkpoint_by_hand_is_asked_for_until_all_have_heard(desk: Desk) -> None:
    with pytest.raises(FallowError, match="no member that could write a checkpoint"):
        desk.do("checkpoint")
    desk.train("h1")
    for asked in (1, 2):
        turn = desk.do("checkpoint")
        assert (desk.run.record.checkpoints_asked, turn.dirty) == (asked, {desk.run.id})


def test_a_run_goes_back_to_a_usable_checkpoint_only(desk: Desk) -> None:
    (node,) = desk.train("h1")
    turn = desk.turn()
    for step in (10, 20):
        desk.nodes.say(turn, node, step=step, saved=Checkpoint(path=f"/c/{step}", generation=1, step=step))
    with pytest.raises(FallowError, match="no usable checkpoint of step 15; usable: 10, 20"):
        desk.do("rollback", step=15)
    desk.do("rollback", step=10)
    desk.nodes.settle(turn)
    view = run_view(desk.run, 0.0, NOW)
    assert (view.step, [one.state for one in view.checkpoints]) == (10, ["aside", "usable"])


@pytest.mark.parametrize(
    ("before", "method", "run", "code", "words"),
    [
        ((), "pause", "nobody", Exit.NOINPUT, "run nobody: no such run; `fallow status` lists them"),
        ((), "pause", "one\ntwo\x1b[2J", Exit.NOINPUT, r"run 'one\ntwo\x1b[2J': no such run; "),
        (("pause",), "pause", "train", Exit.USAGE, " is paused already; to go on: fallow resume train-"),
        (("pause", "resume"), "resume", "train", Exit.USAGE, " is not paused"),
        (("pause", "cancel"), "resume", "train", Exit.USAGE, " is cancelled"),
    ],
)
def test_careless_use(desk: Desk, before: tuple[str, ...], method: str, run: str, code: Exit, words: str) -> None:
    for each in before:
        desk.do(each)
    with pytest.raises(FallowError) as refused:
        desk.do(method, run=run)
    assert refused.value.code == code
    assert words in refused.value.message


def test_what_cannot_be_written_is_refused_and_leaves_nothing_behind(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(registry, "write_struct", full)
    spec = RunSpec(run="", name="late", min_nodes=1, max_nodes=2)
    before, principals, turn = set(desk.book.runs), set(desk.book.principals), desk.turn()
    with pytest.raises(FallowError) as caught:
        finish(turn, desk.operations.handle(turn, "create_run", {"spec": spec}))
    assert caught.value.code is Exit.IOERR
    assert "cannot be written (No space left on device); make room on its file system" in caught.value.message
    assert (set(desk.book.runs), set(desk.book.current), turn.dirty) == (before, before, set())
    assert set(desk.book.principals) == principals and not desk.book.unwritten_keys


def test_an_extended_job_goes_before_it_exceeds_the_budget(tmp_path: Path) -> None:
    desk = Desk(tmp_path, budget_node_hours=1.0)
    allocation = desk.hold(minutes=30)
    waiting = desk.hold(state=AllocationState.PENDING, minutes=30)
    turn = desk.poll(desk.job(allocation, limit_s=1800.0), desk.job(waiting, "PENDING", 1800.0))
    assert (turn.cancels, allocation.end_at) == ([], NOW + 1800.0)
    turn = desk.poll(desk.job(allocation, limit_s=36_000.0), desk.job(waiting, "PENDING", 1800.0))
    assert [job for _, _, job in turn.cancels] == [waiting.job_id]
    desk.poll(desk.job(allocation, limit_s=36_000.0), desk.job(waiting, "CANCELLED"))
    assert allocation.end_at == pytest.approx(NOW + 3600.0)
    assert allocation.ends_because == "the budget of 1 node-hours is used up"


def test_a_base_job_that_the_budget_does_not_cover_is_not_submitted_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path, budget_node_hours=1.0)
    desk.harvest.set_stop_reason(desk.turn(), "nothing is harvested")
    base = desk.hold(AllocationKind.BASE)
    base.limit_s = 7200.0
    base.state = AllocationState.ENDED
    first, second = base_jobs(desk), base_jobs(desk)
    text = "the base job is not submitted again: 1 node-hours are left and the job needs 2"
    assert (first, second) == (([], [text]), ([], [])), "said once"
    base.limit_s = 1800.0
    ((renewed,), _) = base_jobs(desk)
    assert renewed.was_renewed


def test_a_base_job_counts_with_all_the_nodes_that_its_script_asks_for(tmp_path: Path) -> None:
    desk = Desk(tmp_path, budget_node_hours=2.0, sbatch_options=["--nodes=2", ":", "--nodes=1"])
    desk.harvest.set_stop_reason(desk.turn(), "nothing is harvested")
    base = desk.hold(AllocationKind.BASE)
    base.limit_s, base.state = 3600.0, AllocationState.ENDED
    assert base_jobs(desk) == (
        [],
        ["the base job is not submitted again: 2 node-hours are left and the job needs 3"],
    )
    base.limit_s = 1800.0
    ((renewed,), _) = base_jobs(desk)
    assert renewed.nodes_wanted == 3
    assert demand(desk.run, {}, NOW, asks=True).nodes == 1, "of four at most"
    renewed.nodes = ["n1", "n2", "n3", "n4"]
    assert demand(desk.run, {}, NOW, asks=True).nodes == 0, "Slurm may give more than the least"


def test_a_base_job_whose_time_limit_is_lifted_leaves_the_plan_whole(tmp_path: Path) -> None:
    desk = Desk(tmp_path, budget_node_hours=10.0)
    base = desk.hold(AllocationKind.BASE, was_renewed=True, limit_s=3600.0)
    other = new_run(desk.book, name="other", max_nodes=1, script="#!/bin/sh\n")
    other.record.base_wanted, other.record.slots = False, 1
    turn = desk.poll(desk.job(base, limit_s=3600.0))
    assert turn.failures == [] and {run for run, _ in turn.submissions} == {desk.run.id, other.id}
    other.record.next_allocation, other.allocations = 0, {}
    turn = desk.poll(msgspec.structs.replace(desk.job(base), time_limit_s=None, end_at=None))
    assert turn.failures == [] and [run for run, _ in turn.submissions] == [other.id]
    assert budget_left_node_s(desk.run, NOW + desk.at) == -math.inf


def base_jobs(desk: Desk) -> tuple[list[Allocation], list[str]]:
    """Those that a poll has submitted, and what it says of the budget."""
    turn = desk.poll()
    asked = [desk.run.allocations[token] for _, token in turn.submissions]
    told = [record.text for record in turn.records if record.kind == "budget"]
    return [one for one in asked if one.kind is AllocationKind.BASE], told


def test_a_base_job_for_which_the_limit_leaves_no_place_is_not_submitted_again(desk: Desk) -> None:
    """Its nodes would stand idle for their whole time, and then again."""
    base = desk.hold(AllocationKind.BASE)
    desk.train("h1")
    desk.run.root.limit, base.state = 1, AllocationState.ENDED
    (none, (text,)) = base_jobs(desk)
    assert none == [] and "the limit of 1 node has no place for it" in text
    desk.run.root.limit = 2
    assert len(base_jobs(desk)[0]) == 1


def test_a_base_job_that_slurm_refuses_for_a_limit_is_tried_again_after_longer_and_longer_pauses(desk: Desk) -> None:
    desk.harvest.set_stop_reason(desk.turn(), "nothing is harvested")
    desk.hold(AllocationKind.BASE).state = AllocationState.ENDED
    asked_at = []
    for _ in range(int(7200.0 / POLL_S)):
        for base in base_jobs(desk)[0]:
            asked_at.append(desk.at)
            desk.harvest.send(desk.turn(), desk.run, base.token)
            desk.harvest.note_refusal(desk.turn(), desk.run, base.token, "Requested time limit is invalid")
    pauses = [after - before for before, after in pairwise(asked_at)]
    assert pauses == [FIRST_S * 2**n for n in range(6)]
    text = "Slurm refused it and the head tries again within the hour: Requested time limit is invalid"
    assert run_view(desk.run, 60.0, NOW).message == f"the base job is not submitted again: {text}"
    assert len(desk.run.allocations) < len(asked_at), "refused ones are dropped in time"
    assert desk.run.record.harvest_paused == ""
    desk.do("resume")
    (renewed,) = base_jobs(desk)[0]
    desk.harvest.send(desk.turn(), desk.run, renewed.token)
    desk.harvest.note_submission(desk.turn(), desk.run, renewed.token, "900")
    assert desk.run.base_hold_reason == ""
    desk.harvest.note_refusal(desk.turn(), desk.run, renewed.token, "Requested time limit is invalid")
    desk.at += FIRST_S
    assert len(base_jobs(desk)[0]) == 1, "the pauses begin anew after one that Slurm took"


def test_a_restarted_head_goes_on_with_the_pauses_of_a_base_job_that_slurm_refuses_until_they_end(desk: Desk) -> None:
    notes: dict[str, bytes] = {}
    desk.hold(AllocationKind.BASE).state = AllocationState.ENDED

    def asks_again(after: Turn) -> bool:
        """With another head; what that asks for, Slurm refuses."""
        notes.update(after.notes)
        desk.harvest = Harvest(desk.book.config)
        desk.harvest.recall(notes)
        return bool(base_jobs(desk)[0])

    def sent(is_refused: bool) -> Turn:
        turn, base = desk.turn(), desk.run.bases[-1]
        desk.harvest.send(turn, desk.run, base.token)
        if is_refused:
            desk.harvest.note_refusal(turn, desk.run, base.token, "Invalid qos specification")
        else:
            desk.harvest.note_submission(turn, desk.run, base.token, "900")
        return turn

    assert base_jobs(desk)[0] != []
    sent(is_refused=True)
    assert asks_again(desk.do("resume")), "as its owner said"
    assert not asks_again(sent(is_refused=True)), "before the pause is over"
    desk.at += FIRST_S
    assert base_jobs(desk)[0] != []
    taken = sent(is_refused=False)
    desk.run.bases[-1].state = AllocationState.ENDED
    assert asks_again(taken)
    sent(is_refused=True)
    desk.at += FIRST_S
    assert base_jobs(desk)[0] != [], "the pauses begin anew after one that Slurm took"


def test_accounts_of_a_run_are_kept_when_its_jobs_are_forgotten(desk: Desk) -> None:
    allocation = desk.hold(partition="p")
    desk.poll(desk.job(allocation), after_s=10.0)
    turn = desk.turn()
    node = desk.nodes.come(turn, allocation, "n1")
    desk.nodes.ready(turn, node)
    desk.nodes.settle(turn)
    desk.note()
    desk.poll(desk.job(allocation), after_s=40.0)
    desk.nodes.end(desk.turn(), node, None)
    desk.note()
    live, total = accounts.rows([desk.run], "run", None, Usage(), NOW + 60)
    assert live == msgspec.structs.replace(total, key=desk.run.id)
    assert (live.harvested.node_s, live.wasted.node_s, live.allocated.gpu_s) == (40.0, 20.0, 240.0)
    desk.book.end_allocation(desk.run, allocation, "drained by hand")
    desk.poll(msgspec.structs.replace(desk.job(allocation), state="CANCELLED", end_at=NOW + 70.0))
    assert allocation.is_counted
    # The head comes back, and hours later the allocation is gone; its sums are not.
    desk.run.allocations = {allocation.token: allocation}
    desk.run.record = msgspec.msgpack.decode(msgspec.msgpack.encode(desk.run.record), type=RunRecord)
    desk.do("pause")
    desk.poll(after_s=10_000.0)
    assert desk.run.allocations == {}
    desk.run.spec = msgspec.structs.replace(desk.run.spec, budget_node_hours=1.0)
    assert budget_left_node_s(desk.run, NOW) == 3600.0 - 70.0, "nor does a budget forget"
    for by, key in (("run", desk.run.id), ("project", "-"), ("day", "1970-01-12")):
        row, total = accounts.rows([desk.run], by, None, Usage(node_hour={"*": 36.0}), NOW + 20_000)
        assert (row.key, row.jobs, row.useless_jobs) == (key, 1, 0)
        wasted = {
            source: (amount.node_s, amount.gpu_s, round(amount.cost or 0, 6)) for source, amount in row.causes.items()
        }
        assert wasted == {Source.START_UP: (10.0, 40.0, 0.1), Source.DRAINED: (20.0, 80.0, 0.2)}
        assert total.allocated.cost == pytest.approx(0.7)
        assert (total.allocated.node_s, total.allocated.gpu_s) == (70.0, 280.0)
    assert accounts.rows([desk.run], "run", "1970-01-13", Usage(), NOW)[:-1] == []


def test_pauses_and_discarded_steps_are_taken_off_once(desk: Desk) -> None:
    allocation = desk.hold(partition="p")
    turn = desk.turn()
    desk.nodes.ready(turn, desk.nodes.come(turn, allocation, "n1"))
    desk.nodes.settle(turn)
    desk.nodes.step(turn, 7, samples_per_s=32.0)
    desk.poll(desk.job(allocation), after_s=0.0)
    desk.note()
    desk.run.generations.append(
        GenerationReport(generation=2, kind=ChangeKind.EJECT, members=["n0"], first_step=7, pause_s=1.5, parts=Parts())
    )
    desk.run.root.discarded = 3
    desk.note()
    desk.note()
    row, _ = accounts.rows([desk.run], "run", None, Usage(), NOW + 100)
    assert {source: amount.node_s for source, amount in row.causes.items()} == {
        Source.HAND_OVER: 1.5,
        Source.DISCARDED: 6.0,
    }
