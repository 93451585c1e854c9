"""Nodes and heads that are silent, stopped, stuck or away, played by hand."""

from __future__ import annotations

import msgspec
import pytest

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Fault
from fallow.core.membership.state import RunPhase
from fallow.model import Doing, MemberPhase
from world.rig import CONTRACT, WAITS, Rig, orders, started

WAITING, WORKING, OUTSIDE = Doing.WAITING, Doing.WORKING, Doing.OUTSIDE


def test_a_silent_member_is_given_up_only_when_a_member_that_is_heard_waits_for_it() -> None:
    rig = started(3)
    rig.tick(30, 1, 3)
    assert rig.r.nodes[2].phase is MemberPhase.MEMBER, "it may be in a long step"
    rig.tick(34, 1, 3, **WAITS)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT


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


def test_steps_of_the_others_are_a_sign_of_life() -> None:
    """Though they wait for node 2, and it is not heard: no step is finished without it."""
    rig = started(3)
    rig.tick(1, 1, 2, 3)
    for at in range(2, 60):
        rig.tick(at, 1, 3, step=at // 5, **WAITS)
    assert len(rig.r.present()) == 3
    rig.tick(80, 1, 3, **WAITS)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT


def test_after_an_absence_of_the_head_connections_have_time_to_come_back() -> None:
    rig = started(3)
    rig.tick(20)
    waits = {"doing": WAITING, "stalled_s": 6.0}
    rig.tick(45, 1, 3, **waits)
    assert rig.r.nodes[2].phase is MemberPhase.MEMBER
    rig.tick(55, 1, 3, **waits)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT


@pytest.mark.parametrize(
    ("told_at", "stopped_s", "judged_at", "phase"),
    [
        (1.0, 0.6, 1.25, MemberPhase.GONE),
        (1.0, 1.6, 20.0, MemberPhase.MEMBER),  # old news
        (20.0, 9.1, 20.0, MemberPhase.MEMBER),  # it lay unread while the head stood still
    ],
)
def test_a_stopped_process_is_ejected_long_before_its_lease_unless_the_news_is_old(
    told_at: float, stopped_s: float, judged_at: float, phase: MemberPhase
) -> None:
    rig = started(2)
    rig.tick(1, 1)
    rig.at = told_at
    rig.say(2, stopped_s=stopped_s)
    rig.at = judged_at
    rig.put(ev.Ticked(at=judged_at))
    assert rig.r.nodes[2].phase is phase


def test_members_that_wait_in_different_places_of_the_script_end_the_run() -> None:
    rig = started(2)
    while not rig.r.root.status.ended:
        rig.at += 1
        assert rig.at < 100
        rig.say(1, doing=WAITING, stalled_s=rig.at, in_call=True)
        rig.say(2, doing=WAITING, stalled_s=rig.at)
        rig.put(ev.Ticked(at=rig.at))
        if rig.m.phase is RunPhase.PROBING:
            rig.vote()
    assert rig.r.root.message == (
        "step 0: the members have waited for each other for 41 s in different places of the script: n0 (h1) in "
        "run.mean or run.barrier, the others not"
    )


def test_a_head_that_comes_back_decides_nothing_before_it_has_heard_all_or_time_is_up() -> None:
    rig = started(2)
    rig.join("c")
    rig.restart(1, 3)
    assert rig.m.phase is RunPhase.LISTENING
    rig.tick(rig.at + 3, 1, 3)
    assert rig.m.phase is not RunPhase.LISTENING


def test_a_node_that_claims_to_obey_a_newer_head_is_not_heard_and_ends_nobody() -> None:
    rig = started(2)
    turn = rig.say(2, term=5, fault=Fault(code=1, message="bad"))
    assert (turn.writes, turn.then) == ({}, [])


def test_a_store_that_went_back_in_time() -> None:
    """It has lost a committed generation, and the node that this one had taken in."""
    rig = started(2)
    past = dict(rig.store)
    rig.join("c")
    rig.change()
    lost, rig.store = rig.said[3], past
    rig.restart(1, 2)
    assert (rig.r.root.highest, rig.m.order(1).broken) == (3, 2)
    assert rig.m.phase is RunPhase.REBUILDING
    assert rig.ballot.change.generation == 3
    turn = rig.put(ev.Reported(at=rig.at, host="c", report=lost))
    assert turn.then == [ev.Unknown(3, "c")]
    assert rig.expect("c", boot=3, node=3) == 3, "it keeps its number"
    rig.change()
    assert rig.r.members == [1, 2]
    rig.say(3, ready=CONTRACT, given_up=3)
    rig.change()
    assert rig.r.members == [1, 2, 3]


@pytest.mark.parametrize("computed", [True, False])
def test_a_number_that_a_store_lost_is_not_committed_again_though_the_witness_comes_late(computed: bool) -> None:
    """It has computed in that generation, or was only told of it."""
    rig = Rig()
    rig.limit(8)
    past = dict(rig.store)
    rig.join("a")
    rig.change()
    lost, rig.store = rig.said.pop(1), past
    if not computed:
        lost = msgspec.structs.replace(lost, highest=lost.generation, generation=0, prepared=0, has_state=False)
    rig.orders.clear()
    rig.restart()
    n = rig.join("b")
    assert rig.ballot.change.generation == 1
    rig.put(ev.Reported(at=rig.at, host="a", report=lost))
    assert rig.ballot.change.generation == 2
    rig.change()
    assert (rig.r.members, rig.r.root.generation) == ([n], 2)


def test_a_newcomer_that_does_not_hear_of_its_change_after_an_absence_is_asked_again() -> None:
    """The change is given up, for the members need not wait, but not the newcomer."""
    rig = started(2)
    rig.join("c")
    for n in (1, 2):
        rig.say(n, prepared=2)
    rig.tick(5, 1, 2)
    rig.tick(25)
    rig.tick(45, 1, 2)
    assert (rig.m.phase, rig.r.root.highest) == (RunPhase.STEADY, 2), "it cannot hear of another one"
    rig.tick(48, 1, 2, 3)
    assert (rig.m.phase, rig.ballot.members) == (RunPhase.PREPARING, [1, 2, 3])


def test_a_script_may_say_nothing_until_it_is_ready() -> None:
    rig = started(1)
    n = rig.expect("late")
    for at in range(1, 60):
        rig.at = float(at)
        rig.say(1, step=at)
        rig.say(n, mute_s=rig.at)
        rig.put(ev.Ticked(at=rig.at))
    assert rig.r.nodes[n].phase is MemberPhase.STARTING


# -- a node that was frozen or cut off is heard again ------------------------------------------------------------------


def freeze(rig: Rig, n: int, *others: int) -> None:
    """The node stands still, the others wait for it, and it is given up."""
    rig.tick(rig.at + 13, *others, **WAITS)
    assert rig.r.nodes[n].phase is MemberPhase.SILENT


def test_one_that_thaws_while_the_others_vote_is_with_them_again_in_another_generation() -> None:
    rig = started(3)
    freeze(rig, 2, 1, 3)
    burned = rig.ballot.change.generation
    order = orders(rig.say(2))[2]
    assert (rig.ballot.change.generation, rig.ballot.members) == (burned + 1, [1, 2, 3])
    assert (order.broken, order.committed, order.end) == (1, 1, None)
    rig.change()
    assert rig.completed[-1].members == (1, 2, 3)


def test_one_that_thaws_behind_a_commit_without_it_gives_up_what_it_had_and_begins_as_a_newcomer_does() -> None:
    rig = started(3)
    freeze(rig, 2, 1, 3)
    rig.change()
    rig.tick(rig.at + 0.25, 1, 3)
    turn = rig.say(2)
    order, g = orders(turn)[2], rig.ballot.change.generation
    assert (order.broken, order.committed, order.end) == (2, 2, None)
    assert order.plan is not None
    assert (order.plan.base, [peer.node for peer in order.plan.more], order.state_since) == (0, [1, 3, 2], g)
    for n in (1, 3):
        rig.say(n, prepared=g)
    rig.say(2, prepared=g)
    assert rig.r.root.generation == 2, "its vote counts when it has given up the generation that it was in"
    rig.say(2, prepared=g, given_up=2)
    assert rig.r.root.generation == g
    rig.switch()
    assert rig.completed[-1].members == (1, 3, 2)


def test_what_a_node_holds_from_before_a_generation_that_the_store_lost_does_not_count() -> None:
    """Node 1 was away when the others went on without it, and the store forgot that they did."""
    rig = started(3)
    past = dict(rig.store)
    freeze(rig, 1, 2, 3)
    rig.change(9)
    rig.store = past
    rig.restart(1, 2, 3)
    assert (rig.r.members, rig.ballot.members) == ([1, 2, 3], [2, 3])
    rig.change(9)
    assert rig.orders[1].state_since == rig.ballot.change.generation
    rig.change(10)
    assert rig.completed[-1].members == (2, 3, 1)


# -- nodes without progress --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("doing", [WORKING, OUTSIDE])
def test_a_member_that_keeps_the_others_waiting_is_ejected_at_the_progress_deadline(doing: Doing) -> None:
    rig = started(3)
    for at in range(1, 40):
        rig.stand(at, {1: (WAITING, at - 0.1), 2: (doing, at), 3: (WAITING, at - 0.1)})
        assert len(rig.r.present()) == 3, at
    turn = rig.stand(41, {1: (WAITING, 40.9), 2: (doing, 41), 3: (WAITING, 40.9)})
    end = orders(turn)[2].end
    assert end is not None
    assert (end.kill, end.stack, rig.ballot.members) == (True, True, [1, 3])


def test_of_nodes_that_are_all_stuck_the_one_whose_device_computes_is_to_blame() -> None:
    rig = started(3)
    for at in range(1, 41):
        rig.stand(at, dict.fromkeys((1, 2, 3), (WORKING, at)), computing=[2])
    assert rig.ballot.members == [1, 3]
    rig.vote()
    for at in range(41, 81):
        rig.stand(at, dict.fromkeys((1, 3), (WORKING, at)))
        assert rig.r.alive(1), "they have the deadline once more"
    rig.stand(81, dict.fromkeys((1, 3), (WORKING, 81)))
    assert not rig.r.present(), "it was not for that one alone"


def test_a_long_body_that_makes_progress_and_code_behind_the_loop_are_no_hangs() -> None:
    rig = started(2)
    for at in range(1, 100):
        rig.stand(at, {1: (WORKING, at % 39), 2: (WAITING, 1.0)})
    for at in range(100, 300):
        rig.stand(at, {1: (OUTSIDE, at), 2: (OUTSIDE, at)})
    assert rig.r.root.highest == 1


def test_a_leaver_that_hangs_is_ejected_from_a_generation_in_which_nobody_computes_yet() -> None:
    rig = started(3)
    rig.release(2)
    rig.vote()
    for at in range(1, 43):
        rig.stand(at, {1: (WAITING, at - 1), 2: (WORKING, at), 3: (WAITING, at - 1)})
    assert (rig.r.alive(2), rig.ballot.members) == (False, [1, 3])
