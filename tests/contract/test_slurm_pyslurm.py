"""What only a real pyslurm against its real Slurm can show; skipped where there is none."""

from __future__ import annotations

import os

import msgspec
import pytest

from fallow.model import ClusterState
from fallow.slurm.cli import CliClient
from fallow.slurm.pyslurm_client import PyslurmClient
from fallow.testbed.cluster import Testbed
from slurm_fixtures import until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("pyslurm_installed")]


@pytest.fixture
def client(testbed: Testbed) -> PyslurmClient:
    return PyslurmClient(testbed.conf, query_timeout_s=5.0)


def submit(testbed: Testbed, *options: str) -> str:
    return testbed.slurm("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=sleep 120").strip()


def rounded(state: ClusterState) -> dict[str, object]:
    """What two polls of the same moment must agree on.

    The start and end that are planned for a pending job move with the scheduler's clock.
    """
    jobs = [
        msgspec.structs.replace(job, start_at=None, end_at=None) if job.state == "PENDING" else job
        for job in state.jobs
    ]
    return {
        "nodes": state.nodes,
        "partitions": state.partitions,
        "reservations": state.reservations,
        "jobs": {job.job_id: job for job in jobs},
    }


async def test_it_sees_what_the_commands_see(testbed: Testbed, client: PyslurmClient) -> None:
    submit(testbed, "-J", "gpu", "--gres=gpu:1", "--nodelist=n2", "--time=5", "--comment=fallow:x")
    submit(testbed, "-J", "whole", "--exclusive", "-w", "n1", "--time=30", "--mem=500")
    submit(testbed, "-J", "two", "-p", "scavenge", "-N2", "-n4", "--gpus-per-task=1", "-w", "n3,n4", "--time=5")
    submit(testbed, "-J", "later", "-N2", "--gpus-per-node=2", "--exclude=n4", "--time=5", "--begin=now+1hour")
    submit(testbed, "-J", "after", "--dependency=afterok:1", "--mem-per-cpu=100", "-c2", "--hold")
    submit(testbed, "-J", "het", "-N1", "--gres=gpu:1", "--begin=now+1hour", ":", "-N2")
    submit(testbed, "-J", "array", "--array=1-3", "--mem=0", "--begin=now+1hour")
    submit(testbed, "-J", "limited", "--array=0-6:2%2", "-n1", "--mem=100", "--nodelist=n2", "--time=5")
    reservation = ["reservationname=maint", "starttime=now+2hour", "duration=60", "nodes=n[1-2]", "users=root"]
    testbed.slurm("scontrol", "create", "reservation", *reservation, "flags=maint,ignore_jobs")
    commands = CliClient(testbed.conf)

    async def same() -> ClusterState | None:
        # The scheduler goes on in between: ask until nothing has changed around the poll.
        before = rounded(await commands.poll())
        state = await client.poll()
        if before != rounded(await commands.poll()):
            return None
        for part, found in rounded(state).items():
            assert found == before[part], part
        return state if [job.state for job in state.jobs].count("RUNNING") == 5 else None

    state = await until(same)
    assert client.backend.startswith("pyslurm ")
    nodes = {node.node: node for node in state.nodes}
    assert (nodes["n2"].state, nodes["n2"].gpus, nodes["n2"].gpus_used) == ("MIXED", 4, 1)
    assert [job.excluded_nodes for job in state.jobs if job.name == "later"] == [["n4"]]
    arrays = {job.job_id: (job.name, job.array_tasks) for job in state.jobs if job.array_job_id == job.job_id}
    assert sorted(arrays.values()) == [("array", "1-3"), ("limited", "4,6%2")]
    elements = [job for job in state.jobs if job.array_job_id and job.state == "RUNNING"]
    assert [arrays[job.array_job_id][0] for job in elements] == ["limited", "limited"]
    assert len(state.jobs) == 11 and len(state.reservations) == 1


async def test_names_and_comments_of_others_break_nothing(testbed: Testbed, client: PyslurmClient) -> None:
    evil = "x\n7|N/A|root|RUNNING|caf\u00e9 'quoted' %j \\n"
    submit(testbed, f"--job-name={evil}", f"--comment={evil}")
    no_text = os.fsdecode(b"\xff\xfe")
    submit(testbed, f"--job-name={no_text}", f"--comment={no_text}")
    jobs = {job.job_id: job for job in (await client.poll()).jobs}
    assert client.backend.startswith("pyslurm ")
    assert (jobs["1"].name, jobs["1"].comment) == (evil, evil)
    assert (jobs["2"].name, jobs["2"].comment) == ("", ""), "no text that pyslurm can read"
