"""Planned changes, played by hand: who joins and leaves in which generation, and when nodes have to be gone."""

import msgspec
import pytest

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Checkpoint, Order, Refusal, Switch
from fallow.core.membership.state import RunPhase
from fallow.core.membership.tables import RUN
from fallow.model import ChangeKind, Exit, MemberPhase, Parts, RunStatus
from world.rig import CONTRACT, Rig, logs, notices, orders, started


def test_newcomers_hear_of_a_commit_first_and_members_when_they_have_or_when_an_order_was_lost() -> None:
    """Members wait behind the boundary for newcomers. A head that dies meanwhile must have told these."""
    rig = started(2)
    for host, hears in (("c", True), ("d", False)):
        n = rig.join(host)
        g = rig.r.root.highest
        for voter in [*rig.r.members, n]:
            turn = rig.say(voter, prepared=g, given_up=0)
        assert [told for told, order in orders(turn).items() if order.committed == g] == [n]
        others = set(rig.r.members) - {n}
        assert not orders(rig.say(1))
        before = dict(rig.orders)
        rig.expect(rig.r.nodes[1].host, rig.r.nodes[1].token, rig.r.nodes[1].boot)
        assert rig.orders == before, "not with a new connection either"
        told = orders(rig.say(n) if hears else rig.tick(rig.at + 2 * rig.timing.resend_s + 1, 1))
        assert all(told[other].committed == g for other in others)
        rig.switch()


def test_members_hear_of_a_commit_within_a_tick_while_somebody_has_to_leave_in_time() -> None:
    rig = started(3)
    n = rig.join("d")
    rig.want(ev.Ends, node=2, ends_at=rig.at + 10.0)
    g = rig.r.root.highest
    for voter in [*rig.r.members, n]:
        rig.say(voter, prepared=g, given_up=0)
    told = orders(rig.tick(rig.at + 1.0, 1, 2, 3))
    assert {node for node, order in told.items() if order.committed == g} >= {1, 2, 3}


@notices("overtaken reports count")
def test_s5_a_vote_for_another_generation_a_repeated_or_an_overtaken_report_counts_for_nothing() -> None:
    rig = started(1)
    rig.join("b")
    rig.say(1, prepared=99 - 97)
    old = rig.said[2]
    rig.put(ev.Reported(at=0, host="b", report=msgspec.structs.replace(old, seq=old.seq - 1, prepared=2)))
    assert rig.r.root.generation == 1
    rig.say(2, prepared=2)
    assert rig.r.root.generation == 2


@notices("votes have no deadline (planned)")
def test_a_newcomer_that_does_not_vote_is_given_up_and_one_that_hears_nothing_waits() -> None:
    rig = started(1)
    rig.join("b")
    rig.say(1, prepared=2)
    rig.tick(11, 1, 2)
    assert (rig.r.nodes[2].phase, rig.m.phase) == (MemberPhase.GONE, RunPhase.STEADY)
    rig.join("c")
    rig.say(1, prepared=rig.r.root.highest)
    for at in range(12, 24):
        rig.at = at
        rig.say(1)
        rig.say(3, edition=1)
        rig.put(ev.Ticked(at=at))
    assert (rig.r.nodes[3].phase, rig.m.phase) == (MemberPhase.SILENT, RunPhase.STEADY)
    rig.say(3)
    assert rig.r.nodes[3].phase is MemberPhase.READY


@notices("a spoiled ballot is committed")
def test_a_joiner_that_dies_before_the_commit_burns_only_its_number() -> None:
    rig = started(1)
    rig.join("b")
    told = orders(rig.gone(2, signal=9))
    assert 1 in told, "it has to hear that nothing comes of the number"
    assert (told[1].plan, told[1].broken) == (None, 0)
    rig.tick(2, 1)
    rig.join("c")
    assert rig.r.root.highest == 3


def test_a_leaver_stays_known_until_its_processes_have_ended() -> None:
    """Else its last reports would bring it back as a newcomer."""
    rig = started(2)
    rig.release(2)
    rig.change()
    assert rig.r.nodes[2].phase is MemberPhase.GONE
    rig.gone(2, code=0)
    assert list(rig.r.nodes) == [1]


def test_last_member_leaving_suspends_with_a_checkpoint_and_it_goes_on_from_there() -> None:
    rig = started(1)
    rig.release(1, reason="walltime")
    rig.say(1, saved=Checkpoint(path="/b", generation=1, step=4))
    assert rig.ballot.change.generation == 2, "a periodic one stops nothing"
    rig.vote()
    rig.say(1, saved=Checkpoint(path="/c", generation=1, step=5))
    (told,) = logs(rig.say(1, passed_boundary=2, given_up=2), "suspend")
    assert told.endswith("; the run goes on from the checkpoint of step 5")
    assert rig.r.root.status is RunStatus.SUSPENDED
    rig.join("b")
    assert rig.ballot.full_plan.checkpoints == ("/c", "/b")
    rig.change(5)
    assert rig.r.root.status is RunStatus.TRAINING


@notices("leaving has no deadline", False)
@pytest.mark.parametrize("is_asked", [False, True])
def test_a_node_leaves_before_its_end_which_may_be_put_off_or_is_ejected(is_asked: bool) -> None:
    rig = started(2)
    rig.put(ev.Ends(at=0, node=2, ends_at=90))
    rig.tick(60, 1, 2)
    if is_asked:
        rig.limit(1)
    rig.tick(69, 1, 2)
    assert rig.r.nodes[2].phase is (MemberPhase.LEAVING if is_asked else MemberPhase.MEMBER)
    rig.tick(71, 1, 2)
    rig.put(ev.Ends(at=71, node=2, ends_at=100))
    rig.tick(96, 1, 2)
    assert rig.r.nodes[2].phase is MemberPhase.LEAVING
    rig.tick(98, 1, 2)
    assert (rig.r.nodes[2].phase, rig.end(2).kill, rig.orders[1].broken) == (MemberPhase.GONE, True, 1)


def test_t7_limits_keep_standbys_warm_and_release_the_youngest() -> None:
    rig = started(3)
    rig.limit(2)
    rig.change()
    assert rig.r.members == [1, 2]
    rig.join("d")
    assert rig.m.phase is RunPhase.STEADY
    rig = started(1, shards=1)
    rig.join("b")
    assert rig.r.members == [1], "never more workers than shards"
    rig = Rig(minimum=3)
    rig.limit(2)
    for host in "ab":
        rig.join(host)
    assert rig.ballot.members == [1, 2], "a third node is not asked for"


def test_in_a_scripted_run_no_standby_takes_a_lost_ones_place() -> None:
    rig = started(2, scripted=True)
    rig.limit(2)
    rig.join("c")
    rig.gone(2, signal=9)
    rig.change()
    assert (rig.r.members, rig.m.phase) == ([1], RunPhase.STEADY)


def test_scripts_that_are_restarted_newcomers_wait_and_go_along_with_a_loss() -> None:
    rig = Rig(minimum=2)
    rig.contract = msgspec.structs.replace(CONTRACT, restarts=True)
    rig.join("a")
    rig.join("b")
    rig.change()
    rig.join("c")
    rig.tick(200, 1, 2, 3)
    assert rig.r.members == [1, 2]
    rig.gone(2, signal=9)
    assert rig.ballot.members == [1, 3]
    rig.change()
    rig.join("d")
    rig.tick(499, 1, 3, 4)
    assert rig.m.phase is RunPhase.STEADY
    rig.tick(502, 1, 3, 4)
    assert rig.m.phase is RunPhase.PREPARING


@pytest.mark.parametrize(
    ("what", "words"),
    [({"shards": 4}, "64 in 4 shards"), ({"signature": "x", "layout": ("w float32[3]",)}, "float32[3]")],
)
def test_a_newcomer_that_differs_is_refused_with_the_difference(what: dict[str, object], words: str) -> None:
    rig = started(1)
    n = rig.join("b", **what)
    assert words in rig.end(n).reason


def test_an_agent_that_starts_its_workers_anew_proves_that_the_old_ones_have_ended() -> None:
    rig = started(1)
    again = {"host": "h1", "token": "h1", "slots": 1, "entry": "e"}
    rig.put(ev.Expected(at=0, boot=1, **again))
    assert list(rig.r.nodes) == [1]
    rig.put(ev.Expected(at=0, boot=7, **again))
    assert rig.r.root.status is RunStatus.SUSPENDED
    assert rig.r.nodes[1].proved_gone
    rig.put(ev.Expected(at=0, boot=1, **again))
    assert list(rig.r.nodes) == [1, 2], "that was said long ago"


def test_every_phase_has_a_row() -> None:
    assert set(RUN) == set(RunPhase)


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


@pytest.mark.parametrize("by_another_head", [False, True])
def test_the_pause_is_told_in_parts_of_the_node_that_stood_still_the_longest(by_another_head: bool) -> None:
    rig = started(1)
    rig.join("b")
    rig.vote()
    for n, pause_s in ((1, 0.5), (2, 0.0)):
        parts = Parts(drain=pause_s / 2, state=pause_s / 2)
        switch = Switch(generation=2, first_step=3, pause_s=pause_s, parts=parts, bytes_in_pause=10, bytes_behind=5)
        rig.arrive(n, 2, 3, switch=switch)
        if n == 1 and by_another_head:
            rig.restart(1, 2)
    done = rig.completed[-1]
    assert (done.kind, done.members) == (ChangeKind.ABSORB, ["n0", "n1"])
    assert (done.first_step, done.pause_s, done.parts) == (3, 0.5, Parts(drain=0.25, state=0.25))
    assert (done.bytes_in_pause, done.bytes_behind) == (20, 10)


# -- who joins and leaves together -------------------------------------------------------------------------------------


def test_r3_r4_newcomers_that_are_ready_join_at_once_and_together() -> None:
    """Six newcomers in two bursts: no last call, and not one change for each of them."""
    rig = started(2)
    rig.limit(2)
    for host in "cdefgh":
        rig.join(host)
    rig.limit(5)
    assert rig.ballot.members == [1, 2, 3, 4, 5], "at once"
    rig.limit(8)
    while rig.m.ballot is not None:
        rig.change()
    assert [len(done.members) for done in rig.completed] == [2, 5, 8]


@notices("each release is a generation", 2)
@pytest.mark.parametrize("events", [1, 2])
def test_nodes_that_are_released_in_one_turn_leave_in_one_generation(events: int) -> None:
    rig = started(4)
    for nodes in [(2, 3)] if events == 1 else [(2,), (3,)]:
        rig.put(ev.Release(at=rig.at, nodes=nodes, reason="wanted by others"))
    assert rig.m.phase is RunPhase.STEADY
    rig.tick(0.25, 1, 2, 3, 4)
    assert (rig.ballot.members, rig.ballot.change.leavers) == ([1, 4], [2, 3])


def test_who_is_released_with_a_lower_limit_is_not_replaced_by_a_standby() -> None:
    rig = started(3)
    rig.limit(3)
    rig.join("d")
    rig.release(1, limit=2)
    rig.change()
    assert (rig.r.members, rig.r.standbys()) == ([2, 3], [4])
    assert rig.completed[-1].kind is ChangeKind.RELEASE
    rig.limit(3)
    rig.change()
    assert rig.r.members == [2, 3, 4]


def test_a_leaver_that_missed_the_generation_after_a_loss_breaks_nothing_and_hears_of_it_again() -> None:
    rig = started(3)
    rig.release(1)
    rig.vote()
    rig.gone(3, signal=9)
    rig.say(2, prepared=3, given_up=2)
    assert rig.r.root.generation == 3, "nobody waits for the vote of a leaver"
    missed = rig.orders[1].edition - 1
    assert not orders(rig.say(1, edition=missed))
    turn = list[ev.Instruction]()
    while rig.at < 4:
        turn += rig.tick(rig.at + 1, 2)
        turn += rig.say(1, edition=missed)
    assert [i.node for i in turn if isinstance(i, Order)] == [1, 1], "not with every report"
    assert rig.r.root.highest == 3
    rig.say(1, passed_boundary=3, given_up=1)
    rig.arrive(2, 3)
    assert [done.generation for done in rig.completed] == [1, 3]


def test_who_goes_at_the_same_time_as_a_newcomer_comes_is_told_with_all_members_in_the_order_of_ranks() -> None:
    rig = started(2)
    rig.put(ev.Release(at=0, nodes=(1,), reason="asked"))
    rig.join("c")
    rig.change()
    done = rig.completed[-1]
    assert (done.kind, done.members) == (ChangeKind.MIXED, ["n1", "n2"])


def test_a_newcomer_whose_generation_was_overtaken_by_the_end_is_not_waited_for() -> None:
    rig = started(2)
    rig.join("c")
    rig.vote()
    rig.finish(1)
    rig.gone(1, code=0)
    assert rig.r.root.status is RunStatus.TRAINING
    rig.finish(2)
    assert rig.r.root.status is RunStatus.FINISHED
    assert rig.end(3)


def test_an_agent_whose_workers_have_finished_is_told_so_when_it_comes_back() -> None:
    rig = started(2)
    rig.finish(1)
    rig.gone(1, code=0)
    rig.expect(rig.r.nodes[1].host, rig.r.nodes[1].token, rig.r.nodes[1].boot)
    assert (rig.end(1).code, bool(rig.end(1).reason)) == (Exit.OK, True)


@pytest.mark.parametrize(("is_newcomer", "wait_s"), [(True, 0.0), (False, 2.0)])
def test_whose_group_could_not_be_built_is_let_go_only_if_it_is_a_newcomer(is_newcomer: bool, wait_s: float) -> None:
    rig = started(1)
    rig.join("b")
    turn = rig.say(2 if is_newcomer else 1, refusal=Refusal(generation=2, reason="no port is free"))
    assert "could not: no port is free" in logs(turn, "abort")[0]
    rig.tick(wait_s, 1, 2)
    assert rig.r.nodes[2].phase is (MemberPhase.GONE if is_newcomer else MemberPhase.READY)
    assert rig.m.phase is (RunPhase.STEADY if is_newcomer else RunPhase.PREPARING)


# -- starts ------------------------------------------------------------------------------------------------------------


def test_a_script_that_fails_before_the_loop_leaves_its_last_words() -> None:
    rig = Rig()
    for host in "ab":
        rig.expect(host)
    for n in (1, 2):
        rig.gone(n, code=1, tail=f"node {n}, line 2")
    assert (rig.r.root.status, rig.r.root.traceback) == (RunStatus.FAILED, "node 1, line 2")


def test_a_start_that_failed_is_what_people_see_only_until_another_node_is_ready() -> None:
    rig = Rig()
    for host in "ab":
        rig.expect(host)
    rig.gone(1, signal=9)
    assert (rig.r.root.start_failures, rig.r.root.message[:30]) == (1, "n0 (a) ended before its traini")
    rig.say(2, ready=CONTRACT)
    assert (rig.r.root.start_failures, rig.r.root.message) == (0, "")


def test_a_script_that_hangs_before_the_loop_is_killed_at_its_deadline() -> None:
    rig = Rig()
    rig.expect("a")
    rig.tick(60, 1)
    assert not rig.r.root.status.ended
    rig.tick(62, 1)
    assert (rig.end(1).kill, rig.end(1).stack) == (True, True)
    assert rig.r.root.status is RunStatus.FAILED


def test_what_a_ledger_lacks_is_known_of_a_node_that_is_forgotten() -> None:
    rig = started(2)
    rig.say(2, unrecorded=8)
    rig.release(2)
    rig.change()
    rig.gone(2, code=0)
    assert 2 not in rig.r.nodes
    assert rig.r.root.unrecorded == {2: 8}
