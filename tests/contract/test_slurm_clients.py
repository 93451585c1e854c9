"""What holds for every `SlurmClient`: the same tests on a real Slurm, by commands and by pyslurm, and simulated."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pytest

import slurm_fixtures
from fallow.core.neighbour.preemption import as_for_us
from fallow.core.neighbour.waiting import others_waiting
from fallow.core.planning.rules import HarvestRules, harvestable_partitions
from fallow.model import ClusterState, JobInfo, JobRequest
from fallow.slurm.cli import CliClient
from fallow.slurm.client import SlurmClient, SlurmUnavailable, SubmitRejected
from fallow.slurm.pyslurm_client import PyslurmClient
from fallow.testbed.cluster import Testbed
from scripted_slurm import ScriptedSlurm
from slurm_fixtures import pause, queries, until

T = TypeVar("T")


@dataclass
class Setup:
    """A client, and how to let its world go on a little."""

    client: SlurmClient
    step: Callable[[], Awaitable[None]]
    break_slurm: Callable[[], SlurmClient]
    "returns a client that waits for one second"

    async def until(self, ask: Callable[[], Awaitable[T | None]]) -> T:
        return await until(ask, self.step)

    async def running(self, job_id: str) -> tuple[ClusterState, JobInfo]:
        async def ask() -> tuple[ClusterState, JobInfo] | None:
            state = await self.client.poll()
            job = next((job for job in state.jobs if job.job_id == job_id and job.state == "RUNNING"), None)
            # A poll is several questions: its nodes may be older than its jobs.
            busy = {node.node for node in state.nodes if node.state == "ALLOCATED"}
            return (state, job) if job is not None and busy.issuperset(job.nodes) else None

        return await self.until(ask)

    async def named(self, name: str) -> list[JobInfo]:
        return [job for job in (await self.client.poll()).jobs if job.name == name]


REAL = [pytest.param(name, marks=pytest.mark.slurm) for name in ("cli", "pyslurm")]


@pytest.fixture(params=["simulated", *REAL])
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    if request.param == "simulated":
        scripted = ScriptedSlurm(4)

        async def advance() -> None:
            scripted.advance(1.0)

        def switch_off() -> SlurmClient:
            scripted.unavailable = True
            return scripted

        yield Setup(scripted, advance, switch_off)
        return
    if request.param == "pyslurm":
        request.getfixturevalue("pyslurm_installed")
    testbed: Testbed = request.getfixturevalue("testbed")

    kind: type[CliClient] | type[PyslurmClient] = PyslurmClient if request.param == "pyslurm" else CliClient
    client, hasty = kind(testbed.conf), kind(testbed.conf, query_timeout_s=1.0)

    def unreachable() -> SlurmClient:
        conf = testbed.conf.read_text()
        testbed.conf.write_text(conf.replace(f"SlurmctldPort={testbed.layout.first_port}", "SlurmctldPort=1"))
        return hasty

    yield Setup(client, pause, unreachable)
    assert client.backend.startswith("pyslurm" if request.param == "pyslurm" else "command line")


def request_of(token: str, *options: str, **fields: Any) -> JobRequest:
    """A whole node."""
    return slurm_fixtures.request_of(token, "--nodes=1", "--exclusive", *options, **fields)


async def test_poll_shows_the_cluster(setup: Setup) -> None:
    state, config = await setup.client.poll(), await setup.client.config()
    assert config.cluster and config.slurm_version
    assert (config.preempt_type, config.kill_wait_s) == ("preempt/partition_prio", 5.0)
    assert config.private_data == []
    assert [node.node for node in state.nodes] == ["n1", "n2", "n3", "n4"]
    assert {node.state for node in state.nodes} == {"IDLE"}
    assert {node.gpus for node in state.nodes} == {4}
    assert state.nodes[0].partitions == ["normal", "scavenge"]
    partitions = {info.partition: info for info in state.partitions}
    assert partitions["normal"].default and partitions["normal"].preempt_mode == "REQUEUE"
    # The cluster's mode: nobody preempts there, so it is not harvested by default.
    seen = as_for_us(state, config, None)
    assert [info.partition for info in harvestable_partitions(seen, HarvestRules())] == ["scavenge"]
    scavenge = partitions["scavenge"]
    assert (scavenge.preempt_mode, scavenge.grace_s, scavenge.max_time_s) == ("REQUEUE", 10.0, 86400.0)
    assert scavenge.priority_tier < partitions["normal"].priority_tier
    assert scavenge.nodes == ["n1", "n2", "n3", "n4"] and scavenge.up
    assert state.jobs == []


async def test_a_submitted_job_is_seen_where_it_runs(setup: Setup) -> None:
    """By the name that it is looked for, whatever its options and its script say."""
    options = ("--partition=scavenge", "--comment=fallow:fallow-a", "--job-name=other")
    script = "#!/bin/sh\n#SBATCH --job-name=third\nsleep 60\n"
    job_id = await setup.client.submit(request_of("fallow-a", *options, script=script))
    state, job = await setup.running(job_id)
    assert (job.name, job.partition, job.num_nodes, job.time_limit_s) == ("fallow-a", "scavenge", 1, 300.0)
    assert job.comment == "fallow:fallow-a" and job.het_job_id is None
    assert job.start_at is not None and job.end_at == pytest.approx(job.start_at + 300.0)
    assert job.submit_at is not None and job.submit_at <= job.start_at <= state.at + 1.0
    assert job.preempt_at is None
    [node] = [node for node in state.nodes if node.node in job.nodes]
    assert node.state == "ALLOCATED"


async def test_cancel_ends_a_job_and_may_be_repeated(setup: Setup) -> None:
    job_id = await setup.client.submit(request_of("fallow-c"))
    await setup.running(job_id)
    await setup.client.cancel([job_id])

    async def ended() -> JobInfo | None:
        [job] = await setup.named("fallow-c")
        return job if job.state == "CANCELLED" else None

    await setup.until(ended)
    await setup.client.cancel([job_id])
    await setup.client.cancel(["999999"])
    await setup.client.cancel([])
    state = await setup.client.poll()
    assert [job.state for job in state.jobs] == ["CANCELLED"], "our own ended jobs stay visible"


async def test_a_refusal_says_why_and_neither_it_nor_a_test_leaves_a_job(setup: Setup) -> None:
    with pytest.raises(SubmitRejected, match="invalid partition"):
        await setup.client.submit(request_of("fallow-r", "--partition=nosuch"))
    assert "n1" in await setup.client.test_only(request_of("fallow-r"))
    with pytest.raises(SubmitRejected):
        await setup.client.test_only(request_of("fallow-r", "--nodes=99"))
    assert await setup.named("fallow-r") == []


@pytest.mark.parametrize("setup", REAL, indirect=True)
async def test_a_poll_sends_as_many_requests_as_are_counted(setup: Setup, testbed: Testbed) -> None:
    await setup.client.config()
    before = queries(testbed)
    await setup.client.poll()
    sent = queries(testbed) - before
    assert sent.total() == setup.client.poll_requests, sent


@pytest.mark.parametrize("setup", REAL, indirect=True)
async def test_elements_of_an_array_run_one_by_one_and_wait_together(setup: Setup) -> None:
    limited = await setup.client.submit(request_of("fallow-l", "--array=0-5%3"))

    async def queue(running: int, *reasons: str) -> list[JobInfo] | None:
        jobs = (await setup.client.poll()).jobs
        states = [job.state for job in jobs]
        waiting = {job.reason for job in jobs if job.state == "PENDING"}
        return jobs if states.count("RUNNING") == running and waiting <= {*reasons} else None

    jobs = await setup.until(lambda: queue(3, "JobArrayTaskLimit"))
    assert {job.array_job_id for job in jobs} == {limited}
    assert [(job.job_id, job.array_tasks) for job in jobs if job.state == "PENDING"] == [(limited, "3-5%3")]
    assert [job.array_tasks for job in jobs if job.state == "RUNNING"] == ["", "", ""]
    assert len({job.job_id for job in jobs}) == 4, "every element that runs has an id of its own"

    free = await setup.client.submit(request_of("fallow-f", "--array=0,3,7"))  # one node is left for its elements
    single = await setup.client.submit(request_of("fallow-s"))
    jobs = await setup.until(lambda: queue(4, "JobArrayTaskLimit", "Resources", "Priority"))
    found = {job.job_id: job for job in jobs}
    assert (found[free].array_job_id, found[free].array_tasks) == (free, "3,7")
    assert (found[single].array_job_id, found[single].array_tasks) == ("", "")
    [element] = [job for job in jobs if job.array_job_id == free and job.state == "RUNNING"]
    assert (element.array_tasks, element.name) == ("", "fallow-f")
    waiting = others_waiting(await setup.client.poll(), ())
    assert {other.job_id: other.startable_elements for other in waiting} == {free: 2, single: 1}, (
        "as many as nodes would help"
    )


@pytest.mark.parametrize("setup", REAL, indirect=True)
async def test_names_and_comments_of_others_break_nothing(setup: Setup, testbed: Testbed) -> None:
    evil = "x\n7|N/A|root|RUNNING|normal|1|n1|(null)|1|1|1|5:00|N/A|1|None|fallow-z|(null)|\n"
    odd, no_text = "tab\there, caf\u00e9 'quoted' %j \\n", os.fsdecode(b"\xff\xfe")
    for name, comment in ((evil, "a|b"), (odd, evil), (no_text, no_text)):
        submit(testbed, f"--job-name={name}", f"--comment={comment}")
    jobs = sorted((await setup.client.poll()).jobs, key=lambda job: job.job_id)
    assert [job.job_id for job in jobs] == ["1", "2", "3"]
    # squeue may trim white space at the ends; nothing else is lost
    assert [job.name.strip() for job in jobs[:2]] == [evil.strip(), odd.strip()]


async def test_preemption_shows_its_moment(setup: Setup) -> None:
    job_id = await setup.client.submit(request_of("fallow-p", "--partition=scavenge", "--no-requeue"))
    await setup.running(job_id)
    await setup.client.submit(request_of("other", "--nodes=4", "--partition=normal"))

    async def warned() -> JobInfo | None:
        [job] = await setup.named("fallow-p")
        return job if job.preempt_at is not None else None

    job = await setup.until(warned)
    assert job.preempt_at is not None and job.end_at is not None
    # Once it has ended, `end_at` is when, which may be some seconds later. Its limit was five minutes.
    assert job.end_at - job.preempt_at <= (11.0 if job.state == "RUNNING" else 60.0)


async def test_s8_unreachable_slurm_is_said_within_the_deadline(setup: Setup) -> None:
    """Slurm's commands give up by themselves after 9 s and more, with other words."""
    client = setup.break_slurm()
    with pytest.raises(SlurmUnavailable, match=r"no answer within 1 s|switched off"):
        await client.poll()


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


@pytest.mark.slurm
@pytest.mark.usefixtures("pyslurm_installed")
async def test_pyslurm_sees_what_the_commands_see(testbed: Testbed) -> None:
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
    client, commands = PyslurmClient(testbed.conf), CliClient(testbed.conf)

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
