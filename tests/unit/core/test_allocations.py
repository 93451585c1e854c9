"""What polls say about an allocation."""

from __future__ import annotations

from typing import Any

import pytest

from builders import NOW, allocation, job, request
from fallow.core.accounting.spans import follow
from fallow.core.allocations import Agent, observe, preempted_until
from fallow.model import AllocationState, JobInfo


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
    mine.agents["n1"].gone = True
    observe(mine, [], NOW, 30)
    assert mine.state is AllocationState.ENDED


def test_a_job_that_vanishes_had_its_node_until_the_first_poll_that_did_not_show_it() -> None:
    mine = allocation("tok", job_id="7")
    observe(mine, [shown := ours("7", "RUNNING", nodes=["n1"], start_at=NOW)], NOW, 30)
    follow(mine, [shown], NOW, {})
    for after_s in (30.0, 60.0):
        observe(mine, [], NOW + after_s, 30)
        follow(mine, [], NOW + after_s, {})
    assert mine.settled
    assert mine.spans["7"].end_at == NOW + 30.0


def test_a_job_whose_agents_live_runs_though_slurmctld_came_back_with_an_older_state() -> None:
    mine = allocation("tok", job_id="7", agents={"n1": Agent(node=1)}, nodes=["n1"], end_at=NOW + 60.0)
    assert observe(mine, [ours("7", "PENDING", reason="Priority")], NOW, 30) is None
    assert (mine.state, mine.nodes, mine.end_at) == (AllocationState.RUNNING, ["n1"], NOW + 60.0)
    mine.agents["n1"].gone = True
    assert observe(mine, [ours("7", "PENDING", reason="Priority")], NOW, 30) is not None
    assert mine.state is AllocationState.PENDING


def test_granted_end_is_read_back_and_preemption_shortens_it() -> None:
    mine = request("tok", minutes=30)
    running = ours("7", "RUNNING", nodes=["n1"], start_at=NOW, end_at=NOW + 120.0)
    observe(mine, [running], NOW, 30)
    assert (mine.state, mine.end_at, mine.nodes) == (AllocationState.RUNNING, NOW + 120.0, ["n1"])
    assert preempted_until([running]) is None
    grace = ours("7", "RUNNING", nodes=["n1"], end_at=NOW + 10.0, preempt_at=NOW)
    assert preempted_until([grace]) == NOW + 10.0


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
