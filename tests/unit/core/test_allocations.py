"""What polls say about an allocation, and what follows when its job ends."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from builders import NOW, allocation, job, request
from fallow.core.accounting.cancelled import VERDICT_S, awaits_verdict
from fallow.core.accounting.spans import follow
from fallow.core.allocations import Agent, observe, preemption_end
from fallow.head.peers.agents import give_up_agent, note_agent_end
from fallow.head.state.stored import StoredRun
from fallow.model import (
    AllocationKind,
    AllocationState,
    Exit,
    JobInfo,
    RunStatus,
)
from runs import Nodes
from slurm_side import Desk


def ours(job_id: str, state: str, **more: Any) -> JobInfo:
    return job(job_id, state, **{"name": "tok", "user": "me", **more})


def test_an_unknown_submission_is_adopted_when_it_shows_up_and_lost_after_the_horizon() -> None:
    found, lost = (allocation("tok", AllocationState.UNKNOWN, sent_by=NOW) for _ in range(2))
    assert observe(found, [], NOW + 10, 30) is None
    assert observe(found, [ours("7", "PENDING", reason="Priority")], NOW + 20, 30) is not None
    assert (found.state, found.job_id) == (AllocationState.PENDING, "7")
    observe(lost, [], NOW + 31, 30)
    assert lost.state is AllocationState.UNKNOWN, "Slurm may have been away, and this its first answer"
    observe(lost, [], NOW + 32, 30)
    assert lost.state is AllocationState.LOST


def test_one_poll_that_does_not_show_a_job_does_not_end_it() -> None:
    mine, alone = allocation("tok", job_id="7", agents={"n1": Agent(node=1)}), allocation("tok", job_id="7")
    for state in (AllocationState.RUNNING, AllocationState.ENDED):
        observe(alone, [], NOW, 30)
        assert alone.state is state
    for _ in range(5):
        assert observe(mine, [], NOW, 30) is None
    assert mine.state is AllocationState.RUNNING, "its agent still answers"
    mine.agents["n1"].has_left = True
    observe(mine, [], NOW, 30)
    assert mine.state is AllocationState.ENDED


def test_a_job_that_vanishes_had_its_node_until_the_first_poll_that_did_not_show_it() -> None:
    mine = allocation("tok", job_id="7")
    observe(mine, [shown := ours("7", "RUNNING", nodes=["n1"], start_at=NOW)], NOW, 30)
    follow(mine, [shown], NOW, {})
    for after_s in (30.0, 60.0):
        observe(mine, [], NOW + after_s, 30)
        follow(mine, [], NOW + after_s, {})
    assert mine.is_settled
    assert mine.spans["7"].end_at == NOW + 30.0


def test_a_job_whose_agents_live_runs_though_slurmctld_came_back_with_an_older_state() -> None:
    mine = allocation("tok", job_id="7", agents={"n1": Agent(node=1)}, nodes=["n1"], end_at=NOW + 60.0)
    assert observe(mine, [ours("7", "PENDING", reason="Priority")], NOW, 30) is None
    assert (mine.state, mine.nodes, mine.end_at) == (AllocationState.RUNNING, ["n1"], NOW + 60.0)
    mine.agents["n1"].has_left = True
    assert observe(mine, [ours("7", "PENDING", reason="Priority")], NOW, 30) is not None
    assert mine.state is AllocationState.PENDING


def test_granted_end_is_read_back_and_preemption_shortens_it() -> None:
    mine = request("tok", minutes=30)
    running = ours("7", "RUNNING", nodes=["n1"], start_at=NOW, end_at=NOW + 120.0)
    observe(mine, [running], NOW, 30)
    assert (mine.state, mine.end_at, mine.nodes) == (AllocationState.RUNNING, NOW + 120.0, ["n1"])
    assert preemption_end([running]) is None
    grace = ours("7", "RUNNING", nodes=["n1"], end_at=NOW + 10.0, preempt_at=NOW)
    assert preemption_end([grace]) == NOW + 10.0


@pytest.mark.parametrize("state", ["SUSPENDED", "STOPPED", "STAGE_OUT"])
def test_a_job_that_has_its_nodes_does_not_wait(state: str) -> None:
    """`scancel --signal=STOP` on one that runs, and others that Slurm has a word of its own for."""
    mine = allocation("tok", job_id="7", start_at=NOW - 1200.0)
    shown = ours("7", state, nodes=["n1"], exclusive=True, start_at=NOW - 1200.0, end_at=NOW + 60.0)
    assert observe(mine, [shown], NOW, 30) is None
    assert mine.state is AllocationState.RUNNING
    assert follow(mine, [shown], NOW, {"n1": 4})
    assert mine.spans["7"].nodes == {"n1": 4}


def test_a_job_whose_nodes_boot_has_not_started() -> None:
    booting, plain = request("tok", job_id="12"), request("tok", job_id="12")
    shown = ours("12", "CONFIGURING", nodes=["n1"], start_at=NOW - 50.0)
    up = ours("12", "RUNNING", nodes=["n1"], start_at=NOW - 50.0, end_at=NOW + 900.0)
    assert observe(booting, [shown], NOW, 60.0) == "its nodes are booting: n1"
    assert (booting.state, booting.start_at, booting.end_at) == (AllocationState.PENDING, None, None)
    assert booting.is_booting and booting.nodes == ["n1"]
    assert observe(booting, [shown], NOW + 5.0, 60.0) is None
    for later_s in (30.0, 60.0):
        observe(booting, [up], NOW + later_s, 60.0)
        assert (booting.state, booting.start_at) == (AllocationState.RUNNING, NOW + 30.0)
    assert not booting.is_booting
    observe(plain, [up], NOW, 60.0)
    assert (plain.state, plain.start_at) == (AllocationState.RUNNING, NOW - 50.0), "when Slurm says"


# -- how jobs end: whose doing it was, and what follows for the run ---------------------------------------------------


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.parametrize("renewed", [True, False])
def test_a_job_that_the_head_has_let_go_of_is_cancelled_and_the_end_of_a_batch_script_is_not(
    desk: Desk, renewed: bool
) -> None:
    desk.run.record.base_wanted = False
    lost = desk.hold(AllocationKind.BASE, AllocationState.LOST, was_renewed=renewed)
    given_up = desk.hold(AllocationKind.BASE, AllocationState.ENDED, was_renewed=renewed)
    elected = desk.hold(AllocationKind.BASE, AllocationState.ENDED, was_renewed=renewed, end_code=Exit.OK)
    by_itself = desk.hold(AllocationKind.BASE, AllocationState.ENDED, was_renewed=renewed, left_at=NOW + 29.0)
    preempted = desk.hold(AllocationKind.BASE, AllocationState.ENDED, was_renewed=renewed)
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
    base.was_warned = True
    turn.release_allocation(desk.run, base, "warned by Slurm with signal 15: preempted or cancelled")
    note_agent_end(turn, desk.run, base, "n1", "given back as planned")
    assert not base.is_live
    turn = desk.poll(desk.job(base, "COMPLETING", submit_at=NOW + 30.0), after_s=2.0)
    assert (turn.submissions, turn.cancels) == ([], []), "Slurm has not said yet how it ends"
    turn = desk.poll(desk.job(base, "PENDING", submit_at=NOW + 30.0, reason="BeginTime"), after_s=2.0)
    assert base.state is AllocationState.PENDING
    assert (base.agents, base.asked_at, base.was_warned, base.nodes) == ({}, None, False, [])
    assert desk.book.is_allowed(base.public_key)
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
    base.was_warned = True
    turn.release_allocation(desk.run, base, "warned by Slurm with signal 15: preempted or cancelled")
    note_agent_end(turn, desk.run, base, "n1", "given back as planned")
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
    desk.book.end_allocation(desk.run, base, "agent on n1 silent for 16 s")
    assert desk.book.is_allowed(base.public_key) and not desk.book.take_revoked()
    desk.poll(desk.job(base, "FAILED"))
    assert not desk.book.is_allowed(base.public_key)
    assert desk.book.take_revoked() == {base.public_key: desk.book.paths.run(desk.run.id).key(base.token)}


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
    assert not silent.is_live and not desk.run.roster.nodes[number].proved_gone
    turn = desk.poll(desk.job(silent), desk.job(other))
    assert [token for _, token, _ in turn.cancels] == [silent.token]
    assert not desk.run.roster.nodes[number].proved_gone
    desk.poll(desk.job(silent, "CANCELLED"), desk.job(other))
    assert silent.is_settled
    desk.poll(desk.job(other))
    assert number not in desk.run.roster.nodes
    assert desk.run.roster.standbys() == [] and len(desk.run.roster.nodes) == 1


def test_a_run_that_is_made_anew_keeps_the_keys_that_were_about_to_go(desk: Desk) -> None:
    """The turn that let go of an allocation has failed: its agents still need the file."""
    run, base = desk.run, desk.hold(AllocationKind.BASE)
    desk.book.close(run, base)
    desk.book.reload(run, StoredRun(run.spec, run.record, run.roster, run.allocations), 1, 0.0)
    assert desk.book.take_revoked() == {}
    assert desk.book.is_allowed(base.public_key)
