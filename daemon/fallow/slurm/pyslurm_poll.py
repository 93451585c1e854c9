"""One poll through pyslurm, in a process of its own: `python -m fallow.slurm.pyslurm_poll SLURM FALLOW` (versions).

A process of its own, because pyslurm keeps the GIL in every call, for 20 s and more when slurmctld hangs, because
libslurm ends the process at import when it finds no usable slurm.conf, and because pyslurm is said to leak (PySlurm
issue 60). The answer is one JSON value on standard output; what pyslurm prints goes to standard error, as does the
reason of an exit code other than 0.

pyslurm's objects are turned into the words that squeue and scontrol print, so that `parse` alone says what they mean.
Tried on pyslurm 25.11.2. Only attributes that are needed are touched: several others raise (PySlurm issues 312, 341).
The objects are Cython's and may be absent here, so they are `Any`.
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
    """The answer."""

    version: str
    "of pyslurm"
    took_s: float
    "slurmctld and pyslurm; starting Python may take longer"
    state: ClusterState
    "`at` is 0: the asker knows slurmctld's clock"


def main(slurm: str, fallow: str) -> int:
    """Print one poll.

    Args:
        slurm: version of the cluster's Slurm.
        fallow: version of the asker. While Fallow is upgraded, an older head may start a newer program.

    Returns:
        0; CONFIG: this pyslurm cannot be used with that Slurm; UNAVAILABLE: slurmctld did not answer, or said no.
    """
    if fallow != __version__:
        sys.exit(f"Fallow {__version__} is installed, and {fallow} runs here; restart the head")
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import pyslurm

    if unsuited := _unsuited(pyslurm.__version__, slurm):
        sys.stderr.write(unsuited)
        return Exit.CONFIG
    # The asker waits for slurmctld from now on, and no longer for us to begin.
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


def _unsuited(version: str, cluster: str) -> str:
    """Why this pyslurm cannot be used with Slurm of that version; empty: it can."""
    own, its = slurm_release(version), slurm_release(cluster)
    if own < OLDEST:
        return f"pyslurm {version} is older than {OLDEST[0]}.{OLDEST[1]:02}"
    if own != its:
        wanted = f"Slurm {its[0]}.{its[1]:02}" if its else "an unknown version of Slurm"
        return f"pyslurm {version} is for its own version of Slurm, and the cluster runs {wanted}"
    return ""


def poll(pyslurm: Any) -> ClusterState:
    """Everything that `SlurmClient.poll` promises, but the time."""
    # Nodes first: a job that ends in between leaves its node taken for one poll longer, never idle too early.
    nodes = list(pyslurm.Nodes.load().values())
    partitions = list(pyslurm.Partitions.load().values())
    try:
        reservations = list(pyslurm.Reservations.load().values())
    except pyslurm.RPCError as error:
        if error.errno != _ACCESS_DENIED:  # a site may hide its reservations; the rest is good
            raise
        reservations = []
    jobs = list(pyslurm.Jobs.load().values())
    used = gpus_of_jobs(jobs, nodes)
    return cluster_state(
        [parse.node(node(found, used.get(found.name, {}))) for found in nodes],
        [parse.partition(partition(found)) for found in partitions],
        [info for found in reservations for info in parse.reservation(reservation(found))],
        (parse.job(job(found)) for found in jobs),
        at=0.0,
    )


def job(found: Any) -> dict[str, str]:
    """Fields of `parse.JOB_FIELDS`, as squeue 25.11 prints them.

    `--gpus=N` (not per node, nor per task) is seen only where the site counts GPUs as TRES: pyslurm does not read
    what is asked for per job.
    """
    asked, given = _tres(lambda: found.requested_tres), _tres(lambda: found.allocated_tres)
    return {
        "JobID": str(found.id),
        "HetJobID": _number(found.heterogeneous_id),
        "UserName": user_name(found.user_id),
        "State": found.state or "",
        "Partition": found.partition or "",
        "NumNodes": _number(found.num_nodes),
        "NodeList": found.allocated_nodes or "",
        "SchedNodes": found.scheduled_nodes or "",
        "SubmitTime": _number(found.submit_time),
        "StartTime": _number(found.start_time),
        "EndTime": _number(found.end_time),
        "TimeLimit": _number(found.time_limit),  # minutes
        "PreemptTime": _number(found.preempt_time),
        "PriorityLong": _number(found.priority),
        "EligibleTime": _number(found.eligible_time),
        "NumCPUs": _number(found.cpus),
        "NumTasks": _number(found.ntasks),
        "MinMemory": _megabytes(found.memory_per_node or found.memory_per_cpu),
        "tres-alloc": ",".join(f"{name}={number}" for name, number in (given or asked).items()),
        "tres-per-job": _gres(_gpus_of_tres(asked)),
        "tres-per-node": _gres(found.gres_per_node),
        "tres-per-task": _gres(_gpus_of_tres(_tres(lambda: found.tres_per_task))),
        "OverSubscribe": found.resource_sharing or "",
        "ReqNodes": found.required_nodes or "",
        "ExcNodes": found.excluded_nodes or "",
        "Account": found.account or "",
        "QOS": found.qos or "",
        "Reservation": found.reservation or "",
        "Feature": ",".join(found.constraints or ()),
        "Licenses": ",".join(found.licenses or ()),
        "ArrayJobID": _number(found.array_id),
        "ArrayTaskID": _array_tasks(found),
        "RestartCnt": _number(found.requeue_count),
        "Reason": _text(lambda: found.state_reason),
        "Name": _text(lambda: found.name),
        "Comment": _text(lambda: found.comment),
    }


def node(found: Any, gpus_used: Mapping[str, int]) -> dict[str, str]:
    """Words of `scontrol -o -d show node`. `gpus_used`: type -> number, from `gpus_of_jobs`, where TRES do not say."""
    counted = _gpus_of_tres(found.allocated_tres or {})
    return {
        "NodeName": found.name,
        "State": found.state,
        "Partitions": ",".join(found.partitions or ()),
        "Arch": found.architecture or "",
        "CPUTot": _number(found.total_cpus),
        "CPUEfctv": _number(found.effective_cpus),
        "CPUAlloc": _number(found.allocated_cpus),
        "RealMemory": _number(found.real_memory),
        "MemSpecLimit": _number(found.memory_reserved_for_system),
        "AllocMem": _number(found.allocated_memory),
        "Gres": _gres(found.configured_gres),
        "GresUsed": _gres(counted or gpus_used),
        "ActiveFeatures": ",".join(found.active_features or ()),
        "Owner": found.owner or "",
    }


def gpus_of_jobs(jobs: Sequence[Any], nodes: Sequence[Any]) -> dict[str, dict[str, int]]:
    """Node -> type of GPU -> number that jobs were given, for sites that do not count GPUs as TRES.

    Asked for only where there is something to find: this call of pyslurm's reads structures that changed between
    versions of Slurm (it ended the process with 24.11, PySlurm issue 380).
    """
    unknown = {
        found.name
        for found in nodes
        if found.allocated_cpus
        and any(name.startswith("gpu") for name in found.configured_gres or {})
        and not any(name.startswith("gres/gpu") for name in found.allocated_tres or {})
    }
    used: dict[str, dict[str, int]] = {}
    if not unknown:
        return used
    for found in jobs:
        if found.state not in ("RUNNING", "COMPLETING", "SUSPENDED"):
            continue
        for name, layout in found.get_resource_layout_per_node().items():
            for gres, given in layout["gres"].items():
                if name in unknown and gres.startswith("gpu"):
                    number = given["count"] if isinstance(given, dict) else given
                    types = used.setdefault(name, {})
                    types[gres] = types.get(gres, 0) + number
    return used


def partition(found: Any) -> dict[str, str]:
    """Words of `scontrol -o show partition`."""
    return {
        "PartitionName": found.name,
        "Nodes": found.nodes or "",
        "MaxTime": str(found.max_time or ""),  # minutes, or UNLIMITED
        "State": found.state,
        "Default": _yes(found.is_default),
        "PriorityTier": _number(found.priority_tier),
        "PreemptMode": found.preempt_mode or "",
        "GraceTime": _number(found.preemption_grace_time),
        "QoS": found.qos or "",
        "OverSubscribe": found.oversubscribe or "",
        "ExclusiveUser": _yes(found.is_user_exclusive),
        "MinNodes": _number(found.min_nodes),
        "MaxNodes": _number(found.max_nodes),
        "RootOnly": _yes(found.is_root_only),
        "AllowAccounts": ",".join(found.allowed_accounts),
        "DenyAccounts": ",".join(found.denied_accounts),
        "AllowQos": ",".join(found.allowed_qos),
        "DenyQos": ",".join(found.denied_qos),
        "AllowGroups": ",".join(found.allowed_groups),
        "ReqResv": _yes(found.requires_reservation),
    }


def reservation(found: Any) -> dict[str, str]:
    """Words of `scontrol -o show reservation`. Flags that pyslurm has no name for are left out."""
    flags = [flag.name for flag in type(found.flags) if flag in found.flags]
    return {
        "ReservationName": found.name or "",
        "Nodes": found.nodes or "",
        "StartTime": _number(found.start_time),
        "EndTime": _number(found.end_time),
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
    found = {f"gres/{name}": str(gres.count) for name, gres in value.gres.items()}
    return found if value.mem is None else {"mem": f"{value.mem.count}M", **found}


def _gpus_of_tres(tres: Mapping[str, Any]) -> dict[str, Any]:
    """GPUs among TRES: of `gres/gpu=4,gres/gpu:a100=4` the types, else the total."""
    found = {name.removeprefix("gres/"): number for name, number in tres.items() if name.startswith("gres/gpu")}
    return {name: number for name, number in found.items() if name != "gpu"} or found


def _gres(value: Mapping[str, Any] | None) -> str:
    return ",".join(f"{name}:{number}" for name, number in (value or {}).items())


def _array_tasks(found: Any) -> str:
    """`3-9%2` of a job array's elements that wait, else the element's own number, of which pyslurm shows 0 as None."""
    if found.array_id is None:
        return ""
    tasks: str = found.array_tasks_waiting or str(found.array_task_id or 0)
    return f"{tasks}%{at_once}" if (at_once := found.array_tasks_parallel) else tasks


def _text(read: Callable[[], str | None]) -> str:
    """What users may fill with any bytes; pyslurm reads them as UTF-8 or not at all."""
    try:
        return read() or ""
    except UnicodeDecodeError:
        return ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
