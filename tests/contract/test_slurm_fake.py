"""The fake's own script: what a real Slurm cannot be made to do on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from fallow.model import JobInfo, JobRequest, PartitionInfo, ReservationInfo
from fallow.slurm.client import SlurmUnavailable, SubmitRejected, SubmitUnknown
from fallow.slurm.fake import FakeSlurm

if TYPE_CHECKING:
    from fallow.slurm.client import SlurmClient


def request_of(token: str = "fallow-x", *options: str) -> JobRequest:
    return JobRequest(token=token, options=["--nodes=1", "--time=5", *options], script="#!/bin/sh\n")


async def only(slurm: FakeSlurm, token: str = "fallow-x") -> JobInfo:
    [job] = await slurm.find(token)
    return job


def test_it_is_a_client() -> None:
    client: SlurmClient = FakeSlurm()
    assert client.polls == 0


async def test_a_job_ends_at_its_limit_and_is_forgotten_later() -> None:
    slurm = FakeSlurm(2, min_job_age_s=100.0)
    await slurm.submit(request_of())
    slurm.advance(299.0)
    assert (await only(slurm)).state == "RUNNING"
    slurm.advance(1.0)
    assert (await only(slurm)).state == "TIMEOUT"
    slurm.advance(101.0)
    assert await slurm.find("fallow-x") == []


async def test_events_come_in_order_within_one_advance() -> None:
    slurm = FakeSlurm(1)
    slurm.other_job("alice", run_for_s=10.0)
    slurm.other_job("bob", run_for_s=20.0)
    await slurm.submit(request_of("fallow-x", "--nice=100"))
    assert (await only(slurm)).reason == "Resources"
    begin = slurm.now
    slurm.advance(100.0)
    job = await only(slurm)
    assert job.state == "RUNNING" and job.start_at == begin + 30.0 and job.end_at == begin + 330.0


async def test_a_submit_of_unknown_fate() -> None:
    slurm = FakeSlurm()
    slurm.unknown_submits = [True, False]
    for token in ("fallow-is", "fallow-not"):
        with pytest.raises(SubmitUnknown):
            await slurm.submit(request_of(token))
    assert len(await slurm.find("fallow-is")) == 1
    assert await slurm.find("fallow-not") == []
    assert await slurm.submit(request_of("fallow-next")) == "2"


async def test_a_job_vanishes_and_its_id_is_given_away_again() -> None:
    slurm = FakeSlurm()
    job_id = await slurm.submit(request_of())
    slurm.forget(job_id)
    assert await slurm.find("fallow-x") == [] and (await slurm.poll("fallow-")).jobs == []
    slurm.next_id = int(job_id)
    assert slurm.other_job("alice") == job_id
    await slurm.cancel([job_id])
    assert [job.state for job in (await slurm.poll("fallow-")).jobs] == ["RUNNING"], (
        "another user's job is not ours to end"
    )


async def test_s8_slurm_away_and_slurm_refusing() -> None:
    slurm = FakeSlurm()
    slurm.unavailable = True
    for call in (slurm.config(), slurm.poll(""), slurm.find("x"), slurm.cancel(["1"])):
        with pytest.raises(SlurmUnavailable):
            await call
    with pytest.raises(SubmitUnknown):
        await slurm.submit(request_of())
    slurm.unavailable = False
    slurm.reject = "QOSMaxSubmitJobPerUserLimit"
    with pytest.raises(SubmitRejected, match="QOSMaxSubmit"):
        await slurm.submit(request_of())
    assert slurm.jobs == {}


@pytest.mark.parametrize("grace", [10.0, 0.0])
async def test_preemption_with_and_without_grace(grace: float) -> None:
    slurm = FakeSlurm(2)
    scavenge = slurm.partitions["scavenge"]
    slurm.partitions["scavenge"] = msgspec.structs.replace(scavenge, grace_s=grace)
    await slurm.submit(request_of("fallow-x", "--partition=scavenge"))
    big = slurm.other_job("alice", nodes=2)
    job = await only(slurm)
    assert job.preempt_at == slurm.now and job.end_at == slurm.now + grace
    if grace:
        assert job.state == "RUNNING" and slurm.jobs[big].state == "PENDING"
        slurm.advance(grace)
    assert (await only(slurm)).state == "PREEMPTED" and slurm.jobs[big].state == "RUNNING"


async def test_nodes_fail_drain_and_are_reserved() -> None:
    slurm = FakeSlurm(3)
    await slurm.submit(request_of())
    slurm.set_node("n1", down=True)
    assert (await only(slurm)).state == "NODE_FAIL"
    slurm.set_node("n2", flags=["DRAIN"])
    slurm.reservations.append(
        ReservationInfo(reservation="maint", nodes=["n3"], start_at=slurm.now + 100.0, end_at=slurm.now + 200.0)
    )
    await slurm.submit(request_of("fallow-y"))
    assert (await only(slurm, "fallow-y")).state == "PENDING"
    states = {node.node: (node.state, node.flags) for node in (await slurm.poll("")).nodes}
    assert states == {"n1": ("DOWN", []), "n2": ("IDLE", ["DRAIN"]), "n3": ("IDLE", [])}
    slurm.set_node("n2")
    assert (await only(slurm, "fallow-y")).nodes == ["n2"]


async def test_signals_and_endings_of_our_own() -> None:
    slurm = FakeSlurm()
    job_id = await slurm.submit(request_of())
    await slurm.cancel([job_id], signal="USR1")
    assert slurm.signals == [(job_id, "USR1")] and (await only(slurm)).state == "RUNNING"
    slurm.finish(job_id, "FAILED")
    assert (await only(slurm)).state == "FAILED"


async def test_a_clock_of_its_own_drives_it() -> None:
    clock = [50.0]
    partitions = [PartitionInfo(partition="all", nodes=["n1"], max_time_s=None, default=True)]
    slurm = FakeSlurm(1, partitions=partitions, now=0.0, clock=lambda: clock[0])
    await slurm.submit(request_of("fallow-x", "--time=1"))
    slurm.hold_starts = True
    await slurm.submit(request_of("fallow-y"))
    clock[0] = 200.0
    assert (await only(slurm)).end_at == 110.0
    assert (await only(slurm, "fallow-y")).state == "PENDING"
    assert (await slurm.poll("")).at == 200.0


async def test_jobs_share_a_node_as_long_as_there_is_room() -> None:
    slurm = FakeSlurm(2, gpus=4)
    theirs = slurm.other_job("alice", gpus=3, run_for_s=60.0)
    (shared,) = slurm.jobs[theirs].nodes
    node = slurm.node_info(shared)
    assert (node.state, node.gpus_used, node.cpus_used) == ("MIXED", 3, 1)
    part = ("--gpus-per-node=1", "--cpus-per-task=2", f"--nodelist={shared}")
    await slurm.submit(request_of("fallow-a", *part))
    await slurm.submit(request_of("fallow-b", *part))
    assert (await only(slurm, "fallow-a")).nodes == [shared]
    assert (await only(slurm, "fallow-b")).state == "PENDING"
    slurm.advance(60.0)
    assert (await only(slurm, "fallow-b")).nodes == [shared]


async def test_time_min_is_kept_or_stretched_and_limits_hold_jobs_back() -> None:
    slurm = FakeSlurm(2)
    slurm.reservations.append(
        ReservationInfo(reservation="m", nodes=["n1", "n2"], start_at=slurm.now + 1800.0, end_at=slurm.now + 9999.0)
    )
    await slurm.submit(request_of("fallow-short", "--time=60", "--time-min=10"))
    assert (await only(slurm, "fallow-short")).time_limit_s == 600.0
    slurm.stretches = True
    await slurm.submit(request_of("fallow-long", "--time=60", "--time-min=10"))
    assert (await only(slurm, "fallow-long")).time_limit_s == 1800.0
    slurm.limits["bio"] = "AssocGrpGRES"
    await slurm.submit(request_of("fallow-held", "--account=bio"))
    assert (await only(slurm, "fallow-held")).reason == "AssocGrpGRES"
    slurm.partitions["normal"] = msgspec.structs.replace(slurm.partitions["normal"], max_time_s=60.0)
    await slurm.submit(request_of("fallow-beyond"))
    assert (await only(slurm, "fallow-beyond")).reason == "PartitionTimeLimit"
