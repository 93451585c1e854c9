"""Scripts and hosts that fail, played by hand: whose failure it is, what follows, how a run ends."""

from __future__ import annotations

import msgspec
import pytest

from fallow.core.nodes import events as ev
from fallow.core.nodes.messages import Finish, Outcome
from fallow.core.nodes.state import RunPhase
from fallow.model import RunStatus
from world.rig import Rig, both, logs, orders, started


def test_the_same_exception_on_two_nodes_ends_the_run_another_one_is_the_nodes_own() -> None:
    rig = started(3)
    rig.fails(2)
    assert rig.m.phase is RunPhase.REBUILDING, "nobody waits for the process to end"
    rig.fails(1)
    assert rig.r.root.status is RunStatus.FAILED
    assert "on n1 (h2) and again on n0 (h1)" in rig.r.root.message
    rig = started(3)
    rig.fails(2)
    rig.change(5)
    rig.fails(3, step=6)
    assert not rig.r.root.status.ended
    rig.change(5)
    rig.fails(1, step=9)
    assert "the only member" in rig.r.root.message


def test_a_host_with_three_failures_is_barred_and_kills_from_outside_count_for_nothing() -> None:
    rig = started(1)
    for i in range(3):
        assert not rig.r.failures.bars
        n = rig.join("bad", token=f"t{i}")
        rig.change(7 + i)
        rig.fails(n, step=7 + i, signature=f"E{i}")
        rig.change(7 + i)
    assert "3 failures" in rig.r.failures.bars["bad"].reason
    rig = started(4)
    for n in (2, 3, 4):
        rig.gone(n, signal=9)
        rig.change()
    assert not rig.r.failures.failures


def test_crash_of_the_only_member_is_tried_again_and_ends_the_run_when_it_comes_again() -> None:
    rig = started(1)
    rig.say(1, step=7)
    rig.gone(1, signal=11)
    assert rig.r.root.status is RunStatus.SUSPENDED
    rig.join("b")
    rig.change(7)
    rig.gone(2, signal=11)
    assert rig.r.root.status is RunStatus.FAILED


def test_a_script_that_never_reaches_the_loop_or_deserts_it_fails_the_run() -> None:
    rig = Rig()
    rig.put(ev.Expected(at=0, host="a", token="a", boot=1, slots=1, entry="a"))
    rig.gone(1, code=0)
    assert rig.r.root.status is RunStatus.FAILED
    assert "run.updates()" in rig.r.root.message
    rig = started(2)
    rig.gone(2, code=0)
    assert "inside of the run.updates loop" in rig.r.root.message


def test_a_script_that_never_begins_is_told_what_to_write() -> None:
    rig = Rig()
    rig.expect("a")
    last = "ValueError: Error initializing torch.distributed using env:// rendezvous: variable RANK expected"
    rig.gone(1, code=1, reason=f"exited with 1 ({last})")
    assert rig.r.root.status is RunStatus.FAILED
    assert f"{last}); write fallow.init() in the place of torch.distributed's init_process_group" in rig.r.root.message


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


def test_the_end_the_main_members_exit_code_decides() -> None:
    rig = started(2)
    rig.finish(1)
    rig.finish(2)
    rig.gone(2, code=3)
    assert not rig.r.root.status.ended
    rig.gone(1, code=0)
    assert (rig.r.root.status, rig.r.root.message) == (RunStatus.FINISHED, "")
    rig = started(2)
    rig.finish(1)
    rig.gone(1, code=3)
    assert rig.r.root.status is RunStatus.FAILED
    rig = started(2)
    turn = rig.finish(2)
    assert orders(turn)[1].finish is not None, "whoever waits in vain hears of it"
    rig.gone(1, signal=9)
    assert "ended after the training, before its script had" in rig.r.root.message
    rig = started(2)
    rig.finish(1)
    rig.finish(2)
    rig.tick(12, 1, 2)
    assert rig.r.root.status is RunStatus.FINISHED
    assert "is not known" in rig.r.root.message


def test_the_last_words_come_with_the_news_of_the_end() -> None:
    rig = started(1)
    last = msgspec.structs.replace(rig.said[1], seq=99, finish=Finish(generation=1, steps=9, digest="d"))
    rig.gone(1, code=0, report=last)
    assert rig.r.root.status is RunStatus.FINISHED


@pytest.mark.parametrize("how", ["signal", "lost", "hangs"])
def test_an_exit_code_that_nobody_can_tell_does_not_undo_the_training(how: str) -> None:
    rig = started(2)
    rig.finish(1)
    rig.finish(2)
    if how == "hangs":
        rig.tick(11, 1, 2)
    else:
        rig.gone(1, signal=9 if how == "signal" else None)
    assert rig.r.root.status is RunStatus.FINISHED
    assert rig.r.root.message.startswith("the exit code of the main member n0 (h1) is not known: ")


def test_members_with_unlike_final_states_are_told_of() -> None:
    rig = started(2)
    rig.finish(1)
    turn = rig.finish(2, "other")
    assert "members disagree on the final state: n1 (h2) has other" in logs(turn, "diverged")[0]
    rig.gone(1, code=0)
    assert (rig.r.root.status, rig.r.root.message) == (RunStatus.FINISHED, rig.r.root.diverged)


def test_healed_weights_and_a_ledger_that_cannot_be_written_are_told_once() -> None:
    rig = started(1)
    turn = both(rig.say(1, healed=7, unrecorded=8), rig.say(1))
    assert len(logs(turn, "healed")) == len(logs(turn, "ledger")) == 1
    assert rig.r.nodes[1].unrecorded == 8
    assert "writes down again" in logs(rig.say(1, unrecorded=None), "ledger")[0]
