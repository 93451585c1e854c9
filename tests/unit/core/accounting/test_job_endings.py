"""How jobs end: whose doing it was, what follows for the run, and that none of ours lives on for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fallow.core.accounting.cancelled import VERDICT_S, awaits_verdict
from fallow.head.peers.agents import agent_gone, give_up_agent
from fallow.head.state.book import StoredRun
from fallow.model import (
    AllocationKind,
    AllocationState,
    Exit,
    RunStatus,
)
from runs import NOW, Nodes
from slurm_side import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.parametrize("renewed", [True, False])
def test_a_job_that_the_head_has_let_go_of_is_cancelled_and_the_end_of_a_batch_script_is_not(
    desk: Desk, renewed: bool
) -> None:
    desk.run.record.base_wanted = False
    lost = desk.hold(AllocationKind.BASE, AllocationState.LOST, renewed=renewed)
    given_up = desk.hold(AllocationKind.BASE, AllocationState.ENDED, renewed=renewed)
    elected = desk.hold(AllocationKind.BASE, AllocationState.ENDED, renewed=renewed, end_code=Exit.OK)
    by_itself = desk.hold(AllocationKind.BASE, AllocationState.ENDED, renewed=renewed, left_at=NOW + 29.0)
    preempted = desk.hold(AllocationKind.BASE, AllocationState.ENDED, renewed=renewed)
    harvest = desk.hold(state=AllocationState.ENDED, end_code=Exit.OK)
    jobs = [desk.job(a) for a in (given_up, elected, by_itself, harvest)]
    turn = desk.poll(desk.job(lost, "PENDING"), *jobs, desk.job(preempted, preempt_at=NOW))
    assert {token for _, token, _ in turn.cancels} == {lost.token, given_up.token}
    # While Slurm ends a job, it is not cancelled again.
    assert desk.poll(desk.job(given_up), after_s=5.0).cancels == []


def test_somebody_elses_job_of_the_same_number_is_left_alone(desk: Desk) -> None:
    given_up = desk.hold(AllocationKind.BASE, AllocationState.ENDED, submit_at=NOW)
    theirs = replace(desk.job(given_up, submit_at=NOW + 100.0), name="theirs")
    assert desk.poll(theirs).cancels == []
    with_the_token = replace(theirs, job_id="999", comment=given_up.token)
    assert desk.poll(with_the_token).cancels == []


def test_a_base_job_that_slurm_requeues_is_taken_up_again(desk: Desk) -> None:
    base = desk.hold(AllocationKind.BASE)
    desk.poll(desk.job(base, submit_at=NOW))
    turn = desk.turn()
    Nodes(desk.run).come(turn, base, "n1")
    base.warned = True
    turn.release_allocation(desk.run, base, "warned by Slurm with signal 15: preempted or cancelled")
    agent_gone(turn, desk.run, base, "n1", "given back as planned")
    assert not base.live
    turn = desk.poll(desk.job(base, "COMPLETING", submit_at=NOW + 30.0), after_s=2.0)
    assert (turn.submissions, turn.cancels) == ([], []), "Slurm has not said yet how it ends"
    turn = desk.poll(desk.job(base, "PENDING", submit_at=NOW + 30.0, reason="BeginTime"), after_s=2.0)
    assert base.state is AllocationState.PENDING
    assert (base.agents, base.asked_at, base.warned, base.nodes) == ({}, None, False, [])
    assert desk.book.allowed(base.public_key)
    assert turn.cancels == []
    assert AllocationKind.BASE not in [desk.run.allocations[t].kind for _, t in turn.submissions]
    desk.poll(desk.job(base, submit_at=NOW + 30.0), after_s=2.0)
    assert base.state is AllocationState.RUNNING
    assert set(base.spans) == {f"{base.job_id}.1", base.job_id}


@pytest.mark.parametrize("preempted", [True, False])
def test_slurm_says_whether_a_warned_base_job_was_preempted_or_cancelled(desk: Desk, preempted: bool) -> None:
    base = desk.hold(AllocationKind.BASE)
    desk.poll(desk.job(base, submit_at=NOW))
    turn = desk.turn()
    base.warned = True
    turn.release_allocation(desk.run, base, "warned by Slurm with signal 15: preempted or cancelled")
    agent_gone(turn, desk.run, base, "n1", "given back as planned")
    assert desk.poll(desk.job(base, "COMPLETING"), after_s=2.0).submissions == []
    more = {"preempt_at": NOW} if preempted else {}
    turn = desk.poll(desk.job(base, "PREEMPTED" if preempted else "CANCELLED", **more), after_s=2.0)
    if preempted:
        kinds = [desk.run.allocations[token].kind for _, token in turn.submissions]
        assert kinds.count(AllocationKind.BASE) == 1
    else:
        assert turn.submissions == []
        assert desk.run.root.status is RunStatus.CANCELLED
        assert desk.run.root.message == f"job {base.job_id}, its base job, was cancelled"


def test_a_run_outlives_its_cancelled_base_job_where_the_user_says_so(tmp_path: Path) -> None:
    desk = Desk(tmp_path, outlives_base=True)
    base = desk.hold(AllocationKind.BASE)
    turn = desk.poll(desk.job(base, "CANCELLED"))
    assert not desk.run.ended
    kinds = {desk.run.allocations[token].kind for _, token in turn.submissions}
    assert kinds == {AllocationKind.HARVEST}


def test_keys_are_kept_until_slurm_shows_that_the_job_is_over(desk: Desk) -> None:
    base = desk.hold(AllocationKind.BASE)
    key_file = desk.book.paths.run(desk.run.id).key(base.token)
    desk.book.end_allocation(desk.run, base, "agent on n1 silent for 16 s")
    assert desk.book.allowed(base.public_key) and key_file.exists()
    desk.poll(desk.job(base, "FAILED"))
    assert not desk.book.allowed(base.public_key)
    assert desk.book.take_revoked() == [base.public_key]
    assert not key_file.exists()


def test_nothing_waits_for_ever_for_the_word_of_slurm(desk: Desk) -> None:
    """A job may complete for hours on a node that does not answer."""
    base = desk.hold(AllocationKind.BASE, AllocationState.ENDED, asked_at=NOW, left_at=NOW + 5.0)
    assert [awaits_verdict(base, NOW + s) for s in (VERDICT_S + 4.0, VERDICT_S + 5.0)] == [True, False]


def test_a_node_whose_agent_was_given_up_is_gone_for_certain_when_its_job_is_over(desk: Desk) -> None:
    """Silence is no proof. Before there is one, nobody may act in its place."""
    nodes, turn = Nodes(desk.run), desk.turn()
    silent, other = desk.hold(), desk.hold()
    number = nodes.come(turn, silent, "n1")
    nodes.come(turn, other, "n2")
    give_up_agent(turn, desk.run, silent, "n1", "agent on n1 silent for 700 s")
    assert not silent.live and not desk.run.roster.nodes[number].proved_gone
    turn = desk.poll(desk.job(silent), desk.job(other))
    assert [token for _, token, _ in turn.cancels] == [silent.token]
    assert not desk.run.roster.nodes[number].proved_gone
    desk.poll(desk.job(silent, "CANCELLED"), desk.job(other))
    assert silent.settled
    desk.poll(desk.job(other))
    assert number not in desk.run.roster.nodes
    assert desk.run.roster.standbys() == [] and len(desk.run.roster.nodes) == 1


def test_a_run_that_is_made_anew_keeps_the_keys_that_were_about_to_go(desk: Desk) -> None:
    """The turn that let go of an allocation has failed: its agents still need the file."""
    run, base = desk.run, desk.hold(AllocationKind.BASE)
    desk.book.close(run, base)
    desk.book.make_anew(run, StoredRun(run.spec, run.record, run.roster, run.allocations), 1, 0.0)
    assert desk.book.take_revoked() == []
    assert desk.book.allowed(base.public_key) and desk.book.paths.run(run.id).key(base.token).exists()
