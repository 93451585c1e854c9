"""One poll through pyslurm in a separate process: `python -m fallow.slurm.pyslurm_poll SLURM FALLOW` (versions).

Why a separate process: pyslurm keeps the GIL in every call, for 20 s and more if slurmctld hangs. libslurm ends the
process at import if it finds no usable slurm.conf. pyslurm is said to leak (PySlurm issue 60).

The answer is one JSON value on standard output. What pyslurm prints, and the reason of an exit code other than 0, go to
standard error.

pyslurm's objects are turned into the words that squeue and scontrol print, so that only `parse` interprets them. Tried
on pyslurm 25.11.2. Only attributes that are needed are read: several others raise (PySlurm issues 312, 341). The
objects are Cython's and may be absent here, so they are `Any`.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from fallow import __version__
from fallow.model import ClusterState, Exit, slurm_release
from fallow.slurm import parse
from fallow.slurm.state import cluster_state, user_name

OLDEST = (25, 11)
"pyslurm's first version with all classes that are used here"

_ACCESS_DENIED = 2002
"slurm_errno.h"

# slurm.h: the flags of reservations by the names that scontrol prints for them
_RESERVATION_FLAGS = {
    "MAINTENANCE": "MAINT",
    "IGNORE_RUNNING_JOBS": "IGNORE_JOBS",
    "STATIC_NODES": "STATIC",
    "PARTITION_NODES_ONLY": "PART_NODES",
    "PURGE": "PURGE_COMP",
    "SPECIFIC_NODES": "SPEC_NODES",
    "NO_JOB_HOLD_AFTER_END": "NO_HOLD_JOBS_AFTER_END",
}


class Polled(msgspec.Struct, frozen=True):
    """The answer of this program."""

    version: str
    "version of pyslurm"
    took_s: float
    "seconds of slurmctld and pyslurm; starting Python may take longer"
    state: ClusterState
    "`at` is 0: the caller knows slurmctld's clock"


def main(slurm: str, fallow: str) -> int:
    """Print one poll.

    Args:
        slurm: version of the cluster's Slurm.
        fallow: version of the caller. While Fallow is upgraded, an older head may start a newer program.

    Returns:
        0; CONFIG: this pyslurm does not fit that Slurm; UNAVAILABLE: slurmctld did not answer, or refused.
    """
    if fallow != __version__:
        sys.exit(f"Fallow {__version__} is installed, and {fallow} runs here; restart the head")
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import pyslurm

    if mismatch := _mismatch(pyslurm.__version__, slurm):
        sys.stderr.write(mismatch)
        return Exit.CONFIG
    # From now on the caller waits for slurmctld, and no longer for our beginning.
    answer.write(b"\n")
    answer.flush()
    began = time.monotonic()
    try:
        state = poll(pyslurm)
    except pyslurm.RPCError as error:
        sys.stderr.write(error.msg or f"error {error.errno}")
        return Exit.UNAVAILABLE
    with answer:
        answer.write(msgspec.json.encode(Polled(pyslurm.__version__, time.monotonic() - began, state)))
    return Exit.OK


def _mismatch(version: str, cluster: str) -> str:
    """Why this pyslurm does not fit Slurm of that version; empty: it fits."""
    pyslurm_release, cluster_release = slurm_release(version), slurm_release(cluster)
    if pyslurm_release < OLDEST:
        return f"pyslurm {version} is older than {OLDEST[0]}.{OLDEST[1]:02}"
    if pyslurm_release != cluster_release:
        cluster_version = (
            f"Slurm {cluster_release[0]}.{cluster_release[1]:02}" if cluster_release else "an unknown version of Slurm"
        )
        return f"pyslurm {version} fits only its own version of Slurm, and the cluster runs {cluster_version}"
    return ""


def poll(pyslurm: Any) -> ClusterState:
    """Everything that `SlurmClient.poll` promises, except the time."""
    # Nodes first: if a job ends in between, its node looks allocated for one poll longer, and never idle too early.
    nodes = list(pyslurm.Nodes.load().values())
    partitions = list(pyslurm.Partitions.load().values())
    try:
        reservations = list(pyslurm.Reservations.load().values())
    except pyslurm.RPCError as error:
        if error.errno != _ACCESS_DENIED:  # a site may hide its reservations; the rest is good
            raise
        reservations = []
    jobs = list(pyslurm.Jobs.load().values())
    gpus_used = gpus_of_jobs(jobs, nodes)
    return cluster_state(
        [parse.node(node(record, gpus_used.get(record.name, {}))) for record in nodes],
        [parse.partition(partition(record)) for record in partitions],
        [info for record in reservations for info in parse.reservation(reservation(record))],
        (parse.job(job(record)) for record in jobs),
        at=0.0,
    )


def job(record: Any) -> dict[str, str]:
    """Fields of `parse.JOB_FIELDS`, as squeue 25.11 prints them.

    `--gpus=N` (not per node, nor per task) is seen only if the site counts GPUs as TRES: pyslurm does not read what is
    requested per job.
    """
    requested, allocated = _tres(lambda: record.requested_tres), _tres(lambda: record.allocated_tres)
    return {
        "JobID": str(record.id),
        "HetJobID": _number(record.heterogeneous_id),
        "UserName": user_name(record.user_id),
        "State": record.state or "",
        "Partition": record.partition or "",
        "NumNodes": _number(record.num_nodes),
        "NodeList": record.allocated_nodes or "",
        "SchedNodes": record.scheduled_nodes or "",
        "SubmitTime": _number(record.submit_time),
        "StartTime": _number(record.start_time),
        "EndTime": _number(record.end_time),
        "TimeLimit": _number(record.time_limit),  # minutes
        "PreemptTime": _number(record.preempt_time),
        "PriorityLong": _number(record.priority),
        "EligibleTime": _number(record.eligible_time),
        "NumCPUs": _number(record.cpus),
        "NumTasks": _number(record.ntasks),
        "MinMemory": _megabytes(record.memory_per_node or record.memory_per_cpu),
        "tres-alloc": ",".join(f"{name}={number}" for name, number in (allocated or requested).items()),
        "tres-per-job": _gres(_gpus_of_tres(requested)),
        "tres-per-node": _gres(record.gres_per_node),
        "tres-per-task": _gres(_gpus_of_tres(_tres(lambda: record.tres_per_task))),
        "OverSubscribe": record.resource_sharing or "",
        "ReqNodes": record.required_nodes or "",
        "ExcNodes": record.excluded_nodes or "",
        "Account": record.account or "",
        "QOS": record.qos or "",
        "Reservation": record.reservation or "",
        "Feature": ",".join(record.constraints or ()),
        "Licenses": ",".join(record.licenses or ()),
        "ArrayJobID": _number(record.array_id),
        "ArrayTaskID": _array_tasks(record),
        "RestartCnt": _number(record.requeue_count),
        "Reason": _text(lambda: record.state_reason),
        "Name": _text(lambda: record.name),
        "Comment": _text(lambda: record.comment),
    }


def node(record: Any, gpus_used: Mapping[str, int]) -> dict[str, str]:
    """Words of `scontrol -o -d show node`. Args: gpus_used: type -> number (`gpus_of_jobs`), if TRES do not say."""
    tres_gpus = _gpus_of_tres(record.allocated_tres or {})
    return {
        "NodeName": record.name,
        "State": record.state,
        "Partitions": ",".join(record.partitions or ()),
        "Arch": record.architecture or "",
        "CPUTot": _number(record.total_cpus),
        "CPUEfctv": _number(record.effective_cpus),
        "CPUAlloc": _number(record.allocated_cpus),
        "RealMemory": _number(record.real_memory),
        "MemSpecLimit": _number(record.memory_reserved_for_system),
        "AllocMem": _number(record.allocated_memory),
        "Gres": _gres(record.configured_gres),
        "GresUsed": _gres(tres_gpus or gpus_used),
        "ActiveFeatures": ",".join(record.active_features or ()),
        "Owner": record.owner or "",
    }


def gpus_of_jobs(jobs: Sequence[Any], nodes: Sequence[Any]) -> dict[str, dict[str, int]]:
    """Node -> type of GPU -> number given to jobs, for sites that do not count GPUs as TRES.

    Layouts of jobs are read only if a node needs them: pyslurm's call reads structures that changed between versions of
    Slurm (it ended the process with 24.11, PySlurm issue 380).
    """
    unknown = {
        record.name
        for record in nodes
        if record.allocated_cpus
        and any(name.startswith("gpu") for name in record.configured_gres or {})
        and not any(name.startswith("gres/gpu") for name in record.allocated_tres or {})
    }
    gpus_used: dict[str, dict[str, int]] = {}
    if not unknown:
        return gpus_used
    for record in jobs:
        if record.state not in ("RUNNING", "COMPLETING", "SUSPENDED"):
            continue
        for name, layout in record.get_resource_layout_per_node().items():
            for gres, allocated in layout["gres"].items():
                if name in unknown and gres.startswith("gpu"):
                    number = allocated["count"] if isinstance(allocated, dict) else allocated
                    types = gpus_used.setdefault(name, {})
                    types[gres] = types.get(gres, 0) + number
    return gpus_used


def partition(record: Any) -> dict[str, str]:
    """Words of `scontrol -o show partition`."""
    return {
        "PartitionName": record.name,
        "Nodes": record.nodes or "",
        "MaxTime": str(record.max_time or ""),  # minutes, or UNLIMITED
        "State": record.state,
        "Default": _yes(record.is_default),
        "PriorityTier": _number(record.priority_tier),
        "PreemptMode": record.preempt_mode or "",
        "GraceTime": _number(record.preemption_grace_time),
        "QoS": record.qos or "",
        "OverSubscribe": record.oversubscribe or "",
        "ExclusiveUser": _yes(record.is_user_exclusive),
        "MinNodes": _number(record.min_nodes),
        "MaxNodes": _number(record.max_nodes),
        "RootOnly": _yes(record.is_root_only),
        "AllowAccounts": ",".join(record.allowed_accounts),
        "DenyAccounts": ",".join(record.denied_accounts),
        "AllowQos": ",".join(record.allowed_qos),
        "DenyQos": ",".join(record.denied_qos),
        "AllowGroups": ",".join(record.allowed_groups),
        "ReqResv": _yes(record.requires_reservation),
    }


def reservation(record: Any) -> dict[str, str]:
    """Words of `scontrol -o show reservation`. Flags without a name in pyslurm are omitted."""
    flags = [flag.name for flag in type(record.flags) if flag in record.flags]
    return {
        "ReservationName": record.name or "",
        "Nodes": record.nodes or "",
        "StartTime": _number(record.start_time),
        "EndTime": _number(record.end_time),
        "Flags": ",".join(_RESERVATION_FLAGS.get(name, name) for name in flags),
    }


def _number(value: Any) -> str:
    return "" if value is None else str(value)


def _yes(value: Any) -> str:
    return "YES" if value else "NO"


def _megabytes(value: int | None) -> str:
    return f"{value}M" if value else ""


def _tres(read: Callable[[], Any]) -> dict[str, str]:
    """Memory and gres of a set of TRES by their names, `{"mem": "4000M", "gres/gpu": "1"}`."""
    try:
        value = read()
    except ValueError:  # a count with a unit that pyslurm does not know
        value = None
    if value is None:
        return {}
    gres = {f"gres/{name}": str(gres.count) for name, gres in value.gres.items()}
    return gres if value.mem is None else {"mem": f"{value.mem.count}M", **gres}


def _gpus_of_tres(tres: Mapping[str, Any]) -> dict[str, Any]:
    """GPUs among TRES: of `gres/gpu=4,gres/gpu:a100=4` the types, else the total."""
    gpus = {name.removeprefix("gres/"): number for name, number in tres.items() if name.startswith("gres/gpu")}
    return {name: number for name, number in gpus.items() if name != "gpu"} or gpus


def _gres(value: Mapping[str, Any] | None) -> str:
    return ",".join(f"{name}:{number}" for name, number in (value or {}).items())


def _array_tasks(record: Any) -> str:
    """`3-9%2` of a job array's waiting tasks, else the number of the task itself. pyslurm shows task 0 as None."""
    if record.array_id is None:
        return ""
    tasks: str = record.array_tasks_waiting or str(record.array_task_id or 0)
    return f"{tasks}%{at_once}" if (at_once := record.array_tasks_parallel) else tasks


def _text(read: Callable[[], str | None]) -> str:
    """Text that users may fill with any bytes; empty if it is not UTF-8, which pyslurm cannot read."""
    try:
        return read() or ""
    except UnicodeDecodeError:
        return ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
