"""The command line client's own queries and what real Slurms answered to them, see `tests/data/slurm/record.py`."""

from pathlib import Path

import msgspec
import pytest

from fallow.model import ClusterState, JobInfo, NodeInfo, PartitionInfo
from fallow.slurm import parse

DATA = Path(__file__).parents[3] / "data" / "slurm"
VERSIONS = {"22.05": "22.05.8", "24.11": "24.11.5", "25.11": "25.11.7"}
NODES = ["n1", "n2", "n3", "n4"]
DAY_S = 86400.0


def cluster(version: str) -> ClusterState:
    folder = DATA / version
    nodes, partitions, reservations = parse.cluster((folder / "poll_scontrol.txt").read_text())
    jobs = parse.jobs((folder / "poll_squeue.txt").read_text(), "5ca1ab1e")
    at = max(job.start_at or 0.0 for job in jobs if job.state == "RUNNING")
    return ClusterState(at=at, nodes=nodes, jobs=jobs, partitions=partitions, reservations=reservations)


WHOLE = {"exclusive": True, "memory_mb_per_node": 1000}
SWEEP = {"name": "sweep", "time_limit_s": 300.0, "array_job_id": "3", "memory_mb_per_node": 100}
SWEEP |= {"required_nodes": ["n2"]}
HARVEST = {
    "partition": "scavenge",
    "cpus_per_node": 4,
    "gpus_per_node": 4,
    "memory_mb_per_node": 4000,
    "exclusive": True,
}
HELD = {"state": "PENDING", "reason": "JobHeldUser", "cpus_per_node": 2}
COMMON = {"user": "alice", "partition": "normal", "time_limit_s": 600.0}
JOBS = [
    {"name": "done", "state": "COMPLETED", "nodes": ["n4"], "required_nodes": ["n4"], "memory_mb_per_node": 100},
    HARVEST
    | {"name": "harvest", "state": "RUNNING", "nodes": ["n1"], "required_nodes": ["n1"]}
    | {"comment": "fallow:a1 tok=7"},
    SWEEP | {"state": "PENDING", "reason": "JobArrayTaskLimit", "array_tasks": "2-5%2"},
    SWEEP | {"state": "RUNNING", "nodes": ["n2"]},
    SWEEP | {"state": "RUNNING", "nodes": ["n2"]},
    {"name": "het", "state": "RUNNING", "nodes": ["n3"], "required_nodes": ["n3"], "het_job_id": "6"}
    | {"time_limit_s": 1200.0, "gpus_per_node": 1, "memory_mb_per_node": 500, "excluded_nodes": ["n4"]},
    {"name": "het", "state": "RUNNING", "nodes": ["n4"], "required_nodes": ["n4"], "het_job_id": "6"}
    | {"time_limit_s": 1200.0, "cpus_per_node": 4, "memory_mb_per_node": 500, "exclusive": True}
    | {"excluded_nodes": ["n3"]},
    HELD | {"name": "after", "memory_mb_per_node": 200},
    {"name": "later", "state": "PENDING", "reason": "BeginTime", "num_nodes": 2, "excluded_nodes": ["n4"]}
    | {"time_limit_s": 300.0, "gpus_per_node": 2, "memory_mb_per_node": 1000, "comment": "two words | N/A"},
    HELD | {"name": "tasks", "num_nodes": 2, "time_limit_s": 300.0, "gpus_per_node": 2, "memory_mb_per_node": 1500},
    {"name": "urgent", "state": "PENDING", "reason": "Resources", "planned_nodes": ["n1"], "required_nodes": ["n1"]}
    | {"time_limit_s": 300.0}
    | WHOLE,
    {"name": "big", "state": "PENDING", "reason": "Resources", "planned_nodes": ["n1", "n2"], "excluded_nodes": ["n3"]}
    | {"time_limit_s": 1200.0, "num_nodes": 2}
    | WHOLE,
]
"Jobs 1 to 12 without their times and priorities."


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_of_every_job(version: str) -> None:
    found = sorted(cluster(version).jobs, key=lambda job: int(job.job_id))
    unlike = {"submit_at": None, "start_at": None, "end_at": None, "preempt_at": None, "eligible_at": None}
    # squeue has no field for them before 24.05
    unseen = {"excluded_nodes": []} if version == "22.05" else {}
    expected = [COMMON | {"job_id": str(number)} | job | unseen for number, job in enumerate(JOBS, 1)]
    if version != "25.11":
        expected[6]["planned_nodes"] = ["n4"]  # though it runs
    assert [msgspec.structs.replace(job, priority=0, **unlike) for job in found] == msgspec.convert(
        expected, list[JobInfo]
    )
    assert [job.job_id for job in found if not job.priority] == ["8", "10"], "those held"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_time_of_the_jobs(version: str) -> None:
    state = cluster(version)
    jobs = {int(job.job_id): job for job in state.jobs}
    for job in jobs.values():
        assert job.submit_at is not None and state.at - 30.0 <= job.submit_at <= state.at + 30.0
        if job.state == "RUNNING" and job.name != "harvest":
            assert job.start_at is not None and job.end_at == job.start_at + (job.time_limit_s or 0.0)
    harvest, later, urgent = jobs[2], jobs[9], jobs[11]
    assert [number for number, job in jobs.items() if job.preempt_at is not None] == [2]
    assert harvest.preempt_at is not None and harvest.end_at == harvest.preempt_at + 10.0, "its partition's grace"
    assert urgent.submit_at is not None and 0.0 <= harvest.preempt_at - urgent.submit_at <= 5.0
    assert later.submit_at is not None and later.eligible_at == later.start_at == later.submit_at + 3600.0
    assert jobs[8].eligible_at is None, "waits for another job"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_node(version: str) -> None:
    nodes = {node.node: node for node in cluster(version).nodes}
    common = {"partitions": ["normal", "scavenge"], "arch": "x86_64", "cpus": 4, "memory_mb": 4000}
    common |= {"gpus": 4, "gpu_types": {"": 4}}
    planned = [] if version == "22.05" else ["PLANNED"]
    full = {"state": "ALLOCATED", "cpus_used": 4, "memory_used_mb": 4000}
    expected = {
        "n1": full | {"gpus_used": 4, "gpu_types_used": {"": 4}},
        "n2": {"state": "MIXED", "flags": planned, "cpus_used": 2, "memory_used_mb": 200},
        # the administrator's reason for the drain says State=IDLE, too
        "n3": {"state": "MIXED", "flags": ["DRAIN"], "cpus_used": 1, "memory_used_mb": 500}
        | {"gpus_used": 1, "gpu_types_used": {"": 1}},
        "n4": full | {"memory_used_mb": 500, "gpus_used": 4, "gpu_types_used": {"": 4}},
    }
    assert nodes == {name: msgspec.convert(common | {"node": name} | n, NodeInfo) for name, n in expected.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_partitions_reservations_and_configuration(version: str) -> None:
    state = cluster(version)
    assert state.partitions == [
        PartitionInfo(partition="normal", nodes=NODES, max_time_s=DAY_S, default=True, priority_tier=10),
        PartitionInfo(partition="scavenge", nodes=NODES, max_time_s=DAY_S, preempt_mode="REQUEUE", grace_s=10.0),
    ]
    [maint] = state.reservations
    assert (maint.reservation, maint.nodes) == ("maint", ["n1", "n2"])
    assert maint.flags == ["MAINT", "IGNORE_JOBS", "SPEC_NODES"]
    assert maint.end_at - maint.start_at == 3600.0 and 7170.0 <= maint.start_at - state.at <= 7230.0

    config, as_of = parse.config((DATA / version / "poll_config.txt").read_text())
    assert as_of is not None and 0.0 <= as_of - state.at <= 30.0
    assert (config.cluster, config.slurm_version) == ("testbed", VERSIONS[version])
    assert (config.preempt_type, config.select_type) == ("preempt/partition_prio", "select/cons_tres")
    assert (config.kill_wait_s, config.backfill_interval_s, config.message_timeout_s) == (5.0, 1.0, 10.0)
    assert (config.private_data, config.priority_weights) == ([], {})
    assert config.scheduler_parameters.startswith("bf_interval=1,bf_resolution=1,")
