"""The state of one poll from its parts, whichever client read them."""

import contextlib
import functools
import grp
import os
import pwd
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from fallow.core.states import ENDED_STATES, ON_NODES
from fallow.core.tokens import carries_token
from fallow.model import ClusterState, JobInfo, NodeInfo, PartitionInfo, ReservationInfo

Info = TypeVar("Info", NodeInfo, JobInfo, ReservationInfo)

# Slurm shows of a completing job only the nodes that it has not left. If one is idle now, the job has left it since.
_KEEPING = ON_NODES - {"COMPLETING"}

_INFOS: tuple[type[msgspec.Struct], ...] = (NodeInfo, JobInfo, ReservationInfo)
_TIMES = {kind: [name for name in kind.__struct_fields__ if name.endswith(("_at", "_since"))] for kind in _INFOS}


def on_our_clock(state: ClusterState, at: float, offset_s: float) -> ClusterState:
    """Convert a poll's times from slurmctld's clock to ours, so that nobody else compares two clocks.

    Args:
        state: its times are slurmctld's; `at` has no meaning.
        at: our Unix time of the answer.
        offset_s: seconds by which slurmctld's clock is ahead of ours.
    """
    if not offset_s:
        return msgspec.structs.replace(state, at=at)
    return msgspec.structs.replace(
        state,
        at=at,
        clock_offset_s=offset_s,
        nodes=[shift_earlier(node, offset_s) for node in state.nodes],
        jobs=[msgspec.structs.replace(shift_earlier(job, offset_s), clock_offset_s=offset_s) for job in state.jobs],
        reservations=[shift_earlier(reservation, offset_s) for reservation in state.reservations],
    )


def shift_earlier(info: Info, seconds: float) -> Info:
    """The same object with all times earlier by `seconds`."""
    times = {name: getattr(info, name) for name in _TIMES[type(info)]}
    return msgspec.structs.replace(info, **{name: at - seconds for name, at in times.items() if at is not None})


def cluster_state(
    nodes: Sequence[NodeInfo],
    partitions: Sequence[PartitionInfo],
    reservations: Sequence[ReservationInfo],
    jobs: Iterable[JobInfo],
    *,
    at: float,
) -> ClusterState:
    """Join the parts as `SlurmClient.poll` promises: no ended jobs of others, and no idle node that a job holds."""
    # The user database may be unavailable, for us or for squeue, which then shows the number. Look up each user
    # once a poll: thousands of jobs may belong to users that the database does not know now.
    user_name.cache_clear()
    own_names = {user_name(os.getuid()), str(os.getuid())}
    visible_jobs = [
        job for job in jobs if job.state not in ENDED_STATES or (job.user in own_names and carries_token(job))
    ]
    # A job may have started between the two answers. And Slurm calls a node idle if its only job is suspended, although
    # that job keeps its memory and GPUs.
    busy = {name for job in visible_jobs if job.state in _KEEPING for name in job.nodes}
    return ClusterState(
        at=at,
        nodes=[
            msgspec.structs.replace(node, state="ALLOCATED") if node.state == "IDLE" and node.node in busy else node
            for node in nodes
        ],
        jobs=visible_jobs,
        partitions=list(partitions),
        reservations=list(reservations),
    )


@functools.lru_cache(maxsize=4096)
def user_name(uid: int) -> str:
    """Name as squeue prints it: the number if the user database does not know the user. Cached until the next poll."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def own_groups() -> frozenset[str] | None:
    """Names of our groups, as a partition's AllowGroups names them; None: the user database does not know us."""
    try:
        user = pwd.getpwuid(os.getuid())
        ids = os.getgrouplist(user.pw_name, user.pw_gid)
    except (KeyError, OSError):
        return None
    names = set()
    for group in ids:
        with contextlib.suppress(KeyError):
            names.add(grp.getgrgid(group).gr_name)
    return frozenset(names)
