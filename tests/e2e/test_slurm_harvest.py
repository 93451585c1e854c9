"""Harvesting on a real Slurm: idle GPUs of shared nodes, renewals, refusals, nodes that sleep."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import pytest
from slurm_rig import Rig, telling

from slurm_training import REACT_S, START_S, wait_for

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def shared(slurm_installed: None) -> Iterator[Rig]:
    with Rig("preempt", nodes=3) as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    with telling(shared):
        yield shared


@pytest.mark.soak
def test_the_idle_gpu_of_a_node_that_others_use_is_harvested_and_kept(rig: Rig) -> None:
    whole = rig.others(1)
    rig.wait_job(whole, "RUNNING")
    # One GPU is idle on each of the other nodes: one for the base job, one to harvest.
    shared_nodes = sorted({"n1", "n2", "n3"} - {_where(rig, whole)})
    parts = [_part(rig, 3, f"--nodelist={name}") for name in shared_nodes]
    for job in parts:
        rig.wait_job(job, "RUNNING")
    training = rig.submit("--nodes=1:2", "--gres=gpu:1", pace_s=0.4, exclusive=False)
    base, node = (member.node for member in training.wait_members(2))
    assert sorted((base, node)) == shared_nodes
    wait_for("all its GPUs are used", lambda: "GresUsed=gpu:4" in _node(rig, node), REACT_S, rig.story)
    assert "State=MIXED" in _node(rig, node)
    (first,) = training.harvest_jobs()
    training.wait_for("its successor is asked for", lambda: len(training.harvest_jobs()) > 1, 60.0)
    second = training.harvest_jobs()[1]
    assert (rig.job_states()[first], rig.job_states()[second]) == ("RUNNING", "PENDING")
    rig.wait_job(second, "RUNNING")
    # No other moment between them than Slurm needs.
    assert (_times(rig, second)[0] - _times(rig, first)[1]).total_seconds() in (0.0, 1.0, 2.0)
    training.wait_for("it trains there again", lambda: len(training.changes("absorb")) > 1, START_S)
    assert training.wait_members(2)[1].node == node
    training.wait_steps()
    assert {rig.job_states()[job] for job in (whole, *parts)} == {"RUNNING"}
    rig.scancel(whole, *parts)
    training.finish()
    assert not training.events("eject", "failed", "lost", "orphan")
    assert rig.job_states()[first] == "COMPLETED", "it left before its walltime"


def test_a_harvest_job_holds_as_many_gpus_as_its_script_asks_for(rig: Rig) -> None:
    training = rig.submit("--nodes=1:3", "--gres=gpu:1", exclusive=False)
    training.wait_members(3)
    harvest = [job for job in training.harvest_jobs() if rig.job_states()[job] == "RUNNING"]
    assert len(harvest) == 2
    for job in harvest:
        shown = rig.testbed.slurm("scontrol", "-d", "show", "job", job)
        assert "JOB_GRES=gpu:1\n" in shown and "NumCPUs=1 " in shown, shown
    # A stranger's job runs on the same node beside it.
    stranger = _part(rig, 1, f"--nodelist={_where(rig, harvest[0])}")
    rig.wait_job(stranger, "RUNNING")
    training.wait_steps()
    assert [rig.job_states()[job] for job in harvest] == ["RUNNING", "RUNNING"]
    assert not training.events("eject", "failed", "release")
    rig.scancel(stranger)
    training.finish()


def test_a_partition_that_takes_no_jobs_of_ours_is_left_alone(rig: Rig) -> None:
    # Newer Slurms look at a partition's accounts only where there is accounting.
    rig.testbed.slurm("scontrol", "update", "PartitionName=scavenge", "MaxMemPerNode=1")
    try:
        training = rig.submit("--nodes=1:3")
        backoff = training.wait_for("it is left alone", lambda: training.events("backoff"))[0]
        assert backoff.text.startswith("Slurm says ") and backoff.text.endswith("asked for in scavenge for 60 s")
        training.wait_for("its requests are withdrawn", lambda: len(training.jobs_alive()) == 1)
        asked = len(training.harvest_jobs())
        training.wait_steps(20)
        assert len(training.harvest_jobs()) == asked <= 2
    finally:
        rig.testbed.slurm("scontrol", "update", "PartitionName=scavenge", "MaxMemPerNode=0")
    training.finish()


POWER_SAVING = """
SlurmctldParameters=power_save_interval=1
SuspendProgram=/bin/true
ResumeProgram={resume}
SuspendTime=86400
SuspendTimeout=2
ResumeTimeout=60
"""


def test_a_sleeping_node_is_not_woken(rig: Rig) -> None:
    folder = rig.testbed.folder
    resume = folder / "resume"
    resume.write_text(f'#!/bin/sh\necho "$1" >> {folder}/resumed\n')
    resume.chmod(0o755)
    with rig.testbed.conf.open("a") as conf:
        conf.write(POWER_SAVING.format(resume=resume))
    rig.testbed.slurm("scontrol", "reconfigure")
    rig.testbed.slurm("scontrol", "update", "NodeName=n3", "State=POWER_DOWN")

    def sleeps() -> bool:
        return "State=IDLE+POWERED_DOWN" in _node(rig, "n3")

    wait_for("the node sleeps", sleeps, REACT_S, rig.story)
    stranger = rig.others(1)
    rig.wait_job(stranger, "RUNNING")
    training = rig.submit("--nodes=1:3")
    training.wait_members(1)
    # No node is idle and awake, so it waits for the stranger's.
    job = training.wait_for("a request waits", training.harvest_jobs)[0]
    shown = rig.testbed.slurm("scontrol", "show", "job", job)
    assert "JobState=PENDING" in shown and "ExcNodeList=n3" in shown, shown
    training.wait_steps(30)
    rig.scancel(stranger)
    training.wait_members(2, START_S)
    training.finish()
    assert sleeps()
    assert not (folder / "resumed").exists(), (folder / "resumed").read_text()


def _part(rig: Rig, gpus: int, *options: str) -> str:
    """Somebody's job on some GPUs of one node; returns its id."""
    argv = ["sbatch", "--parsable", "--partition=normal", "--time=10", "--output=/dev/null", "--job-name=part"]
    return rig.command(*argv, "--nodes=1", f"--gpus-per-node={gpus}", *options, "--wrap=sleep 600").strip()


def _where(rig: Rig, job: str) -> str:
    """Node of a job that runs."""
    return rig.testbed.slurm("squeue", "-h", "-j", job, "-o", "%N").strip()


def _node(rig: Rig, name: str) -> str:
    return rig.testbed.slurm("scontrol", "-o", "-d", "show", "node", name)


def _times(rig: Rig, job: str) -> tuple[datetime, datetime]:
    """Start and end of a job, to the second."""
    start, end = rig.testbed.slurm("squeue", "-h", "-t", "all", "-j", job, "-o", "%S %e").split()
    return datetime.fromisoformat(start), datetime.fromisoformat(end)
