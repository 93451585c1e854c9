"""The membership machine: scripted cases, and random histories against simulated workers."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fallow.core import events as ev
from fallow.core.membership import Membership
from fallow.core.roster import Roster
from fallow.core.timing import Timing
from fallow.model import (
    PROTOCOL,
    Abort,
    Active,
    Beat,
    ChangeKind,
    Checkpointed,
    Commit,
    Dismiss,
    Doing,
    Failed,
    Finished,
    Held,
    Interrupt,
    Left,
    Message,
    Parts,
    Prepare,
    Refused,
    RunStatus,
    Vote,
    WorkerHello,
    WorkerPhase,
    WorkerReady,
)

TIMING = Timing(prepare_s=10, start_s=60, lease_s=10, held_grace_s=0.3)


def new_machine(min_members: int = 1, max_members: int = 8) -> Membership:
    roster = Roster(run="r", min_members=min_members, max_members=max_members, limit=max_members)
    return Membership(roster, term=1, timing=TIMING, at=0.0, validate=True)


def ready(
    worker: str, at: float = 0.0, signature: str = "s", layout: tuple[str, ...] = ("w float32[2]",), shards: int = 8
):
    return ev.Said(
        at=at,
        message=WorkerReady(
            worker=worker, signature=signature, layout=list(layout), shards=shards, global_batch=16, total_steps=100
        ),
    )


def tells(instructions: list[ev.Instruction], kind: type[Message]) -> list[str]:
    return [i.worker for i in instructions if isinstance(i, ev.Tell) and isinstance(i.message, kind)]


def join(m: Membership, worker: str, at: float = 0.0) -> list[ev.Instruction]:
    m.handle(ev.WorkerExpected(at=at, worker=worker, token="t-" + worker, node="n-" + worker))
    m.handle(
        ev.Said(
            at=at,
            message=WorkerHello(worker=worker, pid=1, address="127.0.0.1", version="0", torch="0"),
        )
    )
    return m.handle(ready(worker, at))


def finish_change(m: Membership, at: float = 0.0, first_step: int = 0) -> list[ev.Instruction]:
    """Everybody votes, switches and reports."""
    change = m.roster.change
    assert change is not None
    out: list[ev.Instruction] = []
    for worker in change.participants:
        out += m.handle(ev.Said(at=at, message=Vote(worker=worker, generation=change.generation, ok=True)))
    for worker in change.leavers:
        out += m.handle(ev.Said(at=at, message=Left(worker=worker, generation=1, step=0)))
    for worker in change.members:
        out += m.handle(
            ev.Said(
                at=at,
                message=Active(
                    worker=worker, generation=change.generation, first_step=first_step, pause_s=0.1, parts=Parts()
                ),
            )
        )
    return out


def started(*workers: str) -> Membership:
    m = new_machine(min_members=len(workers))
    for worker in workers:
        join(m, worker)
    finish_change(m)
    assert m.roster.status is RunStatus.TRAINING
    return m


def test_waits_for_the_minimum_then_starts_with_all_in_order_of_arrival() -> None:
    m = new_machine(min_members=2)
    assert not tells(join(m, "w0"), Prepare)
    out = join(m, "w1")
    assert tells(out, Prepare) == ["w0", "w1"]
    finish_change(m)
    assert m.roster.members == ["w0", "w1"]
    assert m.roster.generation == 1


def test_commit_only_after_every_vote() -> None:
    m = started("w0", "w1")
    join(m, "w2")
    generation = m.roster.high
    for worker in ("w0", "w2"):
        assert not tells(m.handle(ev.Said(at=0, message=Vote(worker=worker, generation=generation, ok=True))), Commit)
    assert m.roster.generation == 1
    out = m.handle(ev.Said(at=0, message=Vote(worker="w1", generation=generation, ok=True)))
    assert tells(out, Commit) == ["w0", "w1", "w2"]
    assert m.roster.generation == generation


def test_s5_vote_of_another_generation_does_not_count() -> None:
    m = started("w0")
    join(m, "w1")
    for worker in ("w0", "w1"):
        m.handle(ev.Said(at=0, message=Vote(worker=worker, generation=m.roster.high + 1, ok=True)))
    assert m.roster.change is not None
    assert not m.roster.change.committed


def test_joins_and_leaves_known_together_are_one_generation() -> None:
    m = started("w0", "w1")
    join(m, "w2")
    join(m, "w3")  # comes while the change for w2 is under way
    m.handle(ev.ReleaseWanted(at=0, workers=["w0"], reason="walltime"))
    finish_change(m)
    assert m.roster.change is not None
    finish_change(m)
    last = m.roster.history[-1]
    assert last.kind is ChangeKind.MIXED
    assert last.members == ["w1", "w2", "w3"]
    assert "walltime" in last.reason


def test_rank_zero_may_leave() -> None:
    m = started("w0", "w1", "w2")
    m.handle(ev.ReleaseWanted(at=0, workers=["w0"], reason="asked"))
    finish_change(m)
    assert m.roster.members == ["w1", "w2"]
    assert m.roster.speaker("w0") == "w1"


def test_a_member_released_with_a_lower_limit_is_not_replaced_by_a_standby() -> None:
    m = started("w0", "w1", "w2")
    m.handle(ev.LimitChanged(at=0, limit=3, reason="asked"))
    join(m, "w3")
    m.handle(ev.ReleaseWanted(at=0, workers=["w0"], reason="asked", limit=2))
    finish_change(m)
    assert m.roster.members == ["w1", "w2"]
    assert m.roster.history[-1].kind is ChangeKind.RELEASE
    assert m.roster.standbys() == ["w3"]


def test_killed_member_interrupts_the_survivors_at_once() -> None:
    m = started("w0", "w1", "w2")
    out = m.handle(ev.WorkerGone(at=1, worker="w1", reason="killed by signal 9"))
    assert tells(out, Interrupt) == ["w0", "w2"]
    prepare = next(i.message for i in out if isinstance(i, ev.Tell) and isinstance(i.message, Prepare))
    assert prepare.interrupt
    assert [p.worker for p in prepare.members] == ["w0", "w2"]
    finish_change(m, at=1, first_step=7)
    assert m.roster.history[-1].kind is ChangeKind.EJECT


def test_joiner_that_dies_before_the_commit_burns_only_its_generation() -> None:
    m = started("w0")
    join(m, "w1")
    burned = m.roster.high
    out = m.handle(ev.WorkerGone(at=1, worker="w1", reason="killed"))
    assert tells(out, Abort) == ["w0"]
    assert not tells(out, Interrupt)
    assert m.roster.members == ["w0"]
    join(m, "w2", at=2)
    assert m.roster.high > burned


def test_death_after_the_commit_interrupts_both_generations() -> None:
    m = started("w0", "w1")
    join(m, "w2")
    generation = m.roster.high
    for worker in ("w0", "w1", "w2"):
        m.handle(ev.Said(at=0, message=Vote(worker=worker, generation=generation, ok=True)))
    out = m.handle(ev.WorkerGone(at=1, worker="w1", reason="killed"))
    interrupted = {
        (i.worker, i.message.generation) for i in out if isinstance(i, ev.Tell) and isinstance(i.message, Interrupt)
    }
    assert interrupted == {("w0", 1), ("w2", 1), ("w0", generation), ("w2", generation)}


def test_a_leaver_is_told_though_the_generation_without_it_breaks_and_the_next_one_too() -> None:
    m = started("w0", "w1", "w2", "w3")
    m.handle(ev.ReleaseWanted(at=1.0, workers=["w3"], reason="deadline"))
    for worker in ("w0", "w1", "w2", "w3"):
        m.handle(ev.Said(at=1.0, message=Vote(worker=worker, generation=2, ok=True)))
    assert m.roster.members == ["w0", "w1", "w2"]
    m.handle(ev.WorkerGone(at=2.0, worker="w0", reason="killed by signal 9"))
    out = m.handle(ev.WorkerGone(at=2.1, worker="w1", reason="killed by signal 9"))
    change = m.roster.change
    assert change is not None
    assert (change.generation, change.members, change.leavers) == (4, ["w2"], ["w3"])
    assert tells(out, Prepare) == ["w2", "w3"]
    finish_change(m, at=3.0)
    assert m.roster.workers["w3"].phase is WorkerPhase.GONE
    assert (m.roster.members, m.roster.change) == (["w2"], None)


def test_leaver_that_alone_has_the_state_hands_it_over_first() -> None:
    m = started("w0")
    m.roster.limit = 1
    join(m, "w2", at=2)
    m.handle(ev.ReleaseWanted(at=3, workers=["w0"], reason="walltime"))
    change = m.roster.change
    assert change is not None
    assert (change.kind, change.members, change.leavers) == (ChangeKind.ABSORB, ["w0", "w2"], [])
    finish_change(m)
    assert m.roster.change is not None, "now it leaves"
    finish_change(m)
    assert m.roster.members == ["w2"]
    assert [g.kind for g in m.roster.history[-2:]] == [ChangeKind.ABSORB, ChangeKind.RELEASE]


def test_when_all_leave_at_once_one_hands_the_state_over_first() -> None:
    m = started("w0", "w1", "w2")
    m.roster.limit = 2
    join(m, "w3", at=2)
    join(m, "w4", at=2)
    m.handle(ev.ReleaseWanted(at=3, workers=["w0", "w1", "w2"], reason="walltime"))
    while m.roster.change is not None:
        members = m.roster.change.members
        assert any(m.roster.workers[w].has_state for w in members)
        finish_change(m)
    assert m.roster.members == ["w3", "w4"]


def test_leaver_that_alone_has_the_state_is_kept_when_the_group_breaks() -> None:
    m = started("w0")
    join(m, "w2", at=2)
    change = m.roster.change
    assert change is not None
    m.handle(ev.ReleaseWanted(at=3, workers=["w0"], reason="walltime"))
    for worker in ("w0", "w2"):
        m.handle(ev.Said(at=3, message=Vote(worker=worker, generation=change.generation, ok=True)))
    m.handle(ev.Said(at=4, message=Held(worker="w0", generation=change.replaces, reason="reset", step=0)))
    m.handle(ev.Ticked(at=5))
    change = m.roster.change
    assert change is not None
    assert (change.members, change.interrupt) == (["w0"], True), "w2 has no state yet, so w0 may not be dropped"
    finish_change(m, at=6)
    while m.roster.change is not None:
        finish_change(m, at=6)
    assert [g.members for g in m.roster.history[1:]] == [["w0"], ["w0", "w2"], ["w2"]]


def test_a_newcomer_whose_state_was_on_its_way_is_absorbed_again_when_the_survivors_train() -> None:
    m = started("w0", "w1")
    join(m, "w2")
    for worker in ("w0", "w1", "w2"):
        m.handle(ev.Said(at=0, message=Vote(worker=worker, generation=2, ok=True)))
    for worker in ("w0", "w1"):
        m.handle(ev.Said(at=0, message=Active(worker=worker, generation=2, first_step=4, pause_s=0.1, parts=Parts())))
    out = m.handle(ev.WorkerGone(at=1, worker="w1", reason="killed by signal 9"))
    assert set(tells(out, Interrupt)) == {"w0", "w2"}
    assert tells(out, Prepare) == ["w0"]
    assert m.roster.workers["w2"].phase is WorkerPhase.READY
    assert not tells(m.handle(ev.WorkerGone(at=1, worker="w9", reason="unknown")), Interrupt)
    finish_change(m, at=2, first_step=5)
    assert m.roster.change is not None
    assert (m.roster.change.members, m.roster.change.interrupt) == (["w0", "w2"], False)
    m.handle(ev.WorkerGone(at=3, worker="w2", reason="killed by signal 9"))
    assert m.roster.change is None, "it was a standby: nobody else hears of its end but by an Abort"


def test_a_leaver_that_was_kept_for_its_state_is_not_forgotten_at_the_next_loss() -> None:
    m = started("w0", "w1", "w2")
    m.handle(ev.ReleaseWanted(at=1, workers=["w0"], reason="walltime"))
    for worker in ("w0", "w1", "w2"):
        m.handle(ev.Said(at=1, message=Vote(worker=worker, generation=2, ok=True)))
    m.handle(ev.WorkerGone(at=2, worker="w1", reason="killed by signal 9"))
    m.handle(ev.WorkerGone(at=2, worker="w2", reason="killed by signal 9"))
    assert m.roster.change is not None
    assert m.roster.change.members == ["w0"]
    m.handle(ev.Said(at=2, message=Held(worker="w0", generation=1, reason="interrupted", step=0)))
    join(m, "w3", at=2)
    for number in range(2):  # its group cannot be built, and then the head is lost
        m.handle(ev.Said(at=3, message=Vote(worker="w0", generation=m.roster.high, ok=False, reason="cut")))
        assert m.roster.change is not None, number
        assert (m.roster.change.members, m.roster.change.interrupt) == (["w0"], True), number
    m = Membership(m.roster, term=2, timing=TIMING, at=50.0, validate=True)
    assert tells(m.handle(ev.Ticked(at=50.1)), Prepare) == ["w0"]
    while m.roster.change is not None:
        finish_change(m, at=51)
    assert [g.members for g in m.roster.history[1:]] == [["w0"], ["w0", "w3"], ["w3"]]


def written(worker: str, generation: int, step: int, *, asked: bool = False) -> Checkpointed:
    return Checkpointed(
        worker=worker,
        generation=generation,
        step=step,
        epoch=0,
        path=f"/c{generation}-{step}",
        digest="d",
        nbytes=1,
        written_at=0.0,
        asked=asked,
    )


@pytest.mark.parametrize("room", [True, False], ids=["", "full disk"])
def test_last_member_leaving_suspends_with_a_checkpoint_and_comes_back(room: bool) -> None:
    """What is told says from where it goes on: there may have been no room for that checkpoint."""
    m = started("w0")
    out = m.handle(ev.ReleaseWanted(at=1, workers=["w0"], reason="walltime"))
    prepare = next(i.message for i in out if isinstance(i, ev.Tell) and isinstance(i.message, Prepare))
    assert prepare.members == []
    m.handle(ev.Said(at=1, message=Vote(worker="w0", generation=prepare.generation, ok=True)))
    if room:
        m.handle(ev.CheckpointWritten(at=2, written=written("w0", 1, 5), keep=2))
    out = m.handle(ev.Said(at=2, message=Left(worker="w0", generation=1, step=0)))
    assert m.roster.status is RunStatus.SUSPENDED
    (told,) = [i.text for i in out if isinstance(i, ev.Record) and i.kind == "suspend"]
    assert told.endswith(f"; the run goes on from {'the checkpoint of step 5' if room else 'its beginning'}")
    out = join(m, "w1", at=3)
    prepare = next(i.message for i in out if isinstance(i, ev.Tell) and isinstance(i.message, Prepare))
    assert prepare.checkpoints == ["/c1-5"] * room


def test_all_killed_goes_on_from_the_checkpoint_but_a_failing_script_ends_the_run() -> None:
    m = started("w0")
    m.handle(ev.WorkerGone(at=1, worker="w0", reason="killed by signal 9"))
    assert m.roster.status is RunStatus.SUSPENDED
    m = started("w0", "w1")
    m.handle(ev.Said(at=1, message=Failed(worker="w0", code=1, message="ValueError: bad")))
    m.handle(ev.WorkerGone(at=1, worker="w0", reason="exited with 1", code=1))
    out = m.handle(ev.WorkerGone(at=1, worker="w1", reason="exited with 1", code=1))
    assert any(isinstance(i, ev.RunEnded) and i.status is RunStatus.FAILED for i in out)
    assert "ValueError" in m.roster.message


def test_h6_script_that_never_reaches_the_loop_fails_the_run_with_advice() -> None:
    m = new_machine()
    m.handle(ev.WorkerExpected(at=0, worker="w0", token="t", node="n1"))
    out = m.handle(ev.WorkerGone(at=5, worker="w0", reason="exited with 0", code=0))
    ended = next(i for i in out if isinstance(i, ev.RunEnded))
    assert ended.status is RunStatus.FAILED
    assert "run.updates()" in ended.message


def test_script_that_fails_before_the_loop_leaves_its_last_words() -> None:
    """A SyntaxError without its file and line helps nobody, and fallow.init never saw it."""
    m = new_machine()
    for name in ("w0", "w1"):
        m.handle(ev.WorkerExpected(at=0, worker=name, token="t", node="n1"))
    for name in ("w0", "w1"):
        m.handle(ev.WorkerGone(at=5, worker=name, reason="exited with 1 (no)", code=1, tail=f"{name}, line 2\nno"))
    assert m.roster.status is RunStatus.FAILED
    assert m.roster.traceback == "w0, line 2\nno"


def test_script_that_hangs_before_the_loop_is_killed_at_its_deadline() -> None:
    m = new_machine()
    m.handle(ev.WorkerExpected(at=0, worker="w0", token="t", node="n1"))
    assert not m.handle(ev.Ticked(at=59))
    out = m.handle(ev.Ticked(at=61))
    assert any(isinstance(i, ev.Kill) and i.worker == "w0" for i in out)
    assert m.roster.status is RunStatus.FAILED


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (ready("w1", signature="x", layout=("w float32[3]",)), ["float32[3]", "float32[2]"]),
        (ready("w1", signature="x", layout=("w float32[2]", "b float32[2]")), ["2 tensors", "1"]),
        (ready("w1", shards=4), ["4", "8"]),
    ],
)
def test_newcomer_that_differs_is_refused_with_the_difference(event: ev.Said, words: list[str]) -> None:
    m = started("w0")
    m.handle(ev.WorkerExpected(at=0, worker="w1", token="t", node="n1"))
    out = m.handle(event)
    refused = next(i.message for i in out if isinstance(i, ev.Tell) and isinstance(i.message, Refused))
    assert all(word in refused.message for word in words)
    assert m.roster.members == ["w0"]
    assert m.roster.status is RunStatus.TRAINING


def test_silent_member_is_ejected_after_its_lease() -> None:
    m = started("w0", "w1")
    waits = Beat(
        worker="w0", generation=1, prepared=1, step=3, held=False, doing=Doing.WAITING, stalled_s=TIMING.probe_s
    )
    m.handle(ev.Said(at=9, message=waits))
    out = m.handle(ev.Ticked(at=11))
    assert [i.worker for i in out if isinstance(i, ev.Kill)] == ["w1"]
    assert tells(out, Interrupt) == ["w0"]


def test_broken_link_without_a_death_rebuilds_the_same_group() -> None:
    m = started("w0", "w1")
    m.handle(ev.Said(at=1.0, message=Held(worker="w0", generation=1, reason="connection reset", step=0)))
    assert m.roster.change is None, "the news of a death may still come"
    m.handle(ev.Ticked(at=1.4))
    assert m.roster.change is not None
    assert m.roster.change.members == ["w0", "w1"]
    assert m.roster.change.interrupt


def test_survivors_that_report_the_group_they_were_taken_from_cause_no_further_change() -> None:
    m = started("w0", "w1", "w2")
    m.handle(ev.WorkerGone(at=1, worker="w1", reason="killed"))
    for worker in ("w0", "w2"):
        m.handle(ev.Said(at=1.1, message=Held(worker=worker, generation=1, reason="interrupted", step=0)))
    finish_change(m, at=1.2)
    generation = m.roster.generation
    late = ev.Said(at=1.3, message=Beat(worker="w0", generation=1, prepared=generation, step=3, held=True))
    m.handle(late)
    for at in (1.5, 2.0, 3.0):
        assert not tells(m.handle(ev.Ticked(at=at)), Interrupt)
    assert m.roster.generation == m.roster.high == generation


def test_t7_limit_keeps_standbys_warm_and_releases_the_youngest() -> None:
    m = started("w0", "w1", "w2")
    m.handle(ev.LimitChanged(at=1, limit=2, reason="shrunk by hand"))
    finish_change(m, at=1)
    assert m.roster.members == ["w0", "w1"]
    join(m, "w3", at=2)
    assert m.roster.workers["w3"].phase is WorkerPhase.READY
    assert m.roster.change is None
    m.handle(ev.LimitChanged(at=3, limit=3, reason="grown"))
    finish_change(m, at=3)
    assert m.roster.members == ["w0", "w1", "w3"]


def test_in_a_scripted_run_no_standby_takes_a_lost_members_place() -> None:
    m = started("w0", "w1")
    m.roster.scripted, m.roster.limit = True, 2
    join(m, "w2")
    m.handle(ev.WorkerGone(at=1, worker="w1", reason="killed"))
    finish_change(m, at=1)
    assert m.roster.members == ["w0"]
    m.handle(ev.LimitChanged(at=2, limit=2, reason="grown"))
    finish_change(m, at=2)
    assert m.roster.members == ["w0", "w2"]


def test_never_more_members_than_shards() -> None:
    m = new_machine()
    m.handle(ev.WorkerExpected(at=0, worker="w0", token="t", node="n"))
    m.handle(ready("w0", shards=2))
    finish_change(m)
    for worker in ("w1", "w2"):
        m.handle(ev.WorkerExpected(at=0, worker=worker, token="t", node="n"))
        m.handle(ready(worker, shards=2))
        if m.roster.change is not None:
            finish_change(m)
    assert m.roster.members == ["w0", "w1"]


def test_n3_run_ends_when_every_member_has_finished_and_dismisses_the_rest() -> None:
    m = started("w0", "w1")
    m.roster.limit = 2
    join(m, "w2")
    done = {"generation": 1, "steps": 9, "digest": "d", "loss": 1.0, "samples": 99}
    assert not any(isinstance(i, ev.RunEnded) for i in m.handle(ev.Said(at=1, message=Finished(worker="w0", **done))))
    assert not any(isinstance(i, ev.RunEnded) for i in m.handle(ev.Said(at=1, message=Finished(worker="w1", **done))))
    out = m.handle(ev.WorkerGone(at=1, worker="w0", reason="exited with 0", code=0))
    assert any(isinstance(i, ev.RunEnded) and i.status is RunStatus.FINISHED for i in out)
    assert tells(out, Dismiss) == ["w2"]


def test_a_run_whose_members_end_with_unlike_states_says_so_when_it_is_over() -> None:
    m = started("w0", "w1")
    m.roster.message = "something that happened before"
    for worker in ("w0", "w1"):
        done = Finished(worker=worker, generation=1, steps=9, digest=f"of {worker}", loss=1.0, samples=99)
        out = m.handle(ev.Said(at=1, message=done))
    assert [i.kind for i in out if isinstance(i, ev.Record)] == ["diverged"]
    m.handle(ev.WorkerGone(at=1, worker="w0", reason="exited with 0", code=0))
    assert m.roster.status is RunStatus.FINISHED
    assert m.roster.message.startswith("members disagree on the final state: w1 has of w1, another one of w0: ")


def test_a_newcomer_whose_change_was_overtaken_by_the_end_is_not_waited_for() -> None:
    m = started("w0", "w1")
    join(m, "w2")
    generation = m.roster.high
    for worker in ("w0", "w1", "w2"):
        m.handle(ev.Said(at=1, message=Vote(worker=worker, generation=generation, ok=True)))
    assert m.roster.members == ["w0", "w1", "w2"], "it is committed"
    done = {"generation": 1, "steps": 9, "digest": "d", "loss": 1.0, "samples": 99}
    m.handle(ev.Said(at=1, message=Finished(worker="w0", **done)))
    assert m.roster.status is RunStatus.TRAINING
    m.handle(ev.WorkerGone(at=1, worker="w0", reason="exited with 0", code=0))
    assert m.roster.status is RunStatus.TRAINING
    out = m.handle(ev.Said(at=1, message=Finished(worker="w1", **done)))
    assert any(isinstance(i, ev.RunEnded) and i.status is RunStatus.FINISHED for i in out)
    assert tells(out, Dismiss) == ["w2"]


def test_a_head_that_comes_back_knows_that_the_generation_is_broken() -> None:
    """Members that stand inside of a step are not asked to take somebody in."""
    m = started("w0", "w1", "w2")
    join(m, "w3")
    m.handle(ev.WorkerGone(at=1, worker="w1", reason="killed by signal 9"))
    number = m.roster.high
    stored = msgspec.msgpack.encode(m.roster)
    again = Membership(msgspec.msgpack.decode(stored, type=Roster), term=2, timing=TIMING, at=50.0, validate=True)
    out = again.handle(ev.Ticked(at=50.1))
    prepares = [i.message for i in out if isinstance(i, ev.Tell) and isinstance(i.message, Prepare)]
    assert [(p.term, p.interrupt, [w.worker for w in p.members]) for p in prepares] == [(2, True, ["w0", "w2"])] * 2
    assert prepares[0].generation > number, "its rendezvous was lost with the head"
    assert prepares[0].timeout_s > TIMING.prepare_s / 2
    finish_change(again, at=51)
    assert again.roster.change is not None
    assert (again.roster.change.members, again.roster.change.interrupt) == (["w0", "w2", "w3"], False)


def test_a_head_that_comes_back_burns_what_was_only_prepared_and_keeps_what_was_committed() -> None:
    m = started("w0")
    join(m, "w1")
    generation = m.roster.high
    stored = msgspec.msgpack.encode(m.roster)
    again = Membership(msgspec.msgpack.decode(stored, type=Roster), term=2, timing=TIMING, at=50.0, validate=True)
    assert again.roster.change is None
    out = again.handle(ev.Said(at=50, message=Beat(worker="w0", generation=1, prepared=generation, step=4, held=False)))
    assert again.roster.high > generation, "the number is never used again"
    assert tells(out, Prepare) == ["w0", "w1"]


def test_a_peer_that_missed_a_message_hears_it_again() -> None:
    m = started("w0")
    join(m, "w1")
    generation = m.roster.high
    silent = ev.Said(at=3, message=Beat(worker="w0", generation=1, prepared=1, step=4, held=False))
    assert tells(m.handle(silent), Prepare) == ["w0"]
    for worker in ("w0", "w1"):
        m.handle(ev.Said(at=4, message=Beat(worker=worker, generation=1, prepared=generation, step=4, held=False)))
    assert m.roster.generation == generation, "a beat that shows the group stands is a vote"
    behind = ev.Said(at=7, message=Beat(worker="w0", generation=1, prepared=generation, step=4, held=False))
    assert tells(m.handle(behind), Commit) == ["w0"]


def test_a_leaver_that_has_not_heard_of_the_generation_after_a_loss_breaks_nothing() -> None:
    """Its vote is not waited for. It is told again, and leaves as it would have."""
    m = started("w0", "w1", "w2")
    m.handle(ev.ReleaseWanted(at=1, workers=["w0"], reason="asked"))
    for worker in ("w0", "w1", "w2"):
        m.handle(ev.Said(at=1, message=Vote(worker=worker, generation=2, ok=True)))
    m.handle(ev.WorkerGone(at=2, worker="w2", reason="killed by signal 9", signal=9))
    m.handle(ev.Said(at=2, message=Vote(worker="w1", generation=3, ok=True)))
    assert m.roster.generation == 3
    for at, told in ((2.1, []), (2.5, []), (4.1, ["w0"])):
        out = m.handle(ev.Said(at=at, message=Beat(worker="w0", generation=1, prepared=2, step=3, held=False)))
        out += m.handle(ev.Ticked(at=at))
        assert tells(out, Prepare) == told
        assert not tells(out, Interrupt)
    heard = ev.Said(at=4.2, message=Beat(worker="w0", generation=1, prepared=3, step=3, held=True))
    assert tells(m.handle(heard), Commit) == ["w0"]
    m.handle(ev.Said(at=4.3, message=Left(worker="w0", generation=1, step=3)))
    m.handle(ev.Said(at=4.3, message=Active(worker="w1", generation=3, first_step=3, pause_s=0.1, parts=Parts())))
    assert [report.generation for report in m.roster.history] == [1, 3]


# -- random histories -----------------------------------------------------------------------------------------------


@dataclass
class SimWorker:
    """What a worker would do, without torch: votes, switches with the others, holds when interrupted."""

    name: str
    inbox: list[Message] = field(default_factory=list)
    generation: int = 0
    prepared: dict[int, Prepare] = field(default_factory=dict)
    committed: int = 0
    held: bool = False
    step: int = 0
    has_state: bool = False
    history: int = 0
    "which loading of a checkpoint its state goes back to"
    receives: bool = False
    "it computes in its generation, and a part of the state is on its way"
    alive: bool = True
    stopped: bool = False


class Thorough(Membership):
    """Looks at everybody after each event. What an ordinary one spares itself must make no difference."""

    def __init__(self, roster: Roster, term: int, at: float) -> None:
        super().__init__(roster, term=term, timing=TIMING, at=at, validate=True)
        plan = self._changes.plan

        def look_at_all(at: float, *, news: bool) -> None:
            self._changes._busy = None
            plan(at, news=True)

        self._changes.plan = look_at_all  # type: ignore[method-assign]


class World:
    """Workers and a machine; Hypothesis decides who acts next."""

    def __init__(self) -> None:
        self.m = new_machine(min_members=1)
        self.thorough = Thorough(new_machine(min_members=1).roster, 1, 0.0)
        self.at = 0.0
        self.workers: dict[str, SimWorker] = {}
        self.active: dict[int, tuple[str, ...]] = {}
        self.generations: list[int] = []
        self.cut: set[frozenset[str]] = set()
        "pairs that do not reach each other"
        self.loaded = 0
        "times that a generation began from a checkpoint, or from the beginning"
        self.wanted_step: int | None = None
        "of the rollback that was wanted last"
        self.told: dict[int, set[str]] = {}
        "generation -> those on either side of a cut that was voted on; it may be mended since"

    def put(self, event: ev.Event) -> None:
        before = self.m.roster.high
        instructions = self.m.handle(event)
        assert instructions == self.thorough.handle(event)
        assert self.m.roster == self.thorough.roster
        for i in instructions:
            if isinstance(i, ev.Tell) and i.worker in self.workers:
                self.workers[i.worker].inbox.append(i.message)
                if isinstance(i.message, Prepare) and i.message.interrupt:
                    # Survivors may stand inside of a step, where they give their state to nobody.
                    members = [self.workers[peer.worker] for peer in i.message.members]
                    assert len({w.has_state for w in members}) < 2, i.message
            elif isinstance(i, ev.Kill) and i.worker in self.workers:
                self.workers[i.worker].alive = False
                if "no connection" in i.reason:
                    assert i.worker in self.told.get(before, ()), "a healthy worker that nobody accused"
                if "stopped" in i.reason:
                    assert self.workers[i.worker].stopped
        assert self.m.roster.high >= before
        stored = msgspec.msgpack.decode(msgspec.msgpack.encode(self.m.roster), type=Roster)
        assert stored == self.m.roster, "the durable state is the whole state"

    def spawn(self) -> None:
        name = f"w{len(self.workers)}"
        if len([w for w in self.workers.values() if w.alive]) >= 6:
            return
        self.workers[name] = SimWorker(name)
        self.put(ev.WorkerExpected(at=self.at, worker=name, token="t", node="n" + name))
        self.put(ready(name, self.at))

    def deliver(self, w: SimWorker) -> None:
        if not w.alive or not w.inbox or w.stopped:
            return
        message = w.inbox.pop(0)
        if isinstance(message, Prepare):
            w.prepared[message.generation] = message
            if message.interrupt and w.generation and w.generation < message.generation:
                self.hold(w)
            others = [p.worker for p in message.members]
            lost = [n for n in others if w.name in others and frozenset((n, w.name)) in self.cut]
            if lost:
                del w.prepared[message.generation]
                self.told.setdefault(message.generation, set()).update(lost, [w.name])
            vote = ev.Said(
                at=self.at,
                message=Vote(worker=w.name, generation=message.generation, ok=not lost, reason="cut", unreachable=lost),
            )
            self.put(vote)
        elif isinstance(message, Abort):
            w.prepared.pop(message.generation, None)
        elif isinstance(message, Interrupt):
            if w.generation == message.generation:
                self.hold(w)
            w.prepared.pop(message.generation, None)
            if w.committed == message.generation:
                w.committed = 0
        elif isinstance(message, Commit):
            # It may be said twice, for it is said again to whoever beats before it has switched.
            if message.generation in w.prepared and message.generation > w.generation:
                w.committed = message.generation
                prepare = w.prepared[w.committed]
                if prepare.interrupt and w.name not in [peer.worker for peer in prepare.members]:
                    w.alive = False  # it stands still, and no boundary comes any more
                    self.put(ev.Said(at=self.at, message=Left(worker=w.name, generation=w.generation, step=0)))
        elif isinstance(message, Dismiss | Refused):
            w.alive = False

    def hold(self, w: SimWorker) -> None:
        """A worker that stops says so, whoever told it to, and again with each beat."""
        if not w.held:
            w.held = True
            self.report_held(w)

    def report_held(self, w: SimWorker) -> None:
        held = Held(worker=w.name, generation=w.generation, reason="interrupted", step=0)
        self.put(ev.Said(at=self.at, message=held))

    def switch(self) -> None:
        """A committed generation whose old and new members have all heard of it passes its boundary."""
        for generation in {w.committed for w in self.workers.values() if w.alive and w.committed}:
            prepare = next(w.prepared[generation] for w in self.workers.values() if generation in w.prepared)
            names = [p.worker for p in prepare.members]
            new = [self.workers[n] for n in names]
            trains = prepare.replaces > 0 and not prepare.interrupt
            old = [w for w in self.workers.values() if trains and w.alive and w.generation == prepare.replaces]
            if not all(w.alive and not w.stopped and w.committed == generation for w in [*new, *old]):
                continue
            if new and prepare.rollback:
                for w in new:
                    w.has_state = False
            elif new and not any(w.has_state for w in new):
                lost = [w.name for w in self.workers.values() if w.alive and w.has_state and not w.stopped]
                assert not lost, f"generation {generation} begins without the state that {lost} hold"
            if new and not any(w.has_state for w in new):  # all load the same before they begin
                self.loaded += 1
                step = int(prepare.checkpoints[0].rpartition("-")[2]) if prepare.checkpoints else 0
                for w in new:
                    w.has_state, w.history, w.step = True, self.loaded, step
            assert len({w.history for w in new if w.has_state}) < 2, "members that went back, and some that did not"
            step = max([w.step for w in new if w.has_state], default=0)
            for w in old:
                if w.name not in names:
                    w.alive = False
                    if not names:
                        new_one = written(w.name, prepare.replaces, w.step)
                        self.put(ev.CheckpointWritten(at=self.at, written=new_one, keep=2))
                    self.put(ev.Said(at=self.at, message=Left(worker=w.name, generation=1, step=0)))
            assert generation not in self.active, "a generation becomes active once"
            self.active[generation] = tuple(names)
            self.generations.append(generation)
            for w in new:
                w.generation, w.committed, w.held, w.step = generation, 0, False, step
                w.receives = not w.has_state
            for w in new:
                if not w.receives:
                    self.arrive(w)

    def arrive(self, w: SimWorker) -> None:
        """It has all of the state."""
        w.has_state, w.receives, step = True, False, w.step
        givers = (other for other in self.workers.values() if other.generation == w.generation and other is not w)
        w.history = next((other.history for other in givers if other.has_state), w.history)
        w.step += 1
        message = Active(worker=w.name, generation=w.generation, first_step=step, pause_s=0.0, parts=Parts())
        self.put(ev.Said(at=self.at, message=message))

    def receive(self, w: SimWorker) -> None:
        """The rest of the state comes, if all who give it are there: a part of it may come from each."""
        others = [other for other in self.workers.values() if other.generation == w.generation]
        whole = all(other.alive and not other.stopped and not other.held for other in others)
        if w.receives and whole and len(others) == len(self.active[w.generation]):
            self.arrive(w)

    def save(self, w: SimWorker) -> None:
        if w.alive and w.has_state and not w.held and w.generation == self.m.roster.generation:
            self.put(ev.CheckpointWritten(at=self.at, written=written(w.name, w.generation, w.step), keep=2))

    def roll_back(self, number: int) -> None:
        """By hand: members that train are not interrupted for it."""
        usable, r = self.m.roster.usable_checkpoints(), self.m.roster
        if not usable or r.status.ended or (r.members and not r.staying()):
            return
        self.wanted_step = usable[number % len(usable)].step
        inboxes = {w.name: len(w.inbox) for w in self.workers.values()}
        self.put(ev.RollbackWanted(at=self.at, step=self.wanted_step))
        new = [message for w in self.workers.values() for message in w.inbox[inboxes[w.name] :]]
        assert not any(isinstance(message, Interrupt) for message in new)
        assert not any(isinstance(message, Prepare) and message.interrupt for message in new)

    def kill(self, w: SimWorker) -> None:
        if w.alive:
            w.alive = False
            self.put(ev.WorkerGone(at=self.at, worker=w.name, reason="killed by signal 9"))

    def restart_head(self) -> None:
        stored = msgspec.msgpack.encode(self.m.roster)
        roster = msgspec.msgpack.decode(stored, type=Roster)
        self.m = Membership(roster, term=2, timing=TIMING, at=self.at, validate=True)
        self.thorough = Thorough(msgspec.msgpack.decode(stored, type=Roster), 2, self.at)
        for w in self.workers.values():
            w.inbox.clear()

    def beat_all(self) -> None:
        for w in self.workers.values():
            self.beat(w)

    def beat(self, w: SimWorker, doing: Doing = Doing.WORKING, stalled_s: float = 0.0) -> None:
        if w.alive and w.stopped:
            self.put(ev.WorkerStopped(at=self.at, worker=w.name))
        elif w.alive:
            beat = Beat(
                worker=w.name,
                generation=0 if w.receives else w.generation,
                prepared=max([*w.prepared, w.generation]),
                step=w.step,
                held=w.held,
                doing=doing,
                stalled_s=stalled_s,
            )
            self.put(ev.Said(at=self.at, message=beat))
            if w.held:
                self.report_held(w)

    def settle(self) -> None:
        """No more faults but those that last: time passes, beats are sent, messages arrive."""
        self.cut.clear()
        calm = 0
        for _ in range(200):
            high, self.at = self.m.roster.high, self.at + 0.5
            self.beat_all()
            self.put(ev.Ticked(at=self.at))
            for w in list(self.workers.values()):
                while w.alive and not w.stopped and w.inbox:
                    self.deliver(w)
            self.switch()
            for w in list(self.workers.values()):
                self.receive(w)
            calm = calm + 1 if self.m.roster.change is None and self.m.roster.high == high else 0
            if calm == 2 * TIMING.lease_s + 4:
                return

    def act(self, action: str, number: int) -> None:
        """Something happens, to the worker of that number."""
        self.at += 0.05
        names = sorted(self.workers)
        w = self.workers[names[number % len(names)]]
        match action:
            case "spawn":
                self.spawn()
            case "deliver":
                self.deliver(w)
            case "switch":
                self.switch()
            case "receive":
                self.receive(w)
            case "save":
                self.save(w)
            case "back":
                self.roll_back(number)
            case "kill":
                self.kill(w)
            case "release":
                self.put(ev.ReleaseWanted(at=self.at, workers=[w.name], reason="asked"))
            case "limit":
                self.put(ev.LimitChanged(at=self.at, limit=1 + number % 6, reason="test"))
            case "tick":
                self.at += number / 10
                self.put(ev.Ticked(at=self.at))
            case "head":
                self.restart_head()
            case "cut":
                other = names[(number // 7) % len(names)]
                if other != w.name:
                    self.cut.add(frozenset((w.name, other)))
            case "heal":
                self.cut.clear()
            case "stop":
                w.stopped = True
            case "beat":
                self.beat(w, list(Doing)[number // 7 % len(Doing)], number / 5)
            case "talk":
                for each in list(self.workers.values()):
                    while each.alive and not each.stopped and each.inbox:
                        self.deliver(each)
            case "wait":
                self.at += number / 4
                for each in list(self.workers.values()):
                    self.beat(each, Doing.WAITING, number / 4)
            case "hold":
                if w.alive and not w.stopped and w.generation == self.m.roster.generation and w.generation:
                    self.hold(w)

    def ends_well(self) -> None:
        """After the last fault all who live train together."""
        if self.m.roster.status.ended:
            return
        self.put(ev.LimitChanged(at=self.at, limit=8, reason="test"))
        self.spawn()
        self.settle()
        roster = self.m.roster
        assert self.generations == sorted(set(self.generations)), "generations only grow"
        assert roster.status is RunStatus.TRAINING, (roster.status, roster.change, self.m.story)
        assert roster.change is None
        alive = [w for w in self.workers.values() if w.alive and not w.stopped]
        assert sorted(roster.members) == sorted(w.name for w in alive)
        assert {(w.generation, w.history) for w in alive} == {(roster.generation, self.loaded)}
        assert roster.rollback is None
        assert [back.to_step for back in roster.rollbacks][-1:] == [self.wanted_step] * (self.wanted_step is not None)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *(
                    "spawn",
                    "deliver",
                    "deliver",
                    "deliver",
                    "switch",
                    "kill",
                    "release",
                    "limit",
                    "tick",
                    "head",
                    "hold",
                ),
                *("cut", "heal", "stop", "beat", "beat", "wait", "receive", "save", "back"),
            ]
        ),
        st.integers(0, 30),
    ),
    max_size=120,
)


ACCUSED = [
    *(("deliver", 0), ("deliver", 0), ("switch", 0), ("spawn", 0), ("spawn", 0)),
    *(("deliver", 0), ("deliver", 1), ("deliver", 0), ("deliver", 1), ("switch", 0), ("cut", 16), ("deliver", 1)),
]
"""The second of three workers says that it does not reach the third; the first has not voted yet."""


WAITING = [
    *(("deliver", 0), ("deliver", 0), ("switch", 0), ("spawn", 0)),
    *(("deliver", 0), ("deliver", 1), ("deliver", 0), ("deliver", 1), ("switch", 0), ("tick", 10), ("wait", 28)),
]
"""Both members wait for each other."""


@settings(max_examples=400, deadline=None)
@given(ACTIONS)
@example([*WAITING, ("wait", 28)])
@example(ACCUSED)
@example([*ACCUSED, ("heal", 0), ("tick", 30)])
@example([("spawn", 0), ("head", 0), ("spawn", 0), ("deliver", 0), ("deliver", 1), ("release", 0), ("kill", 1)])
@example([("spawn", 0), ("spawn", 0), ("kill", 0), ("deliver", 1), ("deliver", 2), ("release", 1), ("kill", 2)])
def test_any_history_keeps_the_invariants_and_ends_with_everybody_training(actions: list[tuple[str, int]]) -> None:
    world = World()
    world.spawn()
    for action, number in actions:
        world.act(action, number)
    world.ends_well()


LOSSES = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("talk", "talk", "switch", "switch", "receive", "spawn", "release", "kill", "hold", "head", "beat"),
                *("save", "back"),
            ]
        ),
        st.integers(0, 5),
    ),
    max_size=30,
)
THREE = [("talk", 0), ("switch", 0), ("spawn", 0), ("spawn", 0), ("talk", 0), ("switch", 0), ("receive", 1)]
"""Two whole members and one whose state is on its way."""
KEPT = [("receive", 2), ("release", 0), ("talk", 0), ("kill", 1), ("kill", 2)]
"""Who was leaving is all that is left."""


@settings(max_examples=200, deadline=None)
@given(LOSSES)
@example([*KEPT, ("head", 0)])
@example([("release", 0), ("talk", 0), ("kill", 1)])
@example([("receive", 2), ("save", 0), ("back", 0), ("talk", 0), ("kill", 1), ("talk", 0), ("switch", 0)])
@example([("receive", 2), ("save", 0), ("back", 0), ("talk", 0), ("head", 0), ("back", 0), ("switch", 0), ("hold", 1)])
@example([("talk", 0), ("switch", 0), ("hold", 0), ("head", 0)])
@example([("talk", 0), ("switch", 0), ("hold", 1), ("head", 0)])
def test_losses_one_after_the_other_leave_the_state_with_who_is_left(actions: list[tuple[str, int]]) -> None:
    """Those who leave and those who come among them, while groups are built and states are handed over."""
    world = World()
    world.spawn()
    for action, number in [*THREE, *actions]:
        world.act(action, number)
    world.ends_well()
