"""What only a real Slurm can show: hung daemons, hostile names, the environment of a job."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from fallow.cli.sbatch_call import look_up
from fallow.core.neighbour.permission import nice_for
from fallow.core.submission.prepare import plan
from fallow.core.submission.sbatch import base_options, script_options
from fallow.core.submission.sbatch_line import split
from fallow.core.submission.script import parse_script, with_directives
from fallow.model import JobRequest
from fallow.slurm.cli import CliClient
from fallow.slurm.client import SlurmUnavailable, SubmitUnknown
from fallow.testbed.cluster import Testbed
from slurm_fixtures import request_of
from waiting import until

pytestmark = pytest.mark.slurm


async def test_a_hung_slurmctld_makes_a_submit_unknown_and_the_job_is_found_later(testbed: Testbed) -> None:
    # Sbatch gives up by itself after 10 s, with other words. By our deadline it must have sent its request.
    client = CliClient(testbed.conf, query_timeout_s=1.0, submit_timeout_s=8.0)
    pid = testbed.daemon_pid("slurmctld")
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(SubmitUnknown, match="no answer within 8 s") as caught:
            await client.submit(request_of("fallow-u"))
        assert caught.value.token == "fallow-u"
        with pytest.raises(SlurmUnavailable, match="no answer within 1 s"):
            await client.own_jobs()
    finally:
        os.kill(pid, signal.SIGCONT)
    client = CliClient(testbed.conf)
    deadline = time.monotonic() + 120
    while not (found := await client.own_jobs()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert [job.name for job in found] == ["fallow-u"]


async def test_a_job_starts_from_the_captured_environment_folder_and_umask(
    testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nosuch")
    monkeypatch.setenv("SQUEUE_FORMAT", "%i nonsense")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    script = "#!/bin/sh\nprintf '%s\\n' \"$@\" > args.tmp\nenv > env\nmv args.tmp args\n"
    captured = {
        "PATH": "/usr/bin:/bin",
        "MINE": "kept as it is",
        "SLURM_NTASKS": "99",
        "SLURM_MEM_PER_NODE": "1",
        "SBATCH_PARTITION": "nosuch",
        "PMIX_RANK": "0",
        "CUDA_VISIBLE_DEVICES": "7",
    }
    how = {"args": ["one", "two words", "--three"], "environment": captured, "cwd": str(tmp_path), "umask": 0o027}
    await CliClient(testbed.conf).submit(request_of("fallow-e", "--output=out", script=script, **how))
    await until((tmp_path / "args").exists)
    assert (tmp_path / "args").read_text().splitlines() == ["one", "two words", "--three"]
    assert (tmp_path / "args").stat().st_mode & 0o777 == 0o640
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
    assert seen["MINE"] == "kept as it is" and seen["SLURM_CONF"] == str(testbed.conf)
    assert seen["SLURM_JOB_NAME"] == "fallow-e" and seen["SLURM_SUBMIT_DIR"] == str(tmp_path)
    assert seen.get("SLURM_NTASKS") != "99" and seen.get("SLURM_MEM_PER_NODE") != "1"
    assert not {"PMIX_RANK", "SBATCH_PARTITION", "CUDA_VISIBLE_DEVICES"} & set(seen)


async def test_components_of_a_heterogeneous_job_have_ids_of_their_own_and_the_leader_is_found_by_the_comment(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = CliClient(testbed.conf)
    one = ["--nodes=1", "--gres=gpu:1"]
    await client.submit(request_of("fallow-other", *one, "--comment=r.00"))
    job_id = await client.submit(request_of("fallow-h", *one, "--comment=r.0", ":", "--nodes=2", "--comment=r.0"))
    jobs = [job for job in await client.own_jobs() if job.name == "fallow-h"]
    assert [job.het_job_id for job in jobs] == [job_id, job_id]
    assert {job.job_id for job in jobs} == {job_id, str(int(job_id) + 1)}
    monkeypatch.setenv("SLURM_CONF", str(testbed.conf))
    assert await asyncio.to_thread(look_up, "r.0") == job_id


async def test_what_a_later_component_alone_says_of_the_whole_job_is_its_own_when_the_job_is_submitted_again(
    testbed: Testbed, tmp_path: Path
) -> None:
    client = CliClient(testbed.conf)
    text = "#!/bin/sh\n#SBATCH -N1 --hold\n#SBATCH hetjob\n#SBATCH '--chdir=/a b' --time=7 --mem=100\nx\n"
    made = plan(split(["job.sh"]), parse_script(text, "job.sh"), environ={}, cwd="/", umask=0o22, now=time.time())
    later = script_options(made.spec)
    options = base_options(made.spec.sbatch_options, token="fallow-h", exported={}, by_script=later)
    request = JobRequest(token="fallow-h", options=options, script=with_directives(text, later), cwd=str(tmp_path))
    job_id = await client.submit(request)
    jobs = {job.job_id: job for job in await client.own_jobs() if job.name == "fallow-h"}
    leader, other = jobs[job_id], jobs[str(int(job_id) + 1)]
    assert (leader.time_limit_s, other.time_limit_s) == (600.0, 420.0)
    assert leader.memory_mb_per_node != 100 and other.memory_mb_per_node == 100
    assert leader.reason != "JobHeldUser"


async def test_gpus_in_use_planned_nodes_and_reservations_are_seen(testbed: Testbed) -> None:
    client = CliClient(testbed.conf)
    await client.submit(request_of("fallow-g", "--gres=gpu:1", "--nodelist=n2"))
    await client.submit(request_of("fallow-all", "--nodes=4", "--exclusive"))
    reservation = ["reservationname=maint", "starttime=now+2hour", "duration=60", "nodes=n[1-2]", "users=root"]
    began = time.time()
    testbed.slurm("scontrol", "create", "reservation", *reservation, "flags=maint,ignore_jobs")
    made = time.time()
    deadline = time.monotonic() + 120
    while True:
        state = await client.poll()
        jobs, nodes = {job.name: job for job in state.jobs}, {node.node: node for node in state.nodes}
        # A poll is several questions: its nodes may be older than its jobs.
        one, whole_cluster = jobs["fallow-g"], jobs["fallow-all"]
        there = one.state == "RUNNING" and nodes["n2"].state == "MIXED"
        # The scheduler may have planned before the first one started. It looks every second, with `bf_resolution`.
        planned = whole_cluster.planned_nodes and whole_cluster.start_at == pytest.approx(one.end_at, abs=3.0)
        if there and planned:
            break
        assert time.monotonic() < deadline, state
        await asyncio.sleep(0.1)
    assert (nodes["n2"].gpus, nodes["n2"].gpus_used) == (4, 1)
    assert whole_cluster.planned_nodes == ["n1", "n2", "n3", "n4"]
    [found] = state.reservations
    assert found.nodes == ["n1", "n2"] and "MAINT" in found.flags
    assert found.end_at - found.start_at == 3600.0
    assert int(began) <= found.start_at - 7200.0 <= made


async def test_requests_wait_behind_others_jobs_whatever_the_sites_weights(testbed: Testbed) -> None:
    """With priorities from factors: an older job of the same size would come first."""
    conf = testbed.conf.read_text()
    weights = "PriorityType=priority/multifactor\nPriorityWeightJobSize=200000"
    testbed.conf.write_text(conf.replace("PriorityType=priority/basic", weights))
    pid = testbed.daemon_pid("slurmctld")
    os.kill(pid, signal.SIGKILL)
    await until(lambda: pid not in testbed.processes())
    testbed.restart_slurmctld()
    client = CliClient(testbed.conf)
    nice = nice_for(await client.config(), 100_000)
    assert nice == 200_001
    one = ["--nodes=1", "--exclusive", "--begin=now+1hour"]
    for name, more in (("fallow-nice", [f"--nice={nice}"]), ("fallow-not", []), ("theirs", [])):
        await client.submit(request_of(name, *one, *more))
    priority = {job.name: job.priority for job in (await client.poll()).jobs}
    assert priority["fallow-nice"] < priority["theirs"] <= priority["fallow-not"]
