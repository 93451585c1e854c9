"""Scripts and hosts that fail, played by hand: whose failure it is, what follows, how a run ends."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fallow.core.membership import events as ev
from fallow.core.membership.failures import DIVERGENCE, STRANGER
from fallow.core.membership.messages import Finish, Outcome
from fallow.core.membership.state import RunPhase
from fallow.model import Exit, MemberPhase, RunStatus
from world.rig import WAITS, Rig, logs, notices, orders, started


@notices("a failed script is not noticed")
def test_the_same_exception_on_two_nodes_ends_the_run() -> None:
    rig = started(3)
    rig.fails(2)
    assert rig.m.phase is RunPhase.REBUILDING, "nobody waits for the process to end"
    rig.fails(1)
    assert rig.r.root.status is RunStatus.FAILED
    assert "on n1 (h2) and again on n0 (h1)" in rig.r.root.message


def test_crash_of_the_only_member_is_tried_again_and_ends_the_run_when_it_comes_again() -> None:
    rig = started(1)
    rig.say(1, step=7)
    rig.gone(1, signal=11)
    assert rig.r.root.status is RunStatus.SUSPENDED
    rig.join("b")
    rig.change(7)
    rig.gone(2, signal=11)
    assert rig.r.root.status is RunStatus.FAILED


def test_h6_a_script_that_never_reaches_the_loop_or_deserts_it_fails_the_run() -> None:
    rig = Rig()
    rig.put(ev.Expected(at=0, host="a", token="a", boot=1, slots=1, entry="a"))
    rig.gone(1, code=0)
    assert rig.r.root.status is RunStatus.FAILED
    assert "run.updates()" in rig.r.root.message
    rig = started(2)
    rig.gone(2, code=0)
    assert "inside of the run.updates loop" in rig.r.root.message
    rig = started(1)
    rig.gone(1, code=0, reason="worker n0.1 exited with 0")  # the node's other worker was still in the loop
    assert "on every member" not in rig.r.root.message
    assert rig.r.root.message.startswith("the script ended inside of the run.updates loop, which all workers have to")
    assert rig.r.root.message.endswith(": n0 (h1) is gone: worker n0.1 exited with 0")


@pytest.mark.parametrize("how", [{"by_slurm": True}, {"signal": 15}, {"by_slurm": True, "node_failed": True}])
def test_a_node_that_slurm_takes_while_its_script_starts_fails_no_run(how: dict[str, Any]) -> None:
    rig = Rig()
    rig.expect("a")
    turn = rig.gone(1, reason="Slurm has requeued its job", **how)
    assert logs(turn, "eject") == ["n0 (a) is gone: Slurm has requeued its job"]
    assert rig.r.root.status is RunStatus.WAITING
    rig.gone(rig.expect("b"), signal=9)
    assert rig.r.root.status is RunStatus.FAILED


def test_a_script_that_never_begins_is_told_what_to_write() -> None:
    rig = Rig()
    rig.expect("a")
    last = "ValueError: Error initializing torch.distributed using env:// rendezvous: variable RANK expected"
    rig.gone(1, code=1, reason=f"exited with 1 ({last})")
    assert rig.r.root.status is RunStatus.FAILED
    assert f"{last}); write fallow.init() in the place of torch.distributed's init_process_group" in rig.r.root.message


@notices("a deserter is not waited for", True, 3)
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
    assert rig.m.ballot is None
    if code is None:
        rig.tick(13, 1, 2, 3)
    else:
        rig.gone(2, code=code)
    if code == 3:
        assert rig.ballot.members == [1, 3], "one node's failure"
    else:
        assert rig.r.root.status is RunStatus.FAILED
        assert "inside of the run.updates loop while the others go on" in rig.r.root.message


def test_a_run_that_two_deserters_end_ends_once() -> None:
    rig = started(3)
    for n in (2, 3):
        rig.say(n, deserted=True)
    turn = rig.tick(12, 1, 2, 3)
    assert len([i for i in turn if isinstance(i, ev.RunEnded)]) == 1


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
    assert ev.Barred("h2") in turn
    turn = rig.tick(3601, 1)
    assert logs(turn, "bar") == ["h2 is barred no longer: it may be tried again"]


def test_a_host_that_nobody_wants_is_barred_and_its_nodes_leave() -> None:
    rig = started(3)
    rig.want(ev.Bar, host="h2", reason="slow link")
    rig.change()
    assert (rig.r.members, rig.r.failures.bars["h2"].reason) == ([1, 3], "slow link")
    rig.put(ev.Unbar(at=0, hosts=("h2",)))
    assert not rig.r.failures.bars


@notices("finished nodes are not counted")
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


def test_the_last_words_come_with_the_news_of_the_end() -> None:
    rig = started(1)
    last = msgspec.structs.replace(rig.said[1], seq=99, finish=Finish(generation=1, steps=9, digest="d"))
    rig.gone(1, code=0, report=last)
    assert rig.r.root.status is RunStatus.FINISHED


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("signal", "killed by signal 9"),
        ("lost", "its job is over"),
        ("hangs", "its process was still there 40 s after its script had ended"),
        ("hangs, and another head waits as long", "its process was still there 40 s after its script had ended"),
    ],
)
def test_an_exit_code_that_nobody_can_tell_does_not_undo_the_training(how: str, why: str) -> None:
    rig = started(2)
    rig.finish(1)
    rig.finish(2)
    rig.tick(39, 1, 2)
    if "another head" in how:
        rig.restart(1, 2)
    rig.tick(rig.at + (39 if "another head" in how else 0), 1, 2)
    assert not rig.r.root.status.ended, "its agent may be about to say"
    if "hangs" in how:
        rig.tick(rig.at + 3, 1, 2)
    else:
        rig.gone(1, signal=9 if how == "signal" else None, reason=why)
    assert rig.r.root.status is RunStatus.FINISHED
    assert rig.r.root.message == f"the exit code of the main member n0 (h1) is not known: {why}"


def test_the_silence_of_the_main_member_is_no_reason_for_the_end_of_a_training_that_another_one_has_finished() -> None:
    rig = started(2)
    for at in range(1, 14):
        rig.tick(at, 2, **WAITS)
    assert rig.r.nodes[1].phase is MemberPhase.SILENT
    rig.finish(2)
    rig.gone(2, code=0)
    why = "the exit code of the main member n0 (h1) is not known: silent for"
    assert (rig.r.root.status, rig.r.root.message.partition(" 1")[0]) == (RunStatus.FINISHED, why)


def test_members_with_unlike_final_states_are_told_of() -> None:
    rig = started(2)
    rig.finish(1)
    turn = rig.finish(2, "other")
    assert "members disagree on the final state: n1 (h2) has other" in logs(turn, "diverged")[0]
    rig.gone(1, code=0)
    assert (rig.r.root.status, rig.r.root.message) == (RunStatus.FINISHED, rig.r.root.diverged)


def test_healed_weights_and_a_ledger_that_cannot_be_written_are_told_once() -> None:
    rig = started(1)
    turn = rig.say(1, healed=7, unrecorded=8) + rig.say(1)
    assert len(logs(turn, "healed")) == len(logs(turn, "ledger")) == 1
    assert rig.r.nodes[1].unrecorded == 8
    assert "writes down again" in logs(rig.say(1, unrecorded=None), "ledger")[0]


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
    rig.fails(2, signature=f"{DIVERGENCE}1 of 3 members left the loop")
    assert rig.r.root.message == "ValueError: bad (step 5, found by n1 (h2))"


@pytest.mark.parametrize("is_scripted", [False, True])
def test_a_host_with_three_failures_is_barred_except_where_a_schedule_decides(is_scripted: bool) -> None:
    rig = started(1, scripted=is_scripted)
    turn = list[ev.Instruction]()
    for number in range(3):
        assert not rig.r.failures.bars
        rig.limit(2)
        n = rig.join("bad", token=f"t{number}")
        rig.change(number)
        turn = rig.fails(n, step=number, signature=f"E{number}")
        rig.change(number)
    barred = [i.host for i in turn if isinstance(i, ev.Barred)]
    assert (barred, list(rig.r.failures.bars)) == (([], []) if is_scripted else (["bad"], ["bad"]))


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
            assert (
                "the only member" if is_last and (step, signature) not in seen else "again on"
            ) in rig.r.root.message
            return
        seen.setdefault((step, signature), set()).add(n)
        rig.change(0)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_n3_a_run_ends_when_all_members_have_finished_and_lets_the_others_go() -> None:
    rig = started(2)
    rig.limit(2)
    rig.join("c")
    rig.finish(1)
    rig.finish(2)
    assert not rig.r.root.status.ended
    turn = rig.gone(1, code=0)
    assert ev.RunEnded(RunStatus.FINISHED, "") in turn
    assert (rig.end(3).code, list(orders(turn))) == (Exit.OK, [3])


def test_a_generation_whose_members_have_finished_before_they_were_heard_in_it_is_told_of() -> None:
    rig = started(1)
    rig.join("b")
    rig.vote()
    newest = rig.r.root.generation
    for n in (1, 2):
        rig.arrive(n, newest, 4, finish=Finish(generation=newest, steps=9, digest="d"))
    assert [done.first_step for done in rig.completed] == [0, 4]


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


def test_what_happens_behind_the_end_of_a_run_changes_nothing_and_all_hear_of_it() -> None:
    rig = started(2)
    rig.put(ev.Cancel(at=rig.at, reason="asked"))
    assert [order.end is not None for order in rig.orders.values()] == [True, True]
    turn = rig.say(1, edition=0)
    rig.tick(3, 2)
    turn += rig.say(1, edition=0)
    assert orders(turn)[1].end is not None, "it missed that"
    rig.gone(1, signal=9)
    rig.fails(2)
    assert (rig.r.root.status, rig.r.root.message) == (RunStatus.CANCELLED, "asked")
