"""Checkpoints, played by hand: which are kept and used, and how a run goes back to one."""

from __future__ import annotations

import msgspec

from fallow.core.nodes import events as ev
from fallow.core.nodes.messages import Checkpoint, Problem
from fallow.model import RunStatus
from world.rig import both, logs, orders, started


def test_a_checkpoint_is_noted_once_and_its_node_hears_of_it() -> None:
    rig = started(1)
    saved = Checkpoint(path="/c", generation=1, step=5, nbytes=9)
    turn = rig.say(1, saved=saved)
    assert (orders(turn)[1].noted, logs(turn, "checkpoint")) == ("/c", ["checkpoint of step 5"])
    for step in (6, 7):
        turn = both(turn, rig.say(1, saved=msgspec.structs.replace(saved, path=f"/c{step}", step=step)))
    assert [i.path for i in turn.then if isinstance(i, ev.RemoveCheckpoint)] == ["/c"]
    assert not rig.say(1).then


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


def test_rollback_and_a_head_that_comes_back_in_the_middle_of_it() -> None:
    rig = started(2)
    for step in (4, 8):
        rig.say(1, step=step, saved=Checkpoint(path=f"/{step}", generation=1, step=step))
        rig.say(2, step=step)
    rig.put(ev.Rollback(at=0, step=4))
    assert rig.ballot is not None
    assert rig.m.order(1).state_since == rig.ballot.change.generation
    assert rig.ballot.plans.delta.checkpoints == ("/4",)
    rig.restart(1, 2)
    assert rig.m.order(1).state_since == rig.ballot.change.generation, "it is not forgotten"
    rig.change(4)
    assert rig.r.root.rollback_below == 0
    rig.say(1, saved=Checkpoint(path="/late", generation=1, step=8))
    assert [s.aside for s in rig.r.checkpoints.saved if s.checkpoint.path == "/late"] == [True]


def test_a_rollback_takes_all_back_even_where_the_next_generation_comes_after_a_suspension() -> None:
    rig = started(1)
    for step in (4, 8):
        rig.say(1, step=step, saved=Checkpoint(path=f"/{step}", generation=1, step=step))
    rig.gone(1, signal=9)
    turn = rig.put(ev.Rollback(at=0, step=4))
    assert logs(turn, "rollback") == ["rolled back to step 4, from step 8"]
    n = rig.join("b")
    plan = rig.m.order(n).plan
    assert plan is not None and (plan.checkpoints, rig.m.order(n).state_since) == (("/4",), plan.generation)
    rig.change(4)
    assert rig.r.root.rollback_below == 0
    assert [(back.from_step, back.to_step) for back in rig.r.history.rollbacks] == [(8, 4)]
