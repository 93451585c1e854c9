"""The membership machine, played by hand: who computes in which generation, and what nodes are told."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.core.links import to_drop
from fallow.core.nodes import events as ev
from fallow.core.nodes.events import Turn
from fallow.core.nodes.messages import (
    Checkpoint,
    Fault,
    Finish,
    Refusal,
)
from fallow.core.nodes.state import RunPhase
from fallow.core.nodes.tables import RUN
from fallow.model import ChangeKind, Doing, MemberPhase, RunStatus
from world.rig import CONTRACT, Rig, both, logs, orders, started

WAITS = {"doing": Doing.WAITING, "stalled_s": 20.0}


def test_waits_for_the_minimum_and_commits_only_with_every_vote() -> None:
    rig = Rig(minimum=2)
    rig.join("a")
    assert rig.m.phase is RunPhase.EMPTY
    rig.join("b")
    assert rig.m.phase is RunPhase.PREPARING
    g = rig.r.root.highest
    rig.say(1, prepared=g)
    assert rig.r.root.generation == 0
    turn = rig.say(2, prepared=g)
    assert rig.r.root.generation == g
    assert all(order.committed == g for order in orders(turn).values())
    assert "root" in turn.writes


def test_a_vote_for_another_generation_a_repeated_or_an_overtaken_report_counts_for_nothing() -> None:
    rig = started(1)
    rig.join("b")
    rig.say(1, prepared=99 - 97)
    old = rig.said[2]
    rig.put(ev.Reported(at=0, host="b", report=msgspec.structs.replace(old, seq=old.seq - 1, prepared=2)))
    assert rig.r.root.generation == 1
    rig.say(2, prepared=2)
    assert rig.r.root.generation == 2


def test_joins_and_leaves_that_are_known_together_are_one_generation() -> None:
    rig = started(2)
    rig.join("c")
    rig.join("d")
    rig.release(1, reason="walltime")
    rig.change()
    rig.change()
    assert rig.r.members == [2, 3, 4]
    assert rig.r.history.completed[-1].kind is ChangeKind.MIXED
    assert "walltime" in rig.r.history.completed[-1].reason


def test_a_killed_member_interrupts_the_others_at_once() -> None:
    rig = started(3)
    turn = rig.gone(2, signal=9)
    told = orders(turn)
    assert set(told) == {1, 3}
    assert all(o.broken == 1 and o.plan is not None and o.plan.interrupt for o in told.values())
    rig.change(7)
    assert (rig.r.members, rig.r.history.completed[-1].kind) == ([1, 3], ChangeKind.EJECT)


def test_a_vote_on_an_interrupting_plan_counts_only_from_one_that_has_given_the_old_generation_up() -> None:
    rig = started(2)
    rig.gone(2, signal=9)
    rig.say(1, prepared=2)
    assert rig.r.root.generation == 1
    rig.say(1, prepared=2, given_up=1)
    assert rig.r.root.generation == 2


def test_a_rebuild_has_a_deadline_of_its_own() -> None:
    rig = started(3)
    rig.gone(3, signal=9)
    rig.say(1, prepared=2, given_up=1)
    rig.tick(9, 1, 2)
    assert rig.ballot is not None
    assert rig.ballot.members == [1, 2]
    rig.tick(11, 1, 2)
    assert rig.ballot.members == [1], "the other hears and does not vote"
    assert rig.m.order(2).end is not None


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


def test_a_first_exchange_that_does_not_end_or_whose_group_breaks_is_done_again() -> None:
    rig = started(2)
    rig.join("c")
    rig.vote()
    assert rig.m.phase is RunPhase.SWITCHING
    rig.wait(7)
    assert (rig.m.phase, rig.m.order(1).broken) == (RunPhase.REBUILDING, 2)
    rig = started(2)
    rig.join("c")
    rig.vote()
    rig.say(3, given_up=2)
    rig.say(1, given_up=2)
    rig.tick(1, 1, 2, 3)
    assert rig.m.phase is RunPhase.REBUILDING


def test_a_first_exchange_of_survivors_that_does_not_end_is_done_again() -> None:
    """They have given up the generation before, and report it until they have arrived."""
    rig = started(3)
    rig.gone(3, signal=9)
    rig.vote()
    assert rig.m.phase is RunPhase.SWITCHING
    rig.wait(7)
    assert (rig.m.phase, rig.ballot.change.generation) == (RunPhase.REBUILDING, 3)


def test_a_leaver_stays_known_until_its_processes_have_ended() -> None:
    """Else its last reports would bring it back as a newcomer."""
    rig = started(2)
    rig.release(2)
    rig.change()
    assert rig.r.nodes[2].phase is MemberPhase.GONE
    rig.gone(2, code=0)
    assert list(rig.r.nodes) == [1]


def test_a_joiner_that_dies_before_the_commit_burns_only_its_number() -> None:
    rig = started(1)
    rig.join("b")
    turn = rig.gone(2, signal=9)
    assert orders(turn)[1].plan is None
    assert orders(turn)[1].broken == 0
    rig.tick(2, 1)
    rig.join("c")
    assert rig.r.root.highest == 3


def test_death_after_the_commit_interrupts_both_generations() -> None:
    rig = started(2)
    rig.join("c")
    rig.vote()
    told = orders(rig.gone(2, signal=9))
    assert {n: o.broken for n, o in told.items() if o.end is None} == {1: 2, 3: 2}


def test_nothing_is_committed_while_an_old_generation_may_still_act() -> None:
    """Node 1 alone has the state, is not heard any more, and may compute on; node 2 has voted, but cannot know."""
    rig = started(1)
    rig.join("b")
    rig.vote()
    rig.tick(13, 2, **WAITS)
    assert rig.r.nodes[1].phase is MemberPhase.SILENT
    rig.say(2, prepared=3, given_up=2)
    assert rig.r.root.generation == 2, "nothing tells that generation 1 is over"
    rig.tick(30, 2)
    assert rig.r.root.generation == 2
    rig.gone(1)
    assert rig.r.root.generation == 3, "now Slurm says so"


def test_a_leaver_that_the_others_have_left_behind_does_not_become_the_state() -> None:
    rig = started(2)
    rig.release(2)
    rig.vote()
    rig.say(1, generation=2, has_state=True, step=5)
    rig.say(1, step=50, saved=Checkpoint(path="/c", generation=2, step=45))
    rig.gone(1, signal=9)
    assert rig.r.root.status is RunStatus.SUSPENDED
    assert rig.r.nodes[2].phase is MemberPhase.GONE


def test_a_generation_is_over_when_a_leaver_has_given_it_up() -> None:
    rig = started(2)
    rig.join("c")
    rig.release(1)
    rig.vote()
    rig.gone(2, signal=9)
    assert rig.ballot is not None
    for n in rig.ballot.members + rig.ballot.change.leavers:
        rig.say(n, prepared=rig.r.root.highest, given_up=2)
    assert rig.r.root.generation == rig.r.root.highest


def test_a_member_that_is_heard_again_is_taken_back() -> None:
    rig = started(3)
    rig.tick(13, 1, 3, **WAITS)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT
    assert rig.m.phase is RunPhase.REBUILDING
    turn = rig.say(2)
    turn = both(turn, rig.tick(16, 1, 2, 3))
    assert rig.r.nodes[2].phase is MemberPhase.MEMBER
    assert all(o.end is None for o in orders(turn).values())
    rig.change()
    assert rig.r.members == [1, 2, 3]


def test_one_that_is_heard_again_after_the_others_have_gone_on_waits_for_a_seat() -> None:
    rig = started(3)
    rig.tick(13, 1, 3, **WAITS)
    rig.change()
    assert rig.r.members == [1, 3]
    rig.tick(16, 1, 2, 3)
    assert rig.m.phase is RunPhase.PREPARING
    rig.change()
    assert rig.r.members == [1, 3, 2]
    assert rig.r.nodes[2].seat > rig.r.nodes[3].seat


def test_a_head_that_was_stopped_for_any_time_ejects_nobody() -> None:
    rig = started(3)
    rig.tick(3, 1, 2, 3)
    for stop in (20.0, 600.0, 86400.0):
        rig.at += stop
        turn = rig.put(ev.Ticked(at=rig.at))
        for n in (1, 2, 3):
            turn = both(turn, rig.say(n))
        turn = both(turn, rig.put(ev.Ticked(at=rig.at + 0.2)))
        assert not logs(turn, "eject")
    assert len(rig.r.present()) == 3


def test_if_nobody_is_heard_the_head_is_cut_off_and_nobody_is_silent() -> None:
    rig = started(3)
    rig.tick(200)
    assert len(rig.r.present()) == 3
    assert rig.m.phase is RunPhase.STEADY


def test_steps_of_the_others_are_a_sign_of_life() -> None:
    """Though they wait for node 2, and it is not heard: no step is finished without it."""
    rig = started(3)
    rig.tick(1, 1, 2, 3)
    for at in range(2, 60):
        rig.tick(at, 1, 3, step=at // 5, **WAITS)
    assert len(rig.r.present()) == 3
    rig.tick(80, 1, 3, **WAITS)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT


def test_a_leaver_that_alone_has_the_state_hands_it_over_first() -> None:
    rig = started(1)
    rig.r.root.limit = 1
    rig.join("b")
    rig.release(1, reason="walltime")
    assert rig.ballot is not None
    assert (rig.ballot.change.kind, rig.ballot.members) == (ChangeKind.ABSORB, [1, 2])
    rig.change()
    rig.change()
    assert rig.r.members == [2]
    assert [d.kind for d in rig.r.history.completed] == [ChangeKind.START, ChangeKind.ABSORB, ChangeKind.RELEASE]


def test_last_member_leaving_suspends_with_a_checkpoint_and_it_goes_on_from_there() -> None:
    rig = started(1)
    rig.release(1, reason="walltime")
    rig.vote()
    rig.say(1, saved=Checkpoint(path="/c", generation=1, step=5))
    rig.say(1, left=2, given_up=2)
    assert rig.r.root.status is RunStatus.SUSPENDED
    rig.join("b")
    assert rig.ballot is not None
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


def test_a_deadline_counts_for_one_that_was_asked_to_leave_without_one() -> None:
    rig = started(2)
    rig.put(ev.Ends(at=0, node=2, ends_at=100))
    rig.tick(70, 1, 2)
    rig.limit(1)
    rig.tick(98, 1, 2)
    assert rig.r.nodes[2].phase is MemberPhase.GONE


def test_who_is_asked_to_leave_by_a_time_is_gone_by_then() -> None:
    rig = started(2)
    rig.release(2, reason="urgent", by=4.0)
    rig.tick(3.5, 1, 2)
    assert rig.r.nodes[2].phase is MemberPhase.LEAVING
    turn = rig.tick(4, 1, 2)
    assert rig.r.nodes[2].phase is MemberPhase.GONE
    assert orders(turn)[1].broken == 1


def test_limits() -> None:
    rig = started(3)
    rig.limit(2)
    rig.change()
    assert rig.r.members == [1, 2]
    rig.join("d")
    assert rig.m.phase is RunPhase.STEADY
    rig = started(1, shards=1)
    rig.join("b")
    assert rig.r.members == [1], "never more workers than shards"


def test_the_group_that_broke_without_a_death_is_rebuilt_as_it_was() -> None:
    rig = started(2)
    rig.say(1, given_up=1)
    assert rig.m.phase is RunPhase.STEADY, "the news of a death may still come"
    rig.tick(1, 1, 2)
    assert rig.m.phase is RunPhase.REBUILDING
    rig.change()
    rig.tick(5, 1, 2)
    assert rig.r.members == [1, 2]
    assert rig.r.root.generation == rig.r.root.highest == 2


def test_a_hang_is_ejected_and_its_stack_is_asked_for() -> None:
    rig = started(3)
    for at in range(1, 41):
        rig.at = at
        rig.say(1, doing=Doing.WAITING, stalled_s=at - 0.1)
        rig.say(2, doing=Doing.WORKING, stalled_s=float(at))
        turn = rig.say(3, doing=Doing.WAITING, stalled_s=at - 0.1)
        turn = both(turn, rig.put(ev.Ticked(at=at)))
    end = orders(turn)[2].end
    assert end is not None
    assert end.kill
    assert end.stack
    rig.change()
    assert rig.r.members == [1, 3]


def test_a_stopped_process_is_ejected_long_before_its_lease() -> None:
    rig = started(2)
    rig.tick(1, 1)
    rig.say(2, stopped_s=0.6)
    rig.put(ev.Ticked(at=1.25))
    assert rig.r.nodes[2].phase is MemberPhase.GONE


def test_slow_links_are_looked_at_and_eject_nobody_a_cut_one_drops_the_younger() -> None:
    rig = started(3)
    rig.wait(6)
    assert rig.m.phase is RunPhase.PROBING
    rig.vote()
    assert (rig.m.phase, rig.r.root.generation) == (RunPhase.STEADY, 1)
    rig.wait(9)
    assert rig.m.phase is RunPhase.STEADY, "not again at once"
    rig.wait(12)
    assert rig.m.phase is RunPhase.PROBING
    g = rig.r.root.highest
    rig.say(1, refusal=Refusal(generation=g, reason="cut", unreachable=(3,)))
    rig.say(2, prepared=g)
    rig.say(3, refusal=Refusal(generation=g, reason="cut", unreachable=(1,)))
    assert rig.r.nodes[3].phase is MemberPhase.GONE
    assert rig.ballot is not None
    assert (rig.m.phase, rig.ballot.members) == (RunPhase.REBUILDING, [1, 2])


def test_a_newcomer_that_is_cut_off_is_left_out_and_members_that_are_train_on() -> None:
    rig = started(2)
    rig.join("c")
    rig.say(1, refusal=Refusal(generation=2, reason="cut", unreachable=(3,)))
    rig.say(2, prepared=2)
    assert (rig.r.nodes[3].phase, rig.m.phase) == (MemberPhase.GONE, RunPhase.STEADY)
    rig = started(2)
    rig.join("c")
    rig.say(1, refusal=Refusal(generation=2, reason="cut", unreachable=(2,)))
    rig.say(3, prepared=2)
    rig.say(2, refusal=Refusal(generation=2, reason="cut", unreachable=(1,)))
    assert (rig.r.nodes[3].phase, rig.m.phase, rig.r.members) == (MemberPhase.READY, RunPhase.STEADY, [1, 2])


def test_waiting_to_no_end_three_times_in_a_row_ends_the_run() -> None:
    rig = started(2)
    for _ in range(400):
        if rig.r.root.status.ended:
            break
        rig.wait(rig.at + 1)
        if rig.m.phase is RunPhase.PROBING:
            rig.vote()
        elif rig.m.state.ballot is not None:
            rig.change(step=3)
    assert rig.r.root.status is RunStatus.FAILED
    assert "in 3 generations one after the other" in rig.r.root.message


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


def done(rig: Rig, n: int, digest: str = "d") -> Turn:
    return rig.say(n, finish=Finish(generation=1, steps=9, digest=digest))


def test_the_end_the_main_members_exit_code_decides() -> None:
    rig = started(2)
    done(rig, 1)
    done(rig, 2)
    rig.gone(2, code=3)
    assert not rig.r.root.status.ended
    rig.gone(1, code=0)
    assert (rig.r.root.status, rig.r.root.message) == (RunStatus.FINISHED, "")
    rig = started(2)
    done(rig, 1)
    rig.gone(1, code=3)
    assert rig.r.root.status is RunStatus.FAILED
    rig = started(2)
    turn = done(rig, 2)
    assert orders(turn)[1].finish is not None, "whoever waits in vain hears of it"
    rig.gone(1, signal=9)
    assert "ended after the training, before its script had" in rig.r.root.message
    rig = started(2)
    done(rig, 1)
    done(rig, 2)
    rig.tick(12, 1, 2)
    assert rig.r.root.status is RunStatus.FINISHED
    assert "is not known" in rig.r.root.message


def test_the_last_words_come_with_the_news_of_the_end() -> None:
    rig = started(1)
    last = msgspec.structs.replace(rig.said[1], seq=99, finish=Finish(generation=1, steps=9, digest="d"))
    rig.gone(1, code=0, report=last)
    assert rig.r.root.status is RunStatus.FINISHED


def test_a_script_that_never_reaches_the_loop_or_deserts_it_fails_the_run() -> None:
    rig = Rig()
    rig.put(ev.Expected(at=0, host="a", token="a", boot=1, slots=1, entry="a"))
    rig.gone(1, code=0)
    assert rig.r.root.status is RunStatus.FAILED
    assert "run.updates()" in rig.r.root.message
    rig = started(2)
    rig.gone(2, code=0)
    assert "inside of the run.updates loop" in rig.r.root.message


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
    assert rig.ballot is not None
    assert rig.ballot.members == [1, 3]
    rig.change()
    rig.join("d")
    rig.tick(499, 1, 3, 4)
    assert rig.m.phase is RunPhase.STEADY
    rig.tick(502, 1, 3, 4)
    assert rig.m.phase is RunPhase.PREPARING


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


def test_in_a_scripted_run_no_standby_takes_a_lost_ones_place() -> None:
    rig = started(2, scripted=True)
    rig.limit(2)
    rig.join("c")
    rig.gone(2, signal=9)
    rig.change()
    assert (rig.r.members, rig.m.phase) == ([1], RunPhase.STEADY)


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


def test_a_node_that_claims_to_obey_a_newer_head_is_not_heard_and_ends_nobody() -> None:
    rig = started(2)
    turn = rig.say(2, term=5, fault=Fault(code=1, message="bad"))
    assert (turn.writes, turn.then) == ({}, [])
    for at in range(1, 14):
        rig.tick(at, 1, **WAITS)
        rig.say(2, term=5)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT


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


def test_every_phase_has_a_row() -> None:
    assert set(RUN) == set(RunPhase)


NAMES = list(range(6))
PAIRS = [(a, b) for a in NAMES for b in NAMES[:a]]


@given(st.sets(st.sampled_from(PAIRS)), st.sets(st.sampled_from(NAMES), min_size=1))
def test_those_left_reach_each_other_and_one_has_the_state(cut: set[tuple[int, int]], holders: set[int]) -> None:
    told: dict[int, list[int]] = {}
    for a, b in cut:
        told.setdefault(a, []).append(b)
    left = set(NAMES) - set(to_drop(told, NAMES, sorted(holders)))
    assert not [pair for pair in cut if left.issuperset(pair)]
    assert left & holders
