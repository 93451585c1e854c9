"""Harvesting on a real Slurm: idle GPUs of shared nodes, refusals, nodes that sleep."""

import json
from collections.abc import Iterator

import pytest
from slurm_rig import Rig

from slurm_training import REACT_S, START_S
from waiting import wait_for

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def shared(slurm_installed: None) -> Iterator[Rig]:
    with Rig("preempt", nodes=3) as rig:
        yield rig


def test_the_idle_gpus_of_nodes_that_others_use_are_harvested_as_many_as_the_script_asks_for(rig: Rig) -> None:
    parts = [_part_of(rig, node) for node in ("n1", "n2", "n3")]
    for job in parts:
        rig.wait_job(job, "RUNNING")
    training = rig.submit("--nodes=1:3", "--gres=gpu:1", exclusive=False)
    assert {member.node for member in training.wait_members(3)} == {"n1", "n2", "n3"}
    harvest = [job for job in training.harvest_jobs() if rig.job_states()[job] == "RUNNING"]
    assert len(harvest) == 2
    for job in harvest:
        shown = rig.testbed.slurm("scontrol", "-d", "show", "job", job)
        assert "JOB_GRES=gpu:1\n" in shown and "NumCPUs=1 " in shown, shown
    assert "State=MIXED" in _node(rig, "n1") and "GresUsed=gpu:4" in _node(rig, "n1"), _node(rig, "n1")
    training.wait_steps()
    states = rig.job_states()
    assert {states[job] for job in (*parts, *harvest)} == {"RUNNING"}
    assert not training.events("eject", "failed", "release")
    rig.scancel(*parts)
    training.finish()


def test_a_partition_that_takes_no_jobs_of_ours_is_left_alone(rig: Rig) -> None:
    # Newer Slurms look at a partition's accounts only where there is accounting.
    rig.testbed.slurm("scontrol", "update", "PartitionName=scavenge", "MaxMemPerNode=1")
    try:
        training = rig.submit("--nodes=1:3")
        backoff = training.wait_for("it is left alone", lambda: training.events("backoff"))[0]
        assert backoff.text.startswith("Slurm says ") and backoff.text.endswith("no requests in scavenge for 60 s")
        training.wait_for("its requests are withdrawn", lambda: len(training.jobs_alive()) == 1)
        training.wait_steps(20)
        # By the head's clock: on a busy machine this may take longer than the minute.
        asked = [event for event in training.events("submit") if event.at < backoff.at + 59.0]
        assert len(asked) <= 3, "the base job and one request for each of two nodes"
    finally:
        rig.testbed.slurm("scontrol", "update", "PartitionName=scavenge", "MaxMemPerNode=0")
    training.finish()


def test_sbatchs_environment_gives_way_to_the_script_in_all_jobs_of_a_run(rig: Rig) -> None:
    """What sbatch takes from a user, it takes from Fallow: at first, when it is submitted again, and to harvest."""
    script = rig.folder / "memory.sbatch"
    options = "#SBATCH --mem=100 --time=5 --output=/dev/null\n#FALLOW nodes=1:2 partitions=scavenge"
    script.write_text(f"#!/bin/sh\n{options}\nfallow run -- x\n")
    variables = ["env", "SBATCH_MEM_PER_CPU=50", "SBATCH_REQUEUE=1"]
    for command in (["sbatch"], ["fallow", "submit"]):
        rig.command(*variables, *command, "--test-only", str(script))
    shown = json.loads(rig.command(*variables, "fallow", "submit", "--dry-run", "--json", str(script)))
    assert "to start at" in shown["start"]["says"], "with the options of a later submission"
    *harvest, name = shown["harvest"]
    assert name == "SCRIPT" and "--mem=100" in harvest
    rig.command(*harvest, "--test-only", str(script))


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


def _part_of(rig: Rig, node: str) -> str:
    """Somebody's job on three of a node's four GPUs; returns its id."""
    argv = ["sbatch", "--parsable", "--partition=normal", "--time=10", "--output=/dev/null", "--job-name=part"]
    return rig.command(*argv, "--nodes=1", "--gpus-per-node=3", f"--nodelist={node}", "--wrap=sleep 600").strip()


def _node(rig: Rig, name: str) -> str:
    return rig.testbed.slurm("scontrol", "-o", "-d", "show", "node", name)
