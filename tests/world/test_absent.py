"""Nodes and heads that are silent, stopped, stuck or away, played by hand."""

from collections.abc import Callable

import msgspec
import pytest

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Fault
from fallow.core.membership.state import RunPhase
from fallow.model import ChangeKind, Doing, Exit, MemberPhase
from world.live import BEAT_S, Live
from world.rig import CONTRACT, TIMING, WAITS, Rig, logs, notices, orders, started


@notices("silence counts though nobody waits")
def test_a_silent_member_is_given_up_only_when_a_member_that_is_heard_waits_for_it() -> None:
    rig = started(3)
    rig.tick(30, 1, 3)
    assert rig.r.nodes[2].phase is MemberPhase.MEMBER, "it may be in a long step"
    rig.tick(34, 1, 3, **WAITS)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT


def test_no_planned_change_is_begun_while_a_member_is_not_heard() -> None:
    rig = started(2)
    rig.limit(2)
    rig.tick(12, 1)
    rig.join("c")
    assert rig.m.waiting() == "", "there is no place for it"
    rig.limit(3)
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


@notices("steps are no sign of life")
def test_steps_of_the_others_are_a_sign_of_life() -> None:
    """Though they wait for node 2, and it is not heard: no step is finished without it."""
    rig = started(3)
    rig.tick(1, 1, 2, 3)
    for at in range(2, 60):
        rig.tick(at, 1, 3, step=at // 5, **WAITS)
    assert len(rig.r.present()) == 3
    rig.tick(80, 1, 3, **WAITS)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT


def test_that_the_others_have_come_together_with_a_node_is_a_sign_of_its_life() -> None:
    """A newcomer's reports are lost from its vote on."""
    rig = started(2)
    n = rig.join("c")
    rig.vote()
    rig.tick(rig.at + TIMING.lease_s, 1, 2, **WAITS)
    assert rig.r.nodes[n].phase is MemberPhase.MEMBER
    for member in (1, 2):
        rig.arrive(member, 2)
    rig.tick(rig.at + 2, 1, 2, **WAITS)
    assert rig.r.nodes[n].phase is MemberPhase.MEMBER


@notices("a tick comes ahead of what lies in the inbox")
@notices("the clock goes on though nobody is heard")
def test_after_an_absence_of_the_head_connections_have_time_to_come_back() -> None:
    rig = started(3)
    rig.tick(20)
    waits = {"doing": Doing.WAITING, "stalled_s": 6.0}
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


def muted(rig: Rig, until: float, *, steps: bool = False) -> list[ev.Instruction]:
    """Time passes in which a process of the second of two nodes says nothing to its agent; the first one waits."""
    turn = list[ev.Instruction]()
    while rig.at < until:
        rig.at += 0.5
        silent_s = rig.at - 0.1
        doing = {"doing": Doing.WAITING, "stalled_s": silent_s}
        turn += rig.say(1, step=int(rig.at), generation=1) if steps else rig.say(1, generation=1, **doing)
        turn += rig.say(2, generation=1, mute_s=silent_s, **doing)
        turn += rig.put(ev.Ticked(at=rig.at))
    return turn


def test_a_process_that_says_nothing_to_its_agent_is_ended_after_its_lease_and_tells_its_stack() -> None:
    rig = started(2)
    lease_s = rig.m.timing.lease_s
    turn = muted(rig, lease_s)
    assert not logs(turn, "probe") + logs(turn, "eject"), "they do not all wait, for all that is known"
    muted(rig, lease_s + 2)
    assert (rig.end(2).kill, rig.end(2).stack) == (True, True)
    assert rig.r.nodes[2].phase is MemberPhase.GONE


def test_a_process_that_says_nothing_and_finishes_steps_stays() -> None:
    rig = started(2)
    assert not logs(muted(rig, 3 * rig.m.timing.lease_s, steps=True), "eject")


def test_a_script_may_say_nothing_until_it_is_ready() -> None:
    rig = started(1)
    n = rig.expect("late")
    for at in range(1, 60):
        rig.at = float(at)
        rig.say(1, step=at)
        rig.say(n, mute_s=rig.at)
        rig.put(ev.Ticked(at=rig.at))
    assert rig.r.nodes[n].phase is MemberPhase.STARTING


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


@notices("a new head does not listen")
def test_a_head_that_comes_back_decides_nothing_before_it_has_heard_all_or_time_is_up() -> None:
    rig = started(2)
    rig.join("c")
    rig.restart(1, 3)
    assert rig.m.phase is RunPhase.LISTENING
    rig.tick(rig.at + 3, 1, 3)
    assert rig.m.phase is not RunPhase.LISTENING


def test_a_head_that_comes_back_burns_what_was_prepared_and_keeps_what_was_committed() -> None:
    rig = started(1)
    rig.join("b")
    rig.restart(1)
    assert (rig.m.phase, rig.r.root.generation) == (RunPhase.LISTENING, 1)
    rig.say(2)
    rig.tick(rig.at + 0.25)
    assert rig.r.root.highest == 3, "the number is never used again"
    rig.vote()
    rig.restart(1, 2)
    assert rig.m.phase is RunPhase.SWITCHING
    rig.say(2, generation=3, has_state=True)
    rig.say(1, generation=3, has_state=True)
    assert rig.m.phase is RunPhase.STEADY


@notices("claims to obey a newer head are believed")
def test_a_node_that_claims_to_obey_a_newer_head_is_not_heard_and_ends_nobody() -> None:
    rig = started(2)
    before = dict(rig.store)
    turn = rig.say(2, term=5, fault=Fault(code=1, message="bad"))
    assert (rig.store, turn) == (before, [])
    for at in range(1, 14):
        rig.tick(at, 1, **WAITS)
        rig.say(2, term=5)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT


@notices("numbers that a store lost are not heard of")
@notices("nobody comes back into a broken generation")
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
    assert turn == [ev.Unknown(3, "c")]
    assert rig.expect("c", boot=3, node=3) == 3, "it keeps its number"
    rig.change()
    assert rig.r.members == [1, 2]
    rig.say(3, ready=CONTRACT, given_up=3)
    rig.change()
    assert rig.r.members == [1, 2, 3]


@pytest.mark.parametrize(("computed", "term"), [(True, 1), (False, 1), (True, 1000)])
def test_a_number_that_a_store_lost_is_not_committed_again_though_the_witness_comes_late(
    computed: bool, term: int
) -> None:
    """It has computed in that generation, or was only told of it; or it claims to obey a head of a higher term."""
    rig = Rig()
    rig.limit(8)
    past = dict(rig.store)
    rig.join("a")
    rig.change()
    lost, rig.store = msgspec.structs.replace(rig.said.pop(1), term=term), past
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


def test_news_of_the_end_of_workers_whose_number_another_node_has_now_prove_nothing() -> None:
    """A store had forgotten the number."""
    rig = started(1)
    rig.gone(1, signal=9, host="other", boot=1)
    rig.gone(1, signal=9, host="h1", boot=7)
    assert rig.r.nodes[1].phase is MemberPhase.MEMBER
    rig.gone(1, signal=9, host="h1", boot=1)
    assert not rig.r.alive(1)


def test_a_number_that_was_given_to_another_node_since_is_not_given_back() -> None:
    rig = started(1)
    assert rig.expect("c", boot=7, node=1) == 2


# -- the head is away, or some nodes are -------------------------------------------------------------------------------

LEASE_S = TIMING.lease_s


@pytest.mark.parametrize("seconds", [5.0, 20.0, 60.0, 600.0])
@pytest.mark.parametrize("how", [Live.stall, Live.freeze])
def test_a_head_that_stood_still_gives_nobody_up(how: Callable[[Live, float], None], seconds: float) -> None:
    run = Live(4)
    run.live(20)
    how(run, seconds)
    run.live(60)
    run.nobody_is_lost()


@pytest.mark.parametrize("seconds", [20.0, 60.0, 600.0])
@pytest.mark.parametrize("step_s", [BEAT_S, 100.0])
def test_a_head_that_was_cut_off_gives_nobody_up_however_late_the_last_is_heard_again(
    seconds: float, step_s: float
) -> None:
    """Connections come back one by one, 30 s apart where the last retransmission was just missed."""
    run = Live(3, standbys=1, step_s=step_s)
    run.live(20)
    run.cut = {1, 2, 3, 4}
    run.live(seconds)
    for n, wait_s in ((3, 10.0), (1, 18.0), (4, 2.0), (2, 60.0)):
        run.cut.discard(n)
        run.live(wait_s)
    run.nobody_is_lost()


@pytest.mark.parametrize(("members", "cut"), [(3, {2}), (2, {1, 2})])
@pytest.mark.parametrize("step_s", [BEAT_S, 200.0])
def test_members_that_only_the_head_cannot_hear_stay_and_no_standby_begins_alone(
    members: int, cut: set[int], step_s: float
) -> None:
    """In a long step others do not wait for one of them yet, so nothing says that it is gone."""
    run = Live(members, standbys=1, step_s=step_s)
    run.live(10)
    run.cut = cut
    run.live(150)
    run.nobody_is_lost()
    run.cut = set()
    run.live(5)
    run.nobody_is_lost()


@pytest.mark.parametrize("stalled_s", [0.0, 20.0])
def test_a_node_that_died_is_given_up_after_its_lease(stalled_s: float) -> None:
    """The same after an absence of the head in which it died: the others have waited for it by then."""
    run = Live(3)
    run.live(10)
    run.die(2)
    if stalled_s:
        run.stall(stalled_s)
    took_s = run.live(60, until=lambda: run.rig.m.phase is RunPhase.REBUILDING)
    assert LEASE_S - 2 <= took_s <= LEASE_S + 1
    assert run.rig.ballot.members == [1, 3]


def test_a_standby_that_fell_silent_is_given_up_after_its_lease_and_is_one_again_when_it_is_heard() -> None:
    run = Live(2, standbys=1)
    run.live(10)
    run.cut = {3}
    took_s = run.live(60, until=lambda: not run.rig.r.alive(3))
    assert LEASE_S <= took_s <= LEASE_S + 1
    assert run.rig.r.root.highest == 1
    run.cut = set()
    run.live(3)
    assert run.rig.r.nodes[3].phase is MemberPhase.READY


def test_a_leaver_whose_node_went_with_it_holds_up_nobody() -> None:
    """It passed the boundary, as the new generation's members show, and nobody waits for it any more."""
    run = Live(2)
    rig = run.rig
    run.live(10)
    rig.release(2, reason="walltime")
    rig.vote()
    rig.arrive(1, 2, 20)
    run.cut = {2}
    took_s = run.live(60, until=lambda: rig.m.phase is RunPhase.STEADY)
    assert LEASE_S <= took_s <= LEASE_S + 1
    assert [done.kind for done in rig.completed] == [ChangeKind.START, ChangeKind.RELEASE]


@notices("no connection may come back")
def test_a_newcomer_that_does_not_hear_of_its_change_after_an_absence_is_asked_again() -> None:
    """The change is given up, for the members need not wait, but not the newcomer."""
    run = Live(2)
    rig = run.rig
    run.live(5)
    rig.limit(3)
    rig.join("c")
    for n in (1, 2):
        rig.say(n, prepared=2)
    run.live(5)
    run.cut = {1, 2, 3}
    run.live(20)
    run.cut = {3}
    run.live(20)
    assert (rig.m.phase, rig.r.root.highest) == (RunPhase.STEADY, 2), "it cannot hear of another one"
    run.cut = set()
    run.live(3)
    assert (rig.m.phase, rig.ballot.members) == (RunPhase.PREPARING, [1, 2, 3])
    assert not logs(run.told, "eject")


# -- a node that was frozen or cut off is heard again ------------------------------------------------------------------


def freeze(rig: Rig, n: int, *others: int) -> None:
    """The node stands still, the others wait for it, and it is given up."""
    rig.tick(rig.at + 13, *others, **WAITS)
    assert rig.r.nodes[n].phase is MemberPhase.SILENT


@notices("a node that is heard again is ended")
def test_one_that_thaws_while_the_others_vote_is_with_them_again_in_another_generation() -> None:
    rig = started(3)
    freeze(rig, 2, 1, 3)
    burned = rig.ballot.change.generation
    for n in (1, 3):
        rig.say(n, given_up=1)
    turn = rig.say(2)
    assert rig.ballot.change.generation == burned + 1
    assert rig.ballot.members == [1, 2, 3]
    order = orders(turn)[2]
    assert (order.broken, order.committed) == (1, 1)
    assert order.plan is not None
    assert (order.plan.generation, order.plan.interrupt, order.end) == (burned + 1, True, None)
    rig.say(2, prepared=burned, given_up=1)
    for n in (1, 3):
        rig.say(n, prepared=burned)
    assert rig.r.root.generation == 1, "votes for what was burned count for nothing"
    rig.change()
    assert rig.completed[-1].members == ["n0", "n1", "n2"]


@notices("nodes are forgotten though their end is not proved")
def test_one_that_thaws_behind_a_commit_without_it_gives_up_what_it_had_and_begins_as_a_newcomer_does() -> None:
    rig = started(3)
    freeze(rig, 2, 1, 3)
    rig.change()
    rig.tick(rig.at + 0.25, 1, 3)
    assert 2 in rig.r.nodes, "nothing proves its end"
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
    assert rig.completed[-1].members == ["n0", "n2", "n1"]


@notices("what a node held before a generation that the store lost counts")
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
    assert rig.completed[-1].members == ["n1", "n2", "n0"]


def test_one_that_thaws_and_was_to_leave_is_let_go() -> None:
    rig = started(3)
    freeze(rig, 2, 1, 3)
    rig.change()
    rig.release(2)
    rig.say(2)
    assert (rig.r.nodes[2].phase, rig.end(2).code) == (MemberPhase.GONE, Exit.OK)


# -- nodes without progress --------------------------------------------------------------------------------------------

WAITING, WORKING, OUTSIDE = Doing.WAITING, Doing.WORKING, Doing.OUTSIDE


@pytest.mark.parametrize("doing", [WORKING, OUTSIDE])
def test_a_member_that_keeps_the_others_waiting_is_ejected_at_the_progress_deadline(doing: Doing) -> None:
    rig = started(3)
    for at in range(1, 40):
        rig.stand(at, {1: (WAITING, at - 0.1), 2: (doing, at), 3: (WAITING, at - 0.1)})
        assert len(rig.r.present()) == 3, at
    rig.stand(41, {1: (WAITING, 40.9), 2: (doing, 41), 3: (WAITING, 40.9)})
    assert (rig.end(2).kill, rig.end(2).stack, rig.ballot.members) == (True, True, [1, 3])


@notices("of nodes that are stuck all are to blame")
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


def test_a_newcomer_whose_rehearsal_takes_long_spares_no_member() -> None:
    rig = started(2)
    rig.expect("c")
    for at in range(1, 42):
        rig.stand(at, {1: (WORKING, at), 2: (WAITING, at - 0.1), 3: (WORKING, at)}, computing=[3])
    assert (rig.r.alive(1), rig.r.alive(3)) == (False, True)


def test_a_long_body_that_makes_progress_and_code_behind_the_loop_are_no_hangs() -> None:
    rig = started(2)
    for at in range(1, 100):
        rig.stand(at, {1: (WORKING, at % 39), 2: (WAITING, 1.0)})
    for at in range(100, 300):
        rig.stand(at, {1: (OUTSIDE, at), 2: (OUTSIDE, at)})
    assert rig.r.root.highest == 1


@notices("a leaver that hangs is waited for", True)
@pytest.mark.parametrize("is_leaver", [False, True])
def test_a_node_that_hangs_is_ejected_from_a_generation_in_which_nobody_computes_yet(is_leaver: bool) -> None:
    rig = started(3)
    if is_leaver:
        rig.release(2)
    else:
        rig.join("d")
    rig.vote()
    for at in range(1, 43):
        others = [n for n in rig.r.nodes if n != 2]
        rig.stand(at, {2: (WORKING, at), **dict.fromkeys(others, (WAITING, at - 1))})
    assert (rig.r.alive(2), rig.ballot.members) == (False, [1, 3])


def test_a_silent_member_that_has_left_by_itself_is_told_why_it_ends() -> None:
    rig = started(3)
    rig.tick(34, 1, 3, **WAITS)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT
    rig.say(2, passed_boundary=1, given_up=1, term=1, edition=1)
    end = rig.end(2)
    assert (end.code, end.kill) == (Exit.OK, False)
    assert "heard no head" in end.reason
