"""Scripts and hosts that fail, played by hand: whose failure it is, what follows, how a run ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Outcome
from fallow.core.training.apart import APART, STRANGER
from fallow.model import Exit, RunStatus
from world.rig import Rig, both, logs, orders, started


def test_crash_of_the_only_member_is_tried_again_and_ends_the_run_when_it_comes_again() -> None:
    rig = started(1)
    rig.say(1, step=7)
    rig.gone(1, signal=11)
    assert rig.r.root.status is RunStatus.SUSPENDED
    rig.join("b")
    rig.change(7)
    rig.gone(2, signal=11)
    assert rig.r.root.status is RunStatus.FAILED


NO_RANK = "ValueError: Error initializing torch.distributed using env:// rendezvous: variable RANK expected"


def test_h6_a_script_that_never_reaches_the_loop_or_deserts_it_fails_the_run() -> None:
    ended = []
    for how in ({"code": 0}, {"code": 1, "reason": f"exited with 1 ({NO_RANK})", "tail": "line 2"}):
        rig = Rig()
        rig.expect("a")
        rig.gone(1, **how)
        assert rig.r.root.status is RunStatus.FAILED
        ended.append(rig.r.root.message)
    assert "run.updates()" in ended[0]
    assert f"{NO_RANK}); write fallow.init() in the place of torch.distributed's init_process_group" in ended[1]
    assert rig.r.root.traceback == "line 2"
    rig = started(2)
    rig.gone(2, code=0)
    assert "inside of the run.updates loop" in rig.r.root.message


@pytest.mark.parametrize("how", [{"taken": True}, {"signal": 15}, {"taken": True, "node_failed": True}])
def test_a_node_that_slurm_takes_while_its_script_starts_fails_no_run(how: dict[str, Any]) -> None:
    rig = Rig()
    rig.expect("a")
    turn = rig.gone(1, reason="Slurm has requeued its job", **how)
    assert logs(turn, "eject") == ["n0 (a) is gone: Slurm has requeued its job"]
    assert rig.r.root.status is RunStatus.WAITING
    rig.gone(rig.expect("b"), signal=9)
    assert rig.r.root.status is RunStatus.FAILED


@pytest.mark.parametrize("code", [0, 3, None])
def test_a_deserter_is_waited_for_until_its_exit_code_tells_whether_it_is_to_blame(code: int | None) -> None:
    rig = started(3)
    rig.say(1, given_up=1)
    rig.tick(1, 1, 2, 3)
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


def test_a_host_that_slurm_or_a_user_calls_bad_is_barred_at_once_and_one_whose_processes_are_killed_is_not() -> None:
    rig = started(4)
    for _ in range(3):
        rig.gone(rig.join("h5"), signal=9)
    assert not rig.r.failures.failures
    assert ev.Barred("h2") in rig.gone(2, node_failed=True, reason="n7 is down").then
    rig.change()
    rig.want(ev.Bar, host="h3", reason="slow link")
    rig.change()
    assert (rig.r.members, rig.r.failures.bars["h3"].reason) == ([1, 4], "slow link")
    rig.put(ev.Unbar(at=0, hosts=("h2", "h3")))
    assert not rig.r.failures.bars


# -- whose failure it is -----------------------------------------------------------------------------------------------


def test_the_same_exception_in_one_place_again_and_again_ends_no_run_in_which_others_go_on() -> None:
    """An agent starts its workers anew, and they fail as those before."""
    rig = Rig(minimum=2)
    for host in "ab":
        rig.join(host)
    rig.change(5)
    for _ in range(2):
        rig.fails(rig.r.members[1], step=6)
        rig.change(5)
        assert not rig.r.root.status.ended
        rig.join("b")
        rig.change(5)
    rig.fails(1, step=6)
    assert rig.r.root.message == "ValueError: bad (step 6, on n1 (b) and again on n0 (a))"
    assert rig.r.root.traceback == "Traceback"


@pytest.mark.parametrize("hosts", ["aa", "bc"])
def test_newcomers_that_raise_do_not_end_the_run_of_those_who_compute(hosts: str) -> None:
    """On the only host there is, or on one after the other: their files may have changed since the others began."""
    rig = Rig()
    rig.join("a")
    rig.change(7)
    for number, host in enumerate(hosts):
        n = rig.join(host, token=f"t{number}")
        rig.vote()
        rig.fails(n, step=0)
        assert not rig.r.root.status.ended
        rig.change(7)
    assert rig.r.members == [1]


def test_newcomers_that_do_not_follow_the_members_do_not_end_the_run() -> None:
    """Two at once, on two nodes, in a step that is the members' next one, too."""
    rig = started(3)
    for n in (2, 3):
        rig.fails(n, signature=f"{STRANGER}rank 1 cuts a step into 4 shards")
    assert not rig.r.root.status.ended
    rig.change(5)
    assert rig.r.members == [1]


def test_members_that_do_not_follow_the_script_together_end_the_run_at_once() -> None:
    rig = started(3)
    rig.fails(2, signature=f"{APART}1 of 3 members left the loop")
    assert rig.r.root.message == "ValueError: bad (step 5, found by n1 (h2))"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.sampled_from(["x", "y"])), max_size=12))
def test_only_what_happened_alike_on_two_nodes_or_to_the_last_member_fails_a_run(
    history: list[tuple[int, int, str]],
) -> None:
    rig = started(5)
    seen: dict[tuple[int, str], set[int]] = {}
    for n, least, signature in history:
        if not rig.r.alive(n):
            continue
        step, is_last = max(least, rig.r.nodes[n].step), rig.r.present() == [n]
        rig.fails(n, step, signature)
        expected = is_last or bool(seen.get((step, signature)))
        assert (rig.r.root.status is RunStatus.FAILED) is expected
        if expected:
            return
        seen.setdefault((step, signature), set()).add(n)
        rig.change(0)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_n3_a_run_ends_when_all_members_have_finished_and_lets_the_others_go() -> None:
    """The main member's exit code decides how, and no other's."""
    rig = started(2)
    rig.limit(2)
    rig.join("c")
    assert orders(rig.finish(2))[1].finish is not None, "whoever waits in vain hears of it"
    rig.finish(1)
    rig.gone(2, code=3)
    assert not rig.r.root.status.ended
    turn = rig.gone(1, code=0)
    assert ev.RunEnded(RunStatus.FINISHED, "") in turn.then
    end = orders(turn)[3].end
    assert end is not None
    assert (end.code, list(orders(turn))) == (Exit.OK, [3])
    rig = started(2)
    rig.finish(1)
    rig.gone(1, code=3)
    assert rig.r.root.status is RunStatus.FAILED


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_what_the_main_member_had_to_do_behind_the_loop_is_done_by_nobody_else(first: bool, killed: bool) -> None:
    rig = started(3)
    if not first:
        rig.finish(2)
    if killed:
        rig.gone(1, signal=9)
    else:
        rig.fails(1, step=9)
    if first:
        assert not rig.r.root.status.ended, "it might be between two loops"
        rig.finish(2)
    why = "killed by signal 9" if killed else "ValueError: bad"
    text = f"the main member n0 (h1) ended after the training, before its script had: {why}"
    assert (rig.r.root.status, rig.r.root.message) == (RunStatus.FAILED, text)
    assert rig.r.root.traceback == ("" if killed else "Traceback")
