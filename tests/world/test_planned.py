"""Planned changes, played by hand: who joins and leaves in which generation, and when nodes have to be gone."""

from __future__ import annotations

import msgspec
import pytest

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Checkpoint, Switch
from fallow.core.membership.state import RunPhase
from fallow.model import ChangeKind, MemberPhase, Parts, RunStatus
from world.rig import CONTRACT, Rig, logs, orders, started


def test_s5_a_vote_for_another_generation_a_repeated_or_an_overtaken_report_counts_for_nothing() -> None:
    rig = started(1)
    rig.join("b")
    rig.say(1, prepared=99 - 97)
    old = rig.said[2]
    rig.put(ev.Reported(at=0, host="b", report=msgspec.structs.replace(old, seq=old.seq - 1, prepared=2)))
    assert rig.r.root.generation == 1
    rig.say(2, prepared=2)
    assert rig.r.root.generation == 2


def test_a_joiner_that_dies_before_the_commit_burns_only_its_number() -> None:
    rig = started(1)
    rig.join("b")
    told = orders(rig.gone(2, signal=9))
    assert (told[1].plan, told[1].broken) == (None, 0)
    rig.tick(2, 1)
    rig.join("c")
    assert rig.r.root.highest == 3


def test_last_member_leaving_suspends_with_a_checkpoint_and_it_goes_on_from_there() -> None:
    rig = started(1)
    rig.release(1, reason="walltime")
    rig.vote()
    rig.say(1, saved=Checkpoint(path="/c", generation=1, step=5))
    (told,) = logs(rig.say(1, left=2, given_up=2), "suspend")
    assert told.endswith("; the run goes on from the checkpoint of step 5")
    assert rig.r.root.status is RunStatus.SUSPENDED
    rig.join("b")
    assert rig.ballot.plans.whole.checkpoints == ("/c",)
    rig.change(5)
    assert rig.r.root.status is RunStatus.TRAINING


def test_deadlines_a_node_leaves_before_its_end_or_is_ejected() -> None:
    rig = started(2)
    rig.put(ev.Ends(at=0, node=2, ends_at=100))
    rig.tick(79, 1, 2)
    assert rig.r.nodes[2].phase is MemberPhase.MEMBER
    rig.tick(81, 1, 2)
    assert rig.r.nodes[2].phase is MemberPhase.LEAVING
    turn = rig.tick(98, 1, 2)
    assert rig.r.nodes[2].phase is MemberPhase.GONE
    assert any(o.end is not None and o.end.kill for o in orders(turn).values())


def test_who_is_asked_to_leave_by_a_time_is_gone_by_then() -> None:
    rig = started(2)
    rig.release(2, reason="urgent", by=4.0)
    rig.tick(3.5, 1, 2)
    assert rig.r.nodes[2].phase is MemberPhase.LEAVING
    turn = rig.tick(4, 1, 2)
    assert rig.r.nodes[2].phase is MemberPhase.GONE
    assert orders(turn)[1].broken == 1


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
    end = rig.m.order(n).end
    assert end is not None
    assert words in end.reason


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
        parts = Parts(drain=pause_s / 2, state=pause_s / 2)
        switch = Switch(generation=2, first_step=3, pause_s=pause_s, parts=parts, bytes_in_pause=10, bytes_behind=5)
        rig.arrive(n, 2, 3, switch=switch)
    told, done = rig.completed[-1], rig.completed[-1].change
    assert (done.kind, told.members, told.joined, told.left) == (ChangeKind.ABSORB, (1, 2), (2,), ())
    assert (done.first_step, done.pause_s, done.parts) == (3, 0.5, Parts(drain=0.25, state=0.25))
    assert (done.bytes_in_pause, done.bytes_behind) == (20, 10)


# -- who joins and leaves together -------------------------------------------------------------------------------------


def test_nodes_that_are_released_in_one_turn_leave_in_one_generation() -> None:
    rig = started(4)
    for n in (2, 3):
        rig.put(ev.Release(at=rig.at, nodes=(n,), reason="wanted by others"))
    assert rig.m.phase is RunPhase.STEADY
    rig.tick(0.25, 1, 2, 3, 4)
    assert (rig.ballot.members, rig.ballot.change.leavers) == ([1, 4], [2, 3])


# -- starts ------------------------------------------------------------------------------------------------------------


def test_a_script_that_hangs_before_the_loop_is_killed_at_its_deadline() -> None:
    rig = Rig()
    rig.expect("a")
    rig.tick(60, 1)
    assert not rig.r.root.status.ended
    turn = rig.tick(62, 1)
    end = orders(turn)[1].end
    assert end is not None
    assert (end.kill, end.stack) == (True, True)
    assert rig.r.root.status is RunStatus.FAILED
