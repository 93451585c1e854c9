"""Each guard is needed: without it a test by hand fails, or a history of the world shows a violation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from world import test_absent as absent
from world import test_failures as failures
from world import test_planned as planned
from world import test_rebuilt as rebuilt
from world import test_records as records
from world import test_saved as saved
from world.mutants import MUTANTS
from world.world import play

IN_HISTORIES = {
    "half of the votes suffice",
    "burned numbers are used again",
    "orders go out before the write",
    "the store does not fence",
    "seats are not written",
    "survivors are mixed with those who wait for the state",
    "leavers are not taken out of the delta",
    "nothing is said twice",
    "a member that lost its seat stays a member",
}
"""Noticed within 150 histories."""

BY_HAND: dict[str, Callable[[], None]] = {
    "commits without proof that the old generation is over": (
        rebuilt.test_nothing_is_committed_while_an_old_generation_may_still_act
    ),
    "silence proves that a node has ended": rebuilt.test_nothing_is_committed_while_an_old_generation_may_still_act,
    "it is forgotten that the old generation steps until the boundary": (
        rebuilt.test_nothing_is_committed_while_an_old_generation_may_still_act
    ),
    "votes count of nodes that have not given up": (
        rebuilt.test_a_vote_on_an_interrupting_plan_counts_only_from_one_that_has_given_the_old_generation_up
    ),
    "votes that show a lost state count": (
        rebuilt.test_where_votes_show_that_some_have_lost_the_state_those_who_have_it_go_on
    ),
    "what a node held before it was away counts": (
        records.test_plans_are_deltas_to_members_and_whole_lists_to_newcomers
    ),
    "numbers that a store lost are not heard of": absent.test_a_store_that_went_back_in_time,
    "a new head does not listen": (
        absent.test_a_head_that_comes_back_decides_nothing_before_it_has_heard_all_or_time_is_up
    ),
    "a tick comes ahead of what lies in the inbox": (
        absent.test_after_an_absence_of_the_head_connections_have_time_to_come_back
    ),
    "the clock goes on though nobody is heard": (
        absent.test_after_an_absence_of_the_head_connections_have_time_to_come_back
    ),
    "steps are no sign of life": absent.test_steps_of_the_others_are_a_sign_of_life,
    "silence counts though nobody waits": (
        absent.test_a_silent_member_is_given_up_only_when_a_member_that_is_heard_waits_for_it
    ),
    "overtaken reports count": (
        planned.test_s5_a_vote_for_another_generation_a_repeated_or_an_overtaken_report_counts_for_nothing
    ),
    "a node that is heard again is ended": (
        absent.test_one_that_thaws_while_the_others_vote_is_with_them_again_in_another_generation
    ),
    "votes have no deadline (rebuilding)": rebuilt.test_a_rebuild_has_a_deadline_of_its_own,
    "votes have no deadline (planned)": (
        planned.test_a_newcomer_that_does_not_vote_is_given_up_and_one_that_hears_nothing_waits
    ),
    "leaving has no deadline": planned.test_who_is_asked_to_leave_by_a_time_is_gone_by_then,
    "a loss goes unnoticed while all switch": (
        rebuilt.test_a_leaver_that_the_others_have_left_behind_does_not_become_the_state
    ),
    "a broken group is not rebuilt": (
        rebuilt.test_a_first_exchange_that_does_not_end_or_whose_group_breaks_is_done_again
    ),
    "nobody comes back into a broken generation": absent.test_a_store_that_went_back_in_time,
    "nobody looks at links": (rebuilt.test_slow_links_are_looked_at_and_eject_nobody_a_cut_one_drops_the_younger),
    "the first exchange may last for ever": (
        rebuilt.test_a_first_exchange_that_does_not_end_or_whose_group_breaks_is_done_again
    ),
    "a deserter is not waited for": partial(
        failures.test_a_deserter_is_waited_for_until_its_exit_code_tells_whether_it_is_to_blame, True, 3
    ),
    "a spoiled ballot is committed": planned.test_a_joiner_that_dies_before_the_commit_burns_only_its_number,
    "a checkpoint of a history that was left is loaded": (
        saved.test_going_back_drops_what_members_hold_and_what_was_saved_since
    ),
    "what a node held before a generation that the store lost counts": (
        absent.test_what_a_node_holds_from_before_a_generation_that_the_store_lost_does_not_count
    ),
    "claims to obey a newer head are believed": (
        absent.test_a_node_that_claims_to_obey_a_newer_head_is_not_heard_and_ends_nobody
    ),
    "no connection may come back": (
        absent.test_a_newcomer_that_does_not_hear_of_its_change_after_an_absence_is_asked_again
    ),
    "groups that always break on one node are rebuilt for ever": (
        rebuilt.test_a_node_on_which_every_group_breaks_is_ejected_and_the_others_go_on
    ),
    "a leaver that hangs is waited for": partial(
        absent.test_a_node_that_hangs_is_ejected_from_a_generation_in_which_nobody_computes_yet, True
    ),
    "of nodes that are stuck all are to blame": (
        absent.test_of_nodes_that_are_all_stuck_the_one_whose_device_computes_is_to_blame
    ),
    "each release is a generation": partial(
        planned.test_nodes_that_are_released_in_one_turn_leave_in_one_generation, 2
    ),
    "a checkpoint that turns up does not stop a start": (
        saved.test_one_that_turns_up_after_the_run_went_on_from_before_it_is_set_aside
    ),
    "finished nodes are not counted": failures.test_the_end_the_main_members_exit_code_decides,
    "a failed script is not noticed": (
        failures.test_the_same_exception_on_two_nodes_ends_the_run_another_one_is_the_nodes_own
    ),
    "nodes are forgotten though their end is not proved": (
        absent.test_one_that_thaws_behind_a_commit_without_it_gives_up_what_it_had_and_begins_as_a_newcomer_does
    ),
}


def histories_until_noticed(name: str, most: int) -> int:
    """In which history the missing guard is noticed, from 1; 0: in none."""
    for number in range(most):
        try:
            with MUTANTS[name]():
                play(300_000 + number, mutant=name)
        except (AssertionError, LookupError):
            return number + 1
    return 0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_guard_is_noticed(name: str) -> None:
    if name in IN_HISTORIES:
        assert histories_until_noticed(name, 150)
        return
    BY_HAND[name]()
    with MUTANTS[name](), pytest.raises(Exception):  # noqa: B017
        BY_HAND[name]()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["a node that is heard again is ended", "steps are no sign of life"])
def test_many_histories_notice_by_themselves(name: str) -> None:
    assert histories_until_noticed(name, 2000)
