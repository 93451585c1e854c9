"""Nodes that fail, desert, fall silent or are barred: whose failure it is, what follows, and what people are told."""

from __future__ import annotations

import msgspec
import pytest

from fallow.core.nodes import events as ev
from fallow.core.nodes.messages import Checkpoint, Finish, Outcome, Pause, Problem, Refusal, Switch
from fallow.core.nodes.state import RunPhase
from fallow.model import ChangeKind, Doing, Exit, MemberPhase, RunStatus
from world.rig import CONTRACT, Rig, both, logs, orders, started

WAITS = {"doing": Doing.WAITING, "stalled_s": 20.0}


def finish(rig: Rig, n: int, digest: str = "d") -> ev.Turn:
    return rig.say(n, finish=Finish(generation=rig.r.root.generation, steps=9, digest=digest, agreed=3, answer=0.5))


# -- survivors and the state -------------------------------------------------------------------------------------------


def test_a_newcomer_whose_state_was_on_its_way_is_absorbed_again_when_the_survivors_train() -> None:
    """Survivors may stand inside a step, where nobody can receive their state."""
    rig = started(2)
    rig.join("c")
    rig.vote()
    for n in (1, 2):
        rig.arrive(n, 2, 4)
    told = orders(rig.gone(2, signal=9))
    assert (told[1].broken, told[3].broken, told[3].plan) == (2, 2, None)
    assert rig.ballot.members == [1]
    rig.change(5)
    assert rig.r.nodes[3].phase is MemberPhase.READY
    assert (rig.m.phase, rig.ballot.members, rig.ballot.change.interrupt) == (RunPhase.PREPARING, [1, 3], False)
    rig.change(6)
    assert rig.r.members == [1, 3]


def test_where_votes_show_that_some_have_lost_the_state_those_who_have_it_go_on() -> None:
    rig = started(3)
    rig.gone(3, signal=9)
    rig.say(1, prepared=2, given_up=1)
    rig.say(2, prepared=2, given_up=1, has_state=False)
    assert (rig.r.root.generation, rig.ballot.change.generation, rig.ballot.members) == (1, 3, [1])


def test_where_nobody_has_the_state_all_begin_together_from_the_checkpoint() -> None:
    rig = Rig(minimum=3)
    for host in "abc":
        rig.join(host)
    rig.vote()
    rig.gone(1, signal=9)
    assert (rig.ballot.members, rig.ballot.change.interrupt) == ([2, 3], True)


def test_a_survivor_that_is_asked_to_leave_while_others_go_on_without_it_is_let_go() -> None:
    rig = started(2)
    rig.join("c")
    rig.vote()
    rig.arrive(1, 2)
    rig.arrive(2, 2)
    rig.gone(2, signal=9)
    rig.release(3, reason="walltime")
    rig.vote()
    assert (rig.r.nodes[3].phase, rig.m.order(3).end) == (MemberPhase.GONE, rig.orders[3].end)
    assert rig.m.order(3).end is not None and rig.m.order(3).end.code == Exit.OK


# -- silence -----------------------------------------------------------------------------------------------------------


def test_a_silent_member_is_given_up_only_when_a_member_that_is_heard_waits_for_it() -> None:
    rig = started(3)
    rig.tick(30, 1, 3)
    assert rig.r.nodes[2].phase is MemberPhase.MEMBER, "it may be in a long step"
    rig.tick(34, 1, 3, **WAITS)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT


def test_no_planned_change_is_begun_while_a_member_is_not_heard() -> None:
    rig = started(2)
    rig.tick(12, 1)
    rig.join("c")
    assert rig.m.phase is RunPhase.STEADY
    assert rig.m.waiting() == "n2 (c) cannot begin before n1 (h2) is heard, or is certain to have ended"
    rig.say(2)
    rig.tick(13, 1, 3)
    assert rig.m.phase is RunPhase.PREPARING


def test_where_no_member_is_heard_no_standby_begins_before_their_end_is_certain() -> None:
    rig = started(2)
    rig.r.root.limit = 2
    rig.join("c")
    rig.gone(1, signal=9)
    rig.tick(40, 3)
    assert (rig.m.phase, rig.ballot.members, rig.r.root.generation) == (RunPhase.REBUILDING, [2], 1)
    assert rig.m.waiting() == "n2 (c) cannot begin before n1 (h2) is heard, or is certain to have ended"
    rig.gone(2, reason="its job is over")
    assert (rig.m.phase, rig.ballot.members) == (RunPhase.PREPARING, [3])


def test_after_an_absence_of_the_head_connections_have_time_to_come_back() -> None:
    rig = started(3)
    rig.tick(20)
    waits = {"doing": Doing.WAITING, "stalled_s": 6.0}
    rig.tick(45, 1, 3, **waits)
    assert rig.r.nodes[2].phase is MemberPhase.MEMBER
    rig.tick(55, 1, 3, **waits)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT


def test_old_news_of_a_stopped_process_counts_for_nothing() -> None:
    rig = started(2)
    rig.say(2, stopped_s=1.6)
    rig.at = 20.0
    rig.put(ev.Ticked(at=20.0))
    assert rig.r.nodes[2].phase is MemberPhase.MEMBER


def test_a_report_that_lay_unread_while_the_head_stood_still_is_old_news() -> None:
    rig = started(2)
    rig.tick(1, 1)
    rig.at = 20.0
    rig.say(2, stopped_s=9.1)
    rig.put(ev.Ticked(at=20.0))
    assert rig.r.nodes[2].phase is MemberPhase.MEMBER


def test_a_head_that_comes_back_decides_nothing_before_it_has_heard_all_or_time_is_up() -> None:
    rig = started(2)
    rig.join("c")
    rig.restart(1, 3)
    assert rig.m.phase is RunPhase.LISTENING
    rig.tick(rig.at + 3, 1, 3)
    assert rig.m.phase is not RunPhase.LISTENING


# -- deserters, faults, outcomes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rebuilding", [False, True])
@pytest.mark.parametrize("code", [0, 3, None])
def test_a_deserter_is_waited_for_until_its_exit_code_tells_whether_it_is_to_blame(
    rebuilding: bool, code: int | None
) -> None:
    rig = started(3)
    if not rebuilding:
        rig.say(2, deserted=True)
    rig.say(1, given_up=1)
    rig.tick(1, 1, 2, 3)
    if rebuilding:
        assert rig.ballot.members == [1, 2, 3]
        told = orders(rig.say(2, deserted=True))
        assert [order.plan for order in told.values()] == [None] * 3
    rig.tick(9, 1, 2, 3)
    assert rig.m.state.ballot is None
    if code is None:
        rig.tick(13, 1, 2, 3)
    else:
        rig.gone(2, code=code)
    if code == 3:
        assert rig.ballot.members == [1, 3], "one node's failure"
    else:
        assert rig.r.root.status is RunStatus.FAILED
        assert "inside of the run.updates loop while the others go on" in rig.r.root.message


def test_members_that_go_on_hear_what_a_failed_one_knew_of_their_last_exchange() -> None:
    rig = started(3)
    known = Outcome(generation=1, agreed=3, answer=0.5)
    rig.fails(1, outcome=known)
    rig.fails(3, signature="other", outcome=Outcome(generation=1, agreed=2, answer=0.0))
    plan = rig.m.order(2).plan
    assert plan is not None and plan.outcome == known


def test_an_exit_that_an_order_asked_for_is_no_failure_though_the_store_forgot_the_order() -> None:
    rig = started(2)
    rig.gone(2, code=0, is_ordered=True, reason="asked")
    assert (rig.r.root.status, rig.ballot.members) == (RunStatus.TRAINING, [1])


def test_node_fail_bars_its_host_at_once_and_an_hour_later_it_may_be_tried_again() -> None:
    rig = started(2)
    turn = rig.gone(2, node_failed=True, reason="n7 is down")
    assert ev.Barred("h2", "n7 is down") in turn.then
    turn = rig.tick(3601, 1)
    assert logs(turn, "bar") == ["h2 is barred no longer: it may be tried again"]


def test_a_host_that_nobody_wants_is_barred_and_its_nodes_leave() -> None:
    rig = started(3)
    rig.want(ev.Bar, host="h2", reason="slow link")
    rig.change()
    assert (rig.r.members, rig.r.failures.bars["h2"].reason) == ([1, 3], "slow link")
    rig.put(ev.Unbar(at=0, hosts=("h2",)))
    assert not rig.r.failures.bars


def test_a_script_that_never_begins_is_told_what_to_write() -> None:
    rig = Rig()
    rig.expect("a")
    last = "ValueError: Error initializing torch.distributed using env:// rendezvous: variable RANK expected"
    rig.gone(1, code=1, reason=f"exited with 1 ({last})")
    assert rig.r.root.status is RunStatus.FAILED
    assert f"{last}); write fallow.init() in the place of torch.distributed's init_process_group" in rig.r.root.message


def test_members_that_wait_in_different_places_of_the_script_end_the_run() -> None:
    rig = started(2)
    while not rig.r.root.status.ended:
        rig.at += 1
        assert rig.at < 100
        rig.say(1, doing=Doing.WAITING, stalled_s=rig.at, in_call=True)
        rig.say(2, doing=Doing.WAITING, stalled_s=rig.at)
        rig.put(ev.Ticked(at=rig.at))
        if rig.m.phase is RunPhase.PROBING:
            rig.vote()
    assert rig.r.root.message == (
        "step 0: the members have waited for each other for 41 s in different places of the script: n0 (h1) in "
        "run.mean or run.barrier, the others not"
    )


def test_who_is_cut_off_is_told_with_the_address_that_was_tried() -> None:
    rig = started(2)
    rig.join("c")
    turn = rig.say(1, refusal=Refusal(generation=2, reason="cut", unreachable=(3,), tried=("10.0.0.3:7001",)))
    turn = both(turn, rig.say(2, prepared=2))
    assert logs(turn, "eject") == ["n2 (c) is gone: no connection between it and n0 (h1), tried 10.0.0.3:7001"]


# -- what people see ---------------------------------------------------------------------------------------------------


def test_one_node_shows_its_output_the_oldest_at_first_and_then_the_first_member() -> None:
    rig = Rig(minimum=2)
    for host in "ab":
        rig.expect(host)
    assert [rig.m.order(n).is_main for n in (1, 2)] == [True, False]
    turn = rig.gone(1, signal=9)
    assert orders(turn)[2].is_main, "it hears of it"
    rig = started(3)
    turn = rig.gone(1, signal=9)
    rig.change()
    assert [n for n in rig.r.members if rig.orders[n].is_main] == [2]


def test_the_pause_is_told_in_parts_of_the_node_that_stood_still_the_longest() -> None:
    rig = started(1)
    rig.join("b")
    rig.vote()
    for n, pause_s in ((1, 0.5), (2, 0.0)):
        parts = Pause(drain=pause_s / 2, state=pause_s / 2)
        switch = Switch(generation=2, first_step=3, pause_s=pause_s, parts=parts, bytes_in_pause=10, bytes_behind=5)
        rig.arrive(n, 2, 3, switch=switch)
    done = rig.r.history.completed[-1]
    assert (done.kind, done.members, done.joined, done.left) == (ChangeKind.ABSORB, 2, [2], [])
    assert (done.first_step, done.pause_s, done.parts) == (3, 0.5, Pause(drain=0.25, state=0.25))
    assert (done.bytes_in_pause, done.bytes_behind) == (20, 10)


def test_what_has_changed_is_told_of_generations_that_became_complete() -> None:
    """A generation that broke before is no news by itself: who came and went with it is told with the next one."""
    rig = started(2)
    rig.join("c")
    rig.vote()
    for n in (1, 3):
        rig.arrive(n, 2)
    assert rig.m.phase is RunPhase.SWITCHING
    turn = rig.gone(2, signal=9)
    turn = both(turn, rig.vote())
    for n in rig.r.members:
        turn = both(turn, rig.arrive(n, rig.r.root.generation))
    done = rig.r.history.completed[-1]
    assert (done.kind, done.joined, done.left) == (ChangeKind.EJECT, [3], [2])
    (data,) = [i.data for i in turn.then if isinstance(i, ev.Log) and i.kind == "eject" and "joined" in i.data]
    assert (data["joined"], data["left"]) == ({"n2": "c"}, ["n1"])


def test_what_a_ledger_lacks_is_known_of_a_node_that_is_forgotten() -> None:
    rig = started(2)
    rig.say(2, unrecorded=8)
    rig.put(ev.Release(at=0, nodes=(2,), reason="asked"))
    rig.tick(1, 1, 2)
    rig.change()
    rig.gone(2, code=0)
    assert 2 not in rig.r.nodes
    assert rig.r.root.unrecorded == {2: 8}


def test_healed_weights_and_a_ledger_that_cannot_be_written_are_told_once() -> None:
    rig = started(1)
    turn = both(rig.say(1, healed=7, unrecorded=8), rig.say(1))
    assert len(logs(turn, "healed")) == len(logs(turn, "ledger")) == 1
    assert rig.r.nodes[1].unrecorded == 8
    assert "writes down again" in logs(rig.say(1, unrecorded=None), "ledger")[0]


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


def test_newcomers_to_a_script_that_restarts_are_told_how_long_they_wait() -> None:
    rig = Rig()
    rig.contract = msgspec.structs.replace(CONTRACT, restarts=True)
    rig.join("a")
    rig.change()
    rig.tick(60, 1)
    rig.join("b")
    assert rig.m.waiting().startswith("n1 (b) waits for another 4 min: a newcomer restarts the script everywhere")


@pytest.mark.parametrize("how", ["signal", "lost", "hangs"])
def test_an_exit_code_that_nobody_can_tell_does_not_undo_the_training(how: str) -> None:
    rig = started(2)
    finish(rig, 1)
    finish(rig, 2)
    if how == "hangs":
        rig.tick(11, 1, 2)
    else:
        rig.gone(1, signal=9 if how == "signal" else None)
    assert rig.r.root.status is RunStatus.FINISHED
    assert rig.r.root.message.startswith("the exit code of the main member n0 (h1) is not known: ")


def test_members_with_unlike_final_states_are_told_of() -> None:
    rig = started(2)
    finish(rig, 1)
    turn = finish(rig, 2, "other")
    assert "members disagree on the final state: n1 (h2) has other" in logs(turn, "diverged")[0]
    rig.gone(1, code=0)
    assert (rig.r.root.status, rig.r.root.message) == (RunStatus.FINISHED, rig.r.root.diverged)


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
