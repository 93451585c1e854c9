"""Harvesting on a real Slurm that shares nodes between jobs: idle GPUs, renewals, refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from slurm_rig import REACT_S, START_S, Rig, Training, telling, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def shared(slurm_installed: None) -> Iterator[Rig]:
    with Rig("preempt", nodes=3) as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    with telling(shared):
        yield shared


def test_the_idle_gpus_of_a_node_that_others_use_are_harvested_and_kept(rig: Rig) -> None:
    training = rig.submit("--nodes=1:2", "--gres=gpu:1", pace_s=0.4)
    # Before anything can be harvested, somebody takes three of four GPUs of each other node.
    theirs = _others(rig, "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=3")
    rig.wait_job(theirs, "RUNNING")
    node = training.wait_members(2)[1].node
    wait_for("all its GPUs are used", lambda: "GresUsed=gpu:4" in _node(rig, node), REACT_S, rig.story)
    assert "State=MIXED" in _node(rig, node)
    (first, *_) = training.harvest_jobs()
    training.wait_for("the successor is asked for", lambda: len(training.harvest_jobs()) > 1, 60.0)
    second = training.harvest_jobs()[1]
    assert rig.job_states()[first] == "RUNNING" and rig.job_states()[second] == "PENDING"
    rig.wait_job(second, "RUNNING", 60.0)
    gap = _times(rig, second)[0] - _times(rig, first)[1]
    assert 0.0 <= gap.total_seconds() <= 2.0
    training.wait_for("it trains there again", lambda: len(training.changes("absorb")) > 1, START_S)
    assert training.wait_members(2)[1].node == node
    assert rig.job_states()[theirs] == "RUNNING"
    training.wait_steps()
    rig.scancel(theirs)
    training.finish()
    assert not training.events("eject", "failed", "lost", "orphan")
    assert rig.job_states()[first] == "CANCELLED", "it left before its walltime"


def test_a_run_whose_harvest_jobs_are_refused_is_told_at_once_and_asks_seldom(rig: Rig) -> None:
    rig.testbed.slurm("scontrol", "update", "PartitionName=scavenge", "AllowAccounts=nobody")
    try:
        training = rig.submit("--nodes=1:2", "--account=somebody")
        training.wait_members(1)
        training.wait_steps()
        assert training.harvest_jobs() == []
    finally:
        rig.testbed.slurm("scontrol", "update", "PartitionName=scavenge", "AllowAccounts=ALL")
    training.finish()


def _others(rig: Rig, *options: str) -> str:
    argv = ["sbatch", "--parsable", "--partition=normal", "--time=10", "--output=/dev/null", "--job-name=others"]
    return rig.command(*argv, *options, "--wrap=sleep 600").strip()


def _node(rig: Rig, name: str) -> str:
    return rig.testbed.slurm("scontrol", "-o", "-d", "show", "node", name)


def _times(rig: Rig, job: str) -> tuple[datetime, datetime]:
    """Start and end of a job."""
    start, end = rig.testbed.slurm("squeue", "-h", "-t", "all", "-j", job, "-o", "%S %e").split()
    return datetime.fromisoformat(start), datetime.fromisoformat(end)


__all__ = ["Training"]
