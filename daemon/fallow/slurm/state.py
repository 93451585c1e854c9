"""One poll's state from its parts, whoever read them."""

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

# Of one that is completing only the nodes are shown that it has not left yet; one that is idle now has been left since.
_KEEPING = ON_NODES - {"COMPLETING"}

_INFOS: tuple[type[msgspec.Struct], ...] = (NodeInfo, JobInfo, ReservationInfo)
_TIMES = {kind: [name for name in kind.__struct_fields__ if name.endswith(("_at", "_since"))] for kind in _INFOS}


def on_our_clock(state: ClusterState, at: float, offset_s: float) -> ClusterState:
    """A poll with Slurm's times as a poll with ours, so that nobody else has to compare two clocks.

    Args:
        state: every time in it is slurmctld's, but `at`, which means nothing.
        at: our Unix time of the answer.
        offset_s: what slurmctld's clock is ahead of ours.
    """
    if not offset_s:
        return msgspec.structs.replace(state, at=at)
    return msgspec.structs.replace(
        state,
        at=at,
        clock_offset_s=offset_s,
        nodes=[earlier(node, offset_s) for node in state.nodes],
        jobs=[msgspec.structs.replace(earlier(job, offset_s), clock_offset_s=offset_s) for job in state.jobs],
        reservations=[earlier(reservation, offset_s) for reservation in state.reservations],
    )


def earlier(info: Info, seconds: float) -> Info:
    """The same with every time so much earlier."""
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
    """As `SlurmClient.poll` promises: others' ended jobs left out, no node idle that a job keeps."""
    # The user data base may be away, for us or for squeue, which shows the number then. Each user is looked up once a
    # poll: thousands of jobs may belong to users whom it does not know, or not now.
    user_name.cache_clear()
    own = {user_name(os.getuid()), str(os.getuid())}
    shown = [job for job in jobs if job.state not in ENDED_STATES or (job.user in own and carries_token(job))]
    # Two answers, two moments: a job may have started between them. And Slurm calls a node idle whose only job is
    # suspended, though that job keeps its memory and GPUs.
    busy = {name for job in shown if job.state in _KEEPING for name in job.nodes}
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
    """As squeue prints it: the number when the user data base does not know it. Kept until the next poll."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def own_groups() -> frozenset[str] | None:
    """Names of our groups, as AllowGroups of a partition may name them; None: the user data base does not know."""
    try:
        me = pwd.getpwuid(os.getuid())
        ids = os.getgrouplist(me.pw_name, me.pw_gid)
    except (KeyError, OSError):
        return None
    found = set()
    for group in ids:
        with contextlib.suppress(KeyError):
            found.add(grp.getgrgid(group).gr_name)
    return frozenset(found)
