"""Which checkpoints a run keeps and may use, and going back to one: the machine alone."""

from __future__ import annotations

import pytest

from fallow.core import events as ev
from fallow.core.checkpoints import spare
from fallow.core.membership import Membership
from fallow.core.roster import Saved
from fallow.model import (
    Abort,
    Active,
    Beat,
    ChangeKind,
    CheckpointDamaged,
    Checkpointed,
    CheckpointFailed,
    Commit,
    Interrupt,
    Parts,
    Prepare,
    RollbackReport,
    RunStatus,
    Vote,
)

from test_membership import finish_change, join, started, written  # isort: skip


def tell(m: Membership, new: Checkpointed, keep: int = 2) -> list[ev.Instruction]:
    return m.handle(ev.CheckpointWritten(at=9, written=new, keep=keep))


def removed(out: list[ev.Instruction]) -> list[str]:
    return [i.path for i in out if isinstance(i, ev.RemoveCheckpoint)]


def told(out: list[ev.Instruction], kind: type) -> dict[str, list]:
    found: dict[str, list] = {}
    for i in out:
        if isinstance(i, ev.Tell) and isinstance(i.message, kind):
            found.setdefault(i.worker, []).append(i.message)
    return found


def usable(m: Membership) -> list[int]:
    return [one.step for one in m.roster.usable_checkpoints()]


def test_the_newest_stay_and_those_that_were_asked_for() -> None:
    m = started("w0")
    assert removed(tell(m, written("w0", 1, 10))) == []
    assert removed(tell(m, written("w0", 1, 20, asked=True))) == []
    assert removed(tell(m, written("w0", 1, 30))) == []
    assert removed(tell(m, written("w0", 1, 40))) == ["/c1-10"]
    assert removed(tell(m, written("w0", 1, 40))) == [], "said twice, noted once"
    assert removed(tell(m, written("w0", 1, 50), keep=1)) == ["/c1-30", "/c1-40"]
    assert usable(m) == [50, 20]


def test_a_damaged_one_is_passed_over_and_goes_when_enough_came_after_it() -> None:
    m = started("w0")
    tell(m, written("w0", 1, 10))
    tell(m, written("w0", 1, 20))
    out = m.handle(ev.Said(at=9, message=CheckpointDamaged(worker="w0", path="/c1-20", reason="20 is torn")))
    (record,) = [i for i in out if isinstance(i, ev.Record)]
    assert (record.kind, record.text) == ("damaged", "20 is torn; that of step 10 is used")
    assert usable(m) == [10]
    assert removed(tell(m, written("w0", 1, 30))) == []
    assert sorted(removed(tell(m, written("w0", 1, 40)))) == ["/c1-10", "/c1-20"]


def test_if_none_can_be_used_the_run_fails_with_advice_instead_of_beginning_again() -> None:
    m = started("w0")
    tell(m, written("w0", 1, 10))
    m.handle(ev.WorkerGone(at=9, worker="w0", reason="killed by signal 9"))
    join(m, "w1", at=9)
    assert m.roster.status is RunStatus.SUSPENDED
    m.handle(ev.Said(at=9, message=CheckpointDamaged(worker="w1", path="/c1-10", reason="10 is torn")))
    assert m.roster.status is RunStatus.FAILED
    assert "10 is torn; no older checkpoint is left. Put a good copy" in m.roster.message


def test_a_failure_is_told_once_however_many_members_saw_it() -> None:
    m = started("w0", "w1")
    records = [
        i
        for worker in ("w0", "w1")
        for i in m.handle(
            ev.Said(at=9, message=CheckpointFailed(worker=worker, generation=1, step=5, reason="disk full"))
        )
        if isinstance(i, ev.Record)
    ]
    assert [record.text for record in records] == ["disk full"]
    assert m.roster.checkpoint_problem == "disk full"
    tell(m, written("w0", 1, 10))
    assert m.roster.checkpoint_problem == ""


def test_rolling_back_drops_what_members_hold() -> None:
    m = started("w0", "w1")
    for step in (10, 20):
        tell(m, written("w0", 1, step), keep=3)
    for worker in ("w0", "w1"):
        m.handle(ev.Said(at=9, message=Beat(worker=worker, generation=1, prepared=1, step=25, held=False)))
    out = m.handle(ev.RollbackWanted(at=9, step=10))
    assert not told(out, Interrupt), "they train until the group stands"
    prepares = told(out, Prepare)
    assert [(p.rollback, p.interrupt, p.checkpoints) for p in prepares["w0"]] == [(True, False, ["/c1-10"])]
    assert m.roster.change is not None
    assert m.roster.change.kind is ChangeKind.START
    m.handle(ev.Said(at=9, message=Beat(worker="w0", generation=1, prepared=2, step=26, held=False)))
    assert m.roster.front == 26
    # One that was finished by then is of no use: going on from it would mix two histories.
    tell(m, written("w0", 1, 26), keep=2)
    assert usable(m) == [10]
    m.handle(ev.Said(at=9, message=Vote(worker="w1", generation=2, ok=True)))
    m.handle(ev.Said(at=9, message=Active(worker="w1", generation=2, first_step=10, pause_s=0.1, parts=Parts())))
    assert m.roster.rollbacks == [RollbackReport(generation=2, from_step=26, to_step=10)]
    # What w0 has said before its switch, and comes late, says nothing any more.
    m.handle(ev.Said(at=9, message=Beat(worker="w0", generation=1, prepared=2, step=27, held=False)))
    assert (m.roster.front, m.roster.workers["w0"].has_state) == (10, False)
    m.handle(ev.Said(at=9, message=Active(worker="w0", generation=2, first_step=10, pause_s=0.1, parts=Parts())))
    assert m.roster.change is None
    tell(m, written("w0", 1, 27), keep=3)
    tell(m, written("w0", 2, 15), keep=3)
    assert usable(m) == [15, 10]
    assert m.roster.status is RunStatus.TRAINING


@pytest.mark.parametrize("committed", [False, True])
def test_a_member_that_dies_in_the_middle_of_a_rollback_does_not_undo_it(committed: bool) -> None:
    m = started("w0", "w1")
    tell(m, written("w0", 1, 10))
    m.handle(ev.RollbackWanted(at=9, step=10))
    if committed:
        for worker in ("w0", "w1"):
            m.handle(ev.Said(at=9, message=Vote(worker=worker, generation=2, ok=True)))
    out = m.handle(ev.WorkerGone(at=9, worker="w1", reason="killed by signal 9"))
    (prepare,) = told(out, Prepare)["w0"]
    assert (prepare.rollback, prepare.interrupt, [p.worker for p in prepare.members]) == (True, True, ["w0"])
    finish_change(m, at=9, first_step=10)
    assert [(back.generation, back.to_step) for back in m.roster.rollbacks] == [(3, 10)]
    # Later changes are ordinary ones.
    out = join(m, "w2", at=9)
    assert not any(p.rollback for messages in told(out, Prepare).values() for p in messages)


def test_a_rollback_while_newcomers_load_another_checkpoint() -> None:
    m = started("w0")
    for step in (10, 20):
        tell(m, written("w0", 1, step))
    m.handle(ev.WorkerGone(at=9, worker="w0", reason="killed by signal 9"))
    (prepare,) = told(join(m, "w1", at=9), Prepare)["w1"]
    assert prepare.checkpoints == ["/c1-20", "/c1-10"]
    out = m.handle(ev.RollbackWanted(at=9, step=10))
    (prepare,) = told(out, Prepare)["w1"]
    assert prepare.checkpoints == ["/c1-10"]
    assert not told(out, Commit)
    finish_change(m, at=9, first_step=10)
    # w0's last beat was of an earlier step than its checkpoint.
    assert [(back.from_step, back.to_step) for back in m.roster.rollbacks] == [(20, 10)]


def test_those_who_come_and_go_meanwhile_do_so_in_the_rollback() -> None:
    """A state that is to be dropped is handed over to nobody."""
    m = started("w0", "w1")
    tell(m, written("w0", 1, 10))
    join(m, "w2", at=9)
    m.handle(ev.ReleaseWanted(at=9, workers=["w0"], reason="walltime"))
    out = m.handle(ev.RollbackWanted(at=9, step=10))
    assert told(out, Abort).keys() == {"w0", "w1", "w2"}
    change = m.roster.change
    assert change is not None
    assert (change.members, change.leavers, change.reason) == (
        ["w1", "w2"],
        ["w0"],
        "rolled back to step 10, absorbed w2 (n-w2), released w0 (n-w0) (walltime)",
    )


def test_a_rollback_that_is_wanted_while_another_one_is_committed_comes_after_it() -> None:
    m = started("w0")
    for step in (10, 20):
        tell(m, written("w0", 1, step))
    m.handle(ev.RollbackWanted(at=9, step=20))
    m.handle(ev.Said(at=9, message=Vote(worker="w0", generation=2, ok=True)))
    out = m.handle(ev.RollbackWanted(at=9, step=10))
    assert not told(out, Prepare)
    out = m.handle(ev.Said(at=9, message=Active(worker="w0", generation=2, first_step=20, pause_s=0.1, parts=Parts())))
    (prepare,) = told(out, Prepare)["w0"]
    assert (prepare.generation, prepare.rollback, prepare.checkpoints) == (3, True, ["/c1-10"])
    finish_change(m, at=9, first_step=10)
    assert [(back.generation, back.to_step) for back in m.roster.rollbacks] == [(2, 20), (3, 10)]
    assert m.roster.rollback is None


def test_one_that_turns_up_after_the_run_went_on_from_before_it() -> None:
    m = started("w0")
    tell(m, written("w0", 1, 10))
    m.handle(ev.WorkerGone(at=9, worker="w0", reason="killed by signal 9"))
    join(m, "w1", at=9)
    tell(m, written("w0", 1, 20))
    assert usable(m) == [10], "while the next generation is being made"
    finish_change(m, at=9, first_step=10)
    tell(m, written("w0", 1, 30))
    assert usable(m) == [10]
    tell(m, written("w1", 2, 12))
    assert usable(m) == [12, 10]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_spare_never_names_the_newest_usable_one(keep: int) -> None:
    saved = [Saved(written=written("w0", 1, step)) for step in range(5)]
    saved[4].problem = "torn"
    saved[3].aside = True
    gone = spare(saved, keep)
    assert saved[2] not in gone
    assert [one for one in saved[:3] if one not in gone] == saved[max(0, 3 - keep) : 3]
