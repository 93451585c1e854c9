"""What pyslurm 25.11.2 gave for jobs, nodes and partitions of a real Slurm 25.11.7, turned into our own structs."""

import os
from enum import Flag
from types import SimpleNamespace

from fallow.model import PartitionInfo
from fallow.slurm import parse, pyslurm_poll
from fallow.slurm.state import user_name

NOTHING = (
    "allocated_nodes preempt_time comment account qos memory_per_node tres_per_task allocated_tres required_nodes "
    "eligible_time reservation licenses array_id array_task_id array_tasks_waiting array_tasks_parallel"
)
JOB = dict.fromkeys(NOTHING.split()) | {
    "id": 7,
    "name": "h",
    "user_id": os.getuid(),
    "state": "PENDING",
    "state_reason": "Resources",
    "partition": "normal",
    "num_nodes": 2,
    "scheduled_nodes": "n[1-2]",
    "submit_time": 1795280956,
    "start_time": 1795281555,
    "end_time": 1795282155,
    "time_limit": 10,
    "priority": 1,
    "heterogeneous_id": 7,
    "constraints": ["a100", "ib"],
    "cpus": 4,
    "ntasks": 1,
    "memory_per_cpu": 1000,
    "gres_per_node": {"gres/gpu": 1},
    "requested_tres": SimpleNamespace(mem=SimpleNamespace(count=4000), gres={}),
    "resource_sharing": "NO",
    "requeue_count": 1,
    "excluded_nodes": "n[3-4]",
}
NODE = {
    "name": "n2",
    "architecture": "x86_64",
    "configured_gres": {"gpu": 4},
    "owner": None,
    "state": "MIXED+PLANNED",
    "partitions": ["normal", "scavenge"],
    "total_cpus": 5,
    "effective_cpus": 4,
    "allocated_cpus": 1,
    "real_memory": 4500,
    "memory_reserved_for_system": 500,
    "allocated_memory": 1000,
    "active_features": [],
    "last_busy_time": 1795280954,
    "allocated_tres": {"cpu": 1, "mem": "1000M"},
}


def job_of(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**JOB | changes)


def test_a_pending_component() -> None:
    row = pyslurm_poll.job(job_of())
    assert set(parse.JOB_FIELDS) - set(row) == {"Exclusive"}, "came with Slurm 26.05"
    job = parse.job(row)
    assert job.restarts == 1
    assert (job.job_id, job.het_job_id, job.user, job.state) == ("7", "7", user_name(os.getuid()), "PENDING")
    assert (job.nodes, job.planned_nodes, job.excluded_nodes) == ([], ["n1", "n2"], ["n3", "n4"])
    assert (job.start_at, job.end_at, job.time_limit_s) == (1795281555.0, 1795282155.0, 600.0)
    assert (job.preempt_at, job.eligible_at, job.comment) == (None, None, "")
    assert (job.cpus_per_node, job.memory_mb_per_node, job.gpus_per_node, job.exclusive) == (2, 2000, 1, True)
    assert job.constraint == "a100,ib"
    assert (job.array_job_id, job.array_tasks) == ("", "")
    job = parse.job(pyslurm_poll.job(job_of(heterogeneous_id=None, time_limit=None)))
    assert (job.het_job_id, job.time_limit_s) == (None, None), "an ordinary one"


def test_elements_of_a_job_array() -> None:
    for shown, tasks in (
        ({"state": "PENDING", "array_tasks_waiting": "3-9", "array_tasks_parallel": 2}, "3-9%2"),
        ({"state": "PENDING", "array_task_id": 4}, "4"),  # requeued
        ({"state": "RUNNING", "array_task_id": 4}, ""),
    ):
        job = parse.job(pyslurm_poll.job(job_of(id=12, array_id=9, **shown)))
        assert (job.job_id, job.array_job_id, job.array_tasks) == ("12", "9", tasks)


def test_gpus_per_job_are_known_where_they_are_counted_as_tres() -> None:
    three = SimpleNamespace(count=3)
    counted = SimpleNamespace(mem=None, gres={"gpu": three, "gpu:a100": three})
    job = parse.job(pyslurm_poll.job(job_of(gres_per_node={}, requested_tres=counted)))
    assert (job.gpus_per_node, job.gpu_type) == (2, "a100"), "3 on 2 nodes"


def test_gpus_in_use_come_from_the_jobs_where_tres_do_not_tell() -> None:
    layout = {"n2": {"gres": {"gpu": {"count": 1, "indexes": "0"}}}, "n9": {"gres": {"gpu:a100": 2}}}
    running = SimpleNamespace(state="RUNNING", get_resource_layout_per_node=lambda: layout)
    node = SimpleNamespace(**NODE)
    used = pyslurm_poll.gpus_of_jobs([running, job_of()], [node])
    assert used == {"n2": {"gpu": 1}}, "only nodes of which it is not known"
    info = parse.node(pyslurm_poll.node(node, used["n2"]))
    assert (info.state, info.flags, info.gpus, info.gpus_used) == ("MIXED", ["PLANNED"], 4, 1)
    assert (info.cpus, info.cpus_used, info.memory_mb, info.memory_used_mb) == (4, 1, 4000, 1000)


def test_gpus_in_use_come_from_tres_where_they_tell() -> None:
    counted = {"cpu": 1, "gres/gpu": 3, "gres/gpu:a100": 3}
    node = SimpleNamespace(**NODE | {"allocated_tres": counted, "configured_gres": {"gpu:a100": 4}})
    assert pyslurm_poll.gpus_of_jobs([SimpleNamespace(state="RUNNING")], [node]) == {}, "no job is asked"
    info = parse.node(pyslurm_poll.node(node, {}))
    assert (info.gpus_used, info.gpu_types, info.gpu_types_used) == (3, {"a100": 4}, {"a100": 3})


def test_partitions_and_reservations() -> None:
    says_no = ("is_default", "is_user_exclusive", "is_root_only", "requires_reservation", "qos")
    lists = ("allowed_accounts", "denied_accounts", "allowed_groups", "denied_qos")
    found = {"name": "scavenge", "nodes": "n[1-4]", "max_time": 1440, "state": "UP", "priority_tier": 1}
    found |= {"preempt_mode": "REQUEUE", "preemption_grace_time": 10, "oversubscribe": "EXCLUSIVE", "min_nodes": 2}
    found |= (
        dict.fromkeys(says_no) | {name: ["ALL"] for name in lists} | {"max_nodes": "UNLIMITED", "allowed_qos": ["low"]}
    )
    assert parse.partition(pyslurm_poll.partition(SimpleNamespace(**found))) == PartitionInfo(
        partition="scavenge",
        nodes=["n1", "n2", "n3", "n4"],
        max_time_s=86400.0,
        priority_tier=1,
        preempt_mode="REQUEUE",
        grace_s=10.0,
        exclusive=True,
        min_nodes=2,
        allow_qos=["low"],
    )

    class Flags(Flag):
        MAINTENANCE = 1
        IGNORE_RUNNING_JOBS = 2
        DAILY = 4

    maint = SimpleNamespace(name="maint", nodes="n[1-2]", start_time=1795288156, end_time=1795291756, flags=Flags(3))
    [reservation] = parse.reservation(pyslurm_poll.reservation(maint))
    assert (reservation.nodes, reservation.flags) == (["n1", "n2"], ["MAINT", "IGNORE_JOBS"])
    assert reservation.end_at - reservation.start_at == 3600.0
