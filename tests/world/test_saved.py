"""Checkpoints, played by hand: which are kept and used, and how a run goes back to one."""

import pytest

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Checkpoint, Problem
from fallow.core.membership.state import RunPhase
from fallow.model import ChangeKind, RunStatus
from world.rig import WAITS, Rig, logs, notices, orders, started


def test_a_checkpoint_that_could_not_be_written_is_told_to_all_and_forgotten_with_the_next_one() -> None:
    rig = started(2)
    turn = rig.say(1, unsaved=Problem(reason="disk full", generation=1, step=4))
    assert {n: order.unsaved for n, order in orders(turn).items()} == {1: (1, 4), 2: (1, 4)}
    assert rig.r.root.unsaved_reason == "disk full"
    assert not logs(rig.say(2, unsaved=Problem(reason="disk full", generation=1, step=4)), "checkpoint")
    rig.say(1, saved=Checkpoint(path="/c", generation=1, step=5))
    assert rig.r.root.unsaved_reason == ""


def test_a_damaged_checkpoint_is_passed_over_and_the_last_one_ends_the_run() -> None:
    rig = started(1)
    for step in (5, 6):
        rig.say(1, saved=Checkpoint(path=f"/{step}", generation=1, step=step))
    rig.gone(1, signal=9)
    n = rig.join("b")
    rig.vote()
    turn = rig.say(n, damaged=Problem(reason="/6 is torn", path="/6"))
    assert logs(turn, "damaged") == ["/6 is torn; that of step 5 is used"]
    rig.say(n, damaged=Problem(reason="/5 is torn", path="/5"))
    assert rig.r.root.status is RunStatus.FAILED
    assert rig.r.root.message.startswith("/5 is torn; no older checkpoint is left. Put a good copy in its place")


def save(rig: Rig, step: int, generation: int = 1, n: int = 1, *, by_hand: bool = False) -> list[str]:
    """A checkpoint is complete. Returns those that are removed."""
    saved = Checkpoint(path=f"/{generation}-{step}", generation=generation, step=step, by_hand=by_hand)
    return [i.path for i in rig.say(n, saved=saved, step=step) if isinstance(i, ev.RemoveCheckpoint)]


def usable(rig: Rig) -> list[int]:
    return [checkpoint.step for checkpoint in rig.r.checkpoints.usable()]


def test_the_newest_stay_and_those_that_were_asked_for() -> None:
    rig = started(1)
    assert save(rig, 10) == []
    assert rig.orders[1].noted == "/1-10", "its node hears of it"
    assert save(rig, 20, by_hand=True) == []
    assert save(rig, 30) == []
    assert save(rig, 40) == ["/1-10"]
    assert save(rig, 40) == [], "said twice, noted once"
    rig = started(1)
    rig.restart(1, keep=1)
    save(rig, 30)
    assert save(rig, 40) == ["/1-30"]


def test_none_is_removed_while_one_of_them_may_be_loaded() -> None:
    rig = started(1)
    rig.gone(1, signal=9)
    n = rig.join("b")
    for step in (10, 20, 30):
        turn = rig.put(ev.CheckpointFound(at=rig.at, checkpoint=Checkpoint(path=f"/1-{step}", generation=1, step=step)))
        assert not [i for i in turn if isinstance(i, ev.RemoveCheckpoint)]
    rig.tick(1, n)
    rig.change(30)
    assert save(rig, 40, rig.r.root.generation, n) == ["/1-10", "/1-20"]


def test_a_damaged_one_goes_when_enough_came_after_it() -> None:
    rig = started(1)
    save(rig, 10)
    save(rig, 20)
    turn = rig.say(1, damaged=Problem(reason="20 is torn", path="/1-20"))
    assert logs(turn, "damaged") == ["20 is torn; that of step 10 is used"]
    assert usable(rig) == [10]
    assert save(rig, 30) == []
    assert sorted(save(rig, 40)) == ["/1-10", "/1-20"]


@notices("a checkpoint that turns up does not stop a start")
def test_one_that_turns_up_after_the_run_went_on_from_before_it_is_set_aside() -> None:
    rig = started(1)
    save(rig, 10)
    rig.gone(1, signal=9)
    n = rig.join("b")
    rig.put(ev.CheckpointFound(at=rig.at, checkpoint=Checkpoint(path="/1-20", generation=1, step=20)))
    rig.tick(1, n)
    assert rig.ballot.full_plan.checkpoints == ("/1-20", "/1-10"), "just in time"
    rig.vote()
    save(rig, 30, n=n)
    rig.switch(20)
    save(rig, 40, n=n)
    assert usable(rig) == [20, 10]
    save(rig, 22, generation=rig.r.root.generation, n=n)
    assert usable(rig) == [22, 20]


@pytest.mark.parametrize("is_committed", [False, True])
def test_one_that_turns_up_while_a_newcomer_begins_alone_is_used_or_set_aside(is_committed: bool) -> None:
    """The only member with the state died before it had handed it over."""
    rig = started(1)
    save(rig, 10)
    rig.join("b")
    rig.vote()
    rig.gone(1, signal=9)
    if is_committed:
        rig.vote()
    rig.put(ev.CheckpointFound(at=rig.at, checkpoint=Checkpoint(path="/1-20", generation=1, step=20)))
    if is_committed:
        rig.switch(10)
        assert usable(rig) == [10]
    else:
        assert rig.ballot.full_plan.checkpoints == ("/1-20", "/1-10")


@pytest.mark.parametrize("is_heard", [False, True])
def test_one_that_turns_up_while_all_begin_together_is_set_aside_if_it_may_be_newer(is_heard: bool) -> None:
    """They load the one of step 10: one of them says so while it is given up, or to a head that is replaced."""
    rig = started(2)
    save(rig, 10)
    begin = rig.replace_all("c", "d")
    if is_heard:
        rig.arrive(3, 3, 10)
        rig.restart()
    else:
        rig.tick(rig.at + 13, 4, **WAITS)
        rig.arrive(3, 3, 10, edition=0)
    assert (rig.r.members, rig.m.has_state(3)) == (begin, not is_heard)
    for step in (8, 20):
        rig.put(ev.CheckpointFound(at=rig.at, checkpoint=Checkpoint(path=f"/1-{step}", generation=1, step=step)))
    assert usable(rig) == ([10, 8] if is_heard else [10])


def test_one_that_turns_up_after_a_start_that_was_lost_is_set_aside_if_it_may_be_newer() -> None:
    """The start began with the checkpoint of step 10, and all its members ended before any of them said so."""
    rig = started(2)
    save(rig, 10)
    for n in rig.replace_all("c", "d"):
        rig.gone(n, reason="its job is over")
    assert (rig.r.root.status, rig.r.root.change) == (RunStatus.SUSPENDED, None)
    rig.restart()
    rig.put(ev.CheckpointFound(at=rig.at, checkpoint=Checkpoint(path="/1-20", generation=1, step=20)))
    assert usable(rig) == [10]


# -- going back --------------------------------------------------------------------------------------------------------


@notices("a checkpoint of a history that was left is loaded")
def test_going_back_drops_what_members_hold_and_what_was_saved_since() -> None:
    rig = started(2)
    for step in (10, 20):
        save(rig, step)
    rig.say(1, step=25)
    rig.put(ev.Rollback(at=rig.at, step=10))
    plan = rig.orders[1].plan
    assert plan is not None
    assert (plan.checkpoints, rig.orders[1].state_since) == (("/1-10",), 2)
    assert rig.ballot.change.kind is ChangeKind.START
    rig.restart(1, 2)
    generation = rig.ballot.change.generation
    assert rig.orders[1].state_since == generation, "another head has not forgotten it"
    save(rig, 26)
    assert (usable(rig), rig.r.front) == ([10], 10), "what is said meanwhile is of what is dropped"
    rig.change(10)
    save(rig, 27)
    save(rig, 15, generation=generation)
    assert usable(rig) == [15, 10]
    assert [(back.generation, back.from_step, back.to_step) for back in rig.r.history.rollbacks] == [(2, 25, 10)]


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_member_that_dies_on_the_way_back_does_not_undo_it(is_committed: bool) -> None:
    rig = started(2)
    save(rig, 10)
    rig.put(ev.Rollback(at=rig.at, step=10))
    if is_committed:
        rig.vote()
    rig.gone(2, signal=9)
    assert (rig.ballot.members, rig.orders[1].state_since) == ([1], rig.ballot.change.generation)
    rig.change(10)
    n = rig.join("c")
    assert rig.orders[1].state_since < rig.ballot.change.generation, "later changes are ordinary ones"
    rig.change(11)
    assert rig.completed[-1].members == ["n0", f"n{n - 1}"]


def test_a_node_that_thaws_behind_it_does_not_move_the_run_on() -> None:
    rig = started(3)
    save(rig, 10)
    for n in (1, 2, 3):
        rig.say(n, step=25)
    rig.tick(rig.at + 13, 1, 3, **WAITS)
    rig.change(25)
    rig.put(ev.Rollback(at=rig.at, step=10))
    rig.change(10)
    rig.say(2)
    assert (rig.completed[-1].first_step, rig.r.front) == (10, 10)


def test_who_comes_and_goes_meanwhile_is_not_mixed_up_with_it() -> None:
    """A state that is to be dropped is handed over to nobody: all begin together."""
    rig = started(2)
    save(rig, 10)
    rig.join("c")
    rig.release(1, reason="walltime")
    rig.put(ev.Rollback(at=rig.at, step=10))
    assert (rig.ballot.members, rig.ballot.change.leavers) == ([2, 3], [1])
    assert not rig.ballot.change.interrupt, "a script may have no way back from inside of a step"
    rig.change(10)
    assert (rig.completed[-1].members, rig.m.ballot) == (["n1", "n2"], None)


def test_going_back_further_while_all_go_back_already() -> None:
    rig = started(1)
    for step in (10, 20):
        save(rig, step)
    rig.put(ev.Rollback(at=rig.at, step=20))
    rig.vote()
    rig.put(ev.Rollback(at=rig.at, step=10))
    rig.switch(20)
    assert (rig.ballot.change.generation, rig.ballot.delta_plan.checkpoints) == (3, ("/1-10",))
    rig.change(10)
    assert [back.to_step for back in rig.r.history.rollbacks] == [20, 10]
    assert (rig.m.phase, rig.r.root.rollback_below) == (RunPhase.STEADY, 0)


def test_a_number_that_only_a_checkpoint_knows_is_not_used_again() -> None:
    """The store has lost the generation that wrote it."""
    rig = started(1)
    rig.join("b")
    assert rig.ballot.change.generation == 2
    rig.put(ev.CheckpointFound(at=rig.at, checkpoint=Checkpoint(path="/5-30", generation=5, step=30)))
    assert rig.ballot.change.generation == 6
