"""One poll's state from its parts, whoever read them."""

from __future__ import annotations

import functools
import pwd
from collections.abc import Iterable, Sequence

import msgspec

from fallow.model import ClusterState, JobInfo, NodeInfo, PartitionInfo, ReservationInfo
from fallow.slurm.client import carries
from fallow.slurm.parse import ENDED_STATES


def cluster_state(
    nodes: Sequence[NodeInfo],
    partitions: Sequence[PartitionInfo],
    reservations: Sequence[ReservationInfo],
    jobs: Iterable[JobInfo],
    *,
    at: float,
    user: str,
    names_prefix: str,
) -> ClusterState:
    """As `SlurmClient.poll` promises: others' ended jobs left out, no node of a running job idle.

    Args:
        user: our name, as Slurm shows it.
        names_prefix: what our own ended jobs must carry.
    """
    shown = [job for job in jobs if job.state not in ENDED_STATES or (job.user == user and carries(job, names_prefix))]
    # Two answers, two moments: a job may have started between them. What was seen running is not idle.
    busy = {name for job in shown if job.state == "RUNNING" for name in job.nodes}
    return ClusterState(
        at=at,
        nodes=[
            msgspec.structs.replace(node, state="ALLOCATED") if node.state == "IDLE" and node.node in busy else node
            for node in nodes
        ],
        jobs=shown,
        partitions=list(partitions),
        reservations=list(reservations),
    )


@functools.lru_cache(maxsize=4096)
def user_name(uid: int) -> str:
    """As squeue prints it: the number when the user data base does not know it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
