"""Broken generations, played by hand: members that are lost, groups that break, links that are cut, who goes on."""

import pytest

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Checkpoint, Refusal
from fallow.core.membership.state import RunPhase
from fallow.model import ChangeKind, Doing, Exit, MemberPhase, RunStatus
from world.rig import WAITS, Rig, logs, notices, orders, started


@notices("votes count of nodes that have not given up")
def test_a_vote_on_an_interrupting_plan_counts_only_from_one_that_has_given_the_old_generation_up() -> None:
    rig = started(2)
    rig.gone(2, signal=9)
    rig.say(1, prepared=2)
    assert rig.r.root.generation == 1
    rig.say(1, prepared=2, given_up=1)
    assert rig.r.root.generation == 2


@notices("votes have no deadline (rebuilding)")
def test_a_rebuild_has_a_deadline_of_its_own() -> None:
    rig = started(3)
    rig.gone(3, signal=9)
    rig.say(1, prepared=2, given_up=1)
    rig.tick(9, 1, 2)
    assert rig.ballot.members == [1, 2]
    rig.tick(11, 1, 2)
    assert rig.ballot.members == [1], "the other hears and does not vote"
    assert rig.end(2)


@notices("commits without proof that the old generation is over")
@notices("silence proves that a node has ended")
@notices("it is forgotten that the old generation steps until the boundary")
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


@notices("a suspended run forgets that the generation before may act", False)
@pytest.mark.parametrize("by_another_head", [False, True])
def test_a_run_without_members_does_not_begin_beside_the_generation_before_the_last(by_another_head: bool) -> None:
    """Nodes 1 and 2 are not heard. They may never have gone over to generation 2, whose newcomer is dead."""
    rig = started(2)
    rig.join("c")
    rig.vote()
    assert (rig.m.phase, rig.r.root.generation) == (RunPhase.SWITCHING, 2)
    rig.tick(13, 3, **WAITS)
    rig.gone(3, signal=9)
    assert rig.r.root.status is RunStatus.SUSPENDED
    if by_another_head:
        rig.restart()
    rig.join("d")
    rig.tick(rig.at + 5, 4)
    rig.vote()
    assert (rig.ballot.members, rig.ballot.awaited, rig.r.root.generation) == ([4], set(), 2), "nothing proves its end"
    rig.gone(1, reason="its job is over")
    assert rig.r.root.generation == rig.ballot.change.generation == rig.r.root.highest


@notices("a former leaver ends a generation that it was not in")
def test_a_former_leaver_that_is_heard_again_proves_nothing_of_the_generation_that_acts_now() -> None:
    """Nodes 1 and 2 may still step in generation 2. Node 4 alone must not begin beside them."""
    rig = started(3)
    rig.release(3)
    rig.vote()
    for n in (1, 2):
        rig.arrive(n, 2)
    rig.tick(13, 1, 2)
    assert rig.r.nodes[3].phase is MemberPhase.SILENT
    rig.restart(1, 2)
    rig.join("d")
    rig.vote()
    assert rig.r.root.generation == 3
    rig.say(3, passed_boundary=2, given_up=1, term=1, edition=1)
    rig.tick(rig.at + 13, 4, **WAITS)
    assert (rig.r.present(), rig.ballot.members) == ([4], [4])
    rig.say(4, prepared=rig.r.root.highest, given_up=3)
    assert rig.r.root.generation == 3, "nothing tells that generation 2 is over"


@notices("a loss goes unnoticed while all switch", True)
@pytest.mark.parametrize("was_heard", [True, False])
def test_a_leaver_that_the_others_have_left_behind_does_not_become_the_state(was_heard: bool) -> None:
    """Member 1 was heard after the switch, or its checkpoint turned up on disk."""
    rig = started(2)
    rig.release(2)
    rig.vote()
    checkpoint = Checkpoint(path="/c", generation=2, step=45)
    if was_heard:
        rig.say(1, generation=2, has_state=True, step=5)
        rig.say(1, step=50, saved=checkpoint)
    else:
        rig.put(ev.CheckpointFound(at=rig.at, checkpoint=checkpoint))
    rig.gone(1, signal=9)
    assert rig.r.root.status is RunStatus.SUSPENDED
    assert rig.r.nodes[2].phase is MemberPhase.GONE


@notices("votes that show a lost state count")
def test_where_votes_show_that_some_have_lost_the_state_those_who_have_it_go_on() -> None:
    rig = started(3)
    rig.gone(3, signal=9)
    rig.say(1, prepared=2, given_up=1)
    rig.say(2, prepared=2, given_up=1, has_state=False)
    assert (rig.r.root.generation, rig.ballot.change.generation, rig.ballot.members) == (1, 3, [1])


def test_a_survivor_that_is_asked_to_leave_while_others_go_on_without_it_is_let_go() -> None:
    rig = started(2)
    rig.join("c")
    rig.vote()
    rig.arrive(1, 2)
    rig.arrive(2, 2)
    rig.gone(2, signal=9)
    rig.release(3, reason="walltime")
    rig.vote()
    assert (rig.r.nodes[3].phase, rig.end(3).code, rig.m.order(3).end) == (MemberPhase.GONE, Exit.OK, rig.end(3))


@notices("a broken group is not rebuilt")
def test_a_first_exchange_whose_group_breaks_is_done_again() -> None:
    rig = started(2)
    rig.join("c")
    rig.vote()
    rig.say(3, given_up=2)
    rig.say(1, given_up=2)
    rig.tick(1, 1, 2, 3)
    assert rig.m.phase is RunPhase.REBUILDING


@notices("nobody looks at links")
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
    assert (rig.m.phase, rig.ballot.members) == (RunPhase.REBUILDING, [1, 2])


def test_who_is_cut_off_is_told_with_the_address_that_was_tried() -> None:
    rig = started(2)
    rig.join("c")
    turn = rig.say(1, refusal=Refusal(generation=2, reason="cut", unreachable=(3,), tried=("10.0.0.3:7001",)))
    turn += rig.say(2, prepared=2)
    assert logs(turn, "eject") == ["n2 (c) is gone: no connection between it and n0 (h1), tried 10.0.0.3:7001"]


# -- survivors, leavers and newcomers ----------------------------------------------------------------------------------


def test_a_leaver_that_was_kept_for_its_state_is_not_forgotten_at_the_next_loss() -> None:
    """Nor by another head."""
    rig = started(3)
    rig.release(1, reason="walltime")
    rig.vote()
    for n in (2, 3):
        rig.gone(n, signal=9)
    assert rig.ballot.members == [1]
    rig.join("d")
    rig.say(1, given_up=2, refusal=Refusal(generation=rig.r.root.highest, reason="cut"))
    rig.tick(1, 1, 4)
    assert (rig.ballot.members, rig.ballot.change.interrupt) == ([1], True)
    rig.restart(1, 4)
    assert (rig.ballot.members, rig.ballot.change.interrupt) == ([1], True)
    while rig.m.ballot is not None:
        rig.change()
    assert [done.members for done in rig.completed[1:]] == [["n0"], ["n0", "n3"], ["n3"]]


def test_why_a_generation_was_begun_that_never_became_complete_is_told_with_the_next() -> None:
    rig = started(3)
    rig.gone(3, signal=9)
    rig.vote()
    assert rig.m.phase is RunPhase.SWITCHING
    rig.gone(2, signal=7)
    rig.change()
    told = rig.completed[-1].reason
    assert "n2 (h3) is gone: killed by signal 9" in told
    assert "n1 (h2) is gone: killed by signal 7" in told


def test_what_has_changed_is_told_of_generations_that_became_complete() -> None:
    """A generation that broke before is no news by itself: who came and went with it is told with the next one."""
    rig = started(2)
    rig.join("c")
    rig.vote()
    for n in (1, 3):
        rig.arrive(n, 2)
    turn = rig.gone(2, signal=9)
    turn += rig.vote()
    for n in rig.r.members:
        turn += rig.arrive(n, rig.r.root.generation)
    assert rig.completed[-1].kind is ChangeKind.EJECT
    (data,) = [i.data for i in turn if isinstance(i, ev.Log) and i.kind == "eject" and "joined" in i.data]
    assert (data["joined"], data["left"]) == ({"n2": "c"}, ["n1"])
    assert data["tokens"] == {"n2": rig.r.nodes[3].token}


def test_another_head_tells_of_no_loss_again_and_finds_no_other_reason_for_it() -> None:
    rig = started(2)
    rig.gone(2, code=1)
    turn = rig.gone(1, signal=9)
    assert (rig.r.root.status, len(logs(turn, "lost"))) == (RunStatus.SUSPENDED, 1)
    assert logs(rig.restart(), "lost") == []
    assert rig.r.root.status is RunStatus.SUSPENDED


@pytest.mark.parametrize("by_another_head", [False, True])
def test_the_last_of_a_suspended_run_that_is_heard_again_goes_on_without_those_who_are_gone(
    by_another_head: bool,
) -> None:
    rig = started(2)
    rig.tick(13, 1, **WAITS)
    assert rig.r.nodes[2].phase is MemberPhase.SILENT
    rig.gone(1, signal=9)
    assert rig.r.root.status is RunStatus.SUSPENDED
    if by_another_head:
        rig.restart()
    rig.tick(rig.at + 4)
    rig.tick(rig.at + 2, 2, **WAITS)
    assert (rig.m.phase, rig.ballot.members, rig.orders[2].broken) == (RunPhase.REBUILDING, [2], 1)
    rig.change()
    assert rig.r.root.status is RunStatus.TRAINING


# -- groups that break -------------------------------------------------------------------------------------------------


def breaks(rig: Rig, n: int, *others: int) -> float:
    """The group breaks on a node, and then on others. Returns the seconds until something is done about it."""
    began, generation = rig.at, rig.r.root.generation
    for one in (n, *others):
        rig.say(one, given_up=generation, break_reason=f"connection reset on h{one}")
    while rig.m.phase is RunPhase.STEADY:
        rig.at += 0.1
        assert rig.at < began + 9
        rig.put(ev.Ticked(at=rig.at))
    return rig.at - began


@notices("groups that always break on one node are rebuilt for ever")
def test_a_node_on_which_every_group_breaks_is_ejected_and_the_others_go_on() -> None:
    """They break for the others as well, but later."""
    rig = started(3)
    waits = []
    for _ in range(2):
        waits.append(breaks(rig, 2, 1, 3))
        assert rig.ballot.members == [1, 2, 3]
        rig.change()
    assert waits == [pytest.approx(0.3, abs=0.11), pytest.approx(0.6, abs=0.11)]
    breaks(rig, 2, 1, 3)
    assert (rig.r.nodes[2].phase, rig.ballot.members) == (MemberPhase.GONE, [1, 3])
    why = "3 groups in a row broke at its step 0, the last because n1 (h2) has lost its group: connection reset on h2"
    assert rig.end(2).reason == why


def test_groups_that_break_at_different_steps_or_on_different_nodes_or_for_a_death_eject_nobody() -> None:
    rig = started(4)
    for step in range(6):
        for n in (1, 2, 3):
            rig.say(n, step=step)
        breaks(rig, 2)
        rig.change()
    for _ in range(2):
        for n in (1, 3):
            breaks(rig, n)
            rig.change()
    rig.say(2, given_up=rig.r.root.generation)
    rig.gone(4, signal=9)
    rig.change()
    breaks(rig, 2)
    rig.change()
    assert rig.r.members == [1, 2, 3]


def test_scripts_that_fail_and_are_restarted_eject_nobody() -> None:
    """No steps of theirs are known, and how often they have failed is counted by those who restart them."""
    rig = Rig(minimum=2)
    for host in ("h1", "h2"):
        rig.join(host, restarts=True)
    rig.change()
    for _ in range(5):
        assert breaks(rig, 2, 1) == pytest.approx(0.3, abs=0.11)
        rig.change()
    assert rig.r.members == [1, 2]


def test_a_node_that_can_never_build_the_group_in_place_of_a_broken_one_is_ejected() -> None:
    rig = started(3)
    rig.gone(3, signal=9)
    for _ in range(3):
        assert rig.ballot.members == [1, 2]
        refusal = Refusal(generation=rig.r.root.highest, reason="no port is free")
        rig.say(2, given_up=1, refusal=refusal)
        rig.tick(rig.at + 2, 1, 2)
    assert rig.ballot.members == [1]
    assert "n1 (h2) could not: no port is free" in rig.r.nodes[2].ended


# -- links and waits ---------------------------------------------------------------------------------------------------


@notices("the first exchange may last for ever")
def test_a_first_exchange_that_seems_to_end_never_is_left_more_time_with_each_attempt() -> None:
    rig = started(2)
    rig.join("c")
    rig.vote()
    attempts = []
    while rig.at < 40:
        rig.wait(rig.at + 1)
        if rig.m.phase is RunPhase.REBUILDING:
            attempts.append(rig.at)
            rig.vote()
    assert [later - earlier for earlier, later in zip([0, *attempts], attempts, strict=False)] == [6, 11, 21]


def test_a_first_exchange_in_which_somebody_still_receives_goes_on() -> None:
    rig = started(2)
    rig.join("c")
    rig.vote()
    for at in range(1, 30):
        rig.at = at
        for n, stalled_s in ((1, at), (2, at), (3, 0.5)):
            rig.say(n, doing=Doing.WAITING, stalled_s=float(stalled_s))
        rig.put(ev.Ticked(at=at))
        assert rig.m.phase is RunPhase.SWITCHING


def test_a_newcomer_is_not_kept_out_by_a_look_at_the_links() -> None:
    rig = started(2)
    rig.wait(6)
    rig.join("c")
    assert rig.m.phase is RunPhase.PROBING
    rig.vote()
    assert (rig.m.phase, rig.ballot.members) == (RunPhase.PREPARING, [1, 2, 3])


def cannot_reach(rig: Rig, n: int, *others: int) -> list[ev.Instruction]:
    refusal = Refusal(generation=rig.r.root.highest, reason="cut", unreachable=others)
    return rig.say(n, given_up=rig.orders[n].broken, refusal=refusal)


def test_a_rebuild_waits_a_moment_for_the_votes_that_tell_who_is_cut_off() -> None:
    """Node 2 never votes, and the first to notice is younger than it."""
    rig = started(4)
    rig.gone(4, signal=9)
    cannot_reach(rig, 3, 2)
    assert rig.r.alive(2)
    cannot_reach(rig, 1, 2)
    assert (rig.r.alive(2), rig.ballot.members) == (False, [1, 3])
    rig.change()
    assert "n1 (h2) is gone: no connection between it and n2 (h3)" in rig.completed[-1].reason


def test_without_further_votes_it_is_decided_after_a_second_who_is_cut_off() -> None:
    rig = started(4)
    rig.gone(4, signal=9)
    cannot_reach(rig, 3, 2)
    rig.tick(0.9, 1, 2, 3)
    assert rig.r.alive(2)
    rig.tick(1.1, 1, 2, 3)
    assert rig.r.alive(3), "what has come since may not have been read"
    rig.tick(1.2, 1, 2, 3)
    assert not rig.r.alive(3), "of the two the younger"


def test_members_that_do_not_reach_each_other_in_a_planned_change_are_left_alone_for_a_while() -> None:
    rig = started(2)
    rig.join("c")
    cannot_reach(rig, 1, 2)
    cannot_reach(rig, 2, 1)
    rig.say(3, prepared=2)
    attempts = [at for at in range(1, 20) if orders(rig.tick(at, 1, 2, 3)) and rig.m.phase is RunPhase.PREPARING]
    assert attempts[0] == 10, "as long as a planned change may take"


@pytest.mark.parametrize("makes_progress", [False, True])
def test_waiting_to_no_end_three_times_at_one_step_ends_the_run(makes_progress: bool) -> None:
    rig = started(2)
    for number in range(4):
        generation = rig.r.root.generation
        while rig.r.root.generation == generation and not rig.r.root.status.ended:
            rig.wait(rig.at + 1)
            if rig.m.phase is RunPhase.PROBING:
                rig.vote()
            elif rig.m.ballot is not None:
                rig.change(step=3 + number * makes_progress)
    assert rig.r.root.status is (RunStatus.TRAINING if makes_progress else RunStatus.FAILED)
    assert makes_progress or rig.r.root.message.startswith("step 3: in 3 generations one after the other all members")
