"""The process that uses pyslurm: `python -m fallow.slurm.pyslurm_child`, answers on its standard output what it reads.

A process of its own because pyslurm keeps the GIL in every call, for 20 s and more when slurmctld hangs, and because
libslurm ends the process at import when it finds no usable slurm.conf. What it prints goes to standard error.
Messages: length (4 bytes, big endian), then msgpack.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import msgspec

from fallow.model import ClusterState, PartitionInfo
from fallow.slurm import parse, pyslurm_rows
from fallow.slurm.state import cluster_state, user_name

# slurm_errno.h
_ACCESS_DENIED = 2002
_INVALID_JOB_ID = 2017
_ALREADY_DONE = 2021

LENGTH = struct.Struct(">I")


class Poll(msgspec.Struct, frozen=True, tag="poll"):
    names_prefix: str
    partitions: bool = True
    "ask for them, too; else they are as at the last poll"


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    jobs: list[int]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Said once, at the beginning: pyslurm has been imported."""

    version: str


class Polled(msgspec.Struct, frozen=True, tag="polled"):
    state: ClusterState
    "`at` is 0: the asker knows slurmctld's clock"


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    doubtful: list[int]
    "jobs whose end was not confirmed"


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """slurmctld did not answer, or said no."""

    reason: str


Request = Poll | Cancel
Answer = Hello | Polled | Cancelled | Failed


def main() -> int:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import pyslurm

    _send(answers, Hello(pyslurm.__version__))
    decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
    partitions: list[PartitionInfo] = []
    while header := sys.stdin.buffer.read(LENGTH.size):
        request = decoder.decode(sys.stdin.buffer.read(*LENGTH.unpack(header)))
        try:
            answer: Answer
            if isinstance(request, Poll):
                answer = Polled(poll(pyslurm, request, partitions))
                partitions = answer.state.partitions
            else:
                answer = cancel(pyslurm, request)
        except pyslurm.RPCError as error:
            answer = Failed(error.msg or f"error {error.errno}")
        _send(answers, answer)
    return 0


def poll(pyslurm: Any, request: Poll, partitions: Sequence[PartitionInfo]) -> ClusterState:
    """Everything that `SlurmClient.poll` promises, but the time. Args: partitions: as of the last poll."""
    # Nodes first: a job that ends in between leaves its node taken for one poll longer, never idle too early.
    nodes = list(pyslurm.Nodes.load().values())
    if request.partitions:
        found = pyslurm.Partitions.load().values()
        partitions = [parse.partition(pyslurm_rows.partition(each)) for each in found]
    try:
        reservations = list(pyslurm.Reservations.load().values())
    except pyslurm.RPCError as error:
        if error.errno != _ACCESS_DENIED:  # a site may hide its reservations; the rest is good
            raise
        reservations = []
    jobs = list(pyslurm.Jobs.load().values())
    used = pyslurm_rows.gpus_of_jobs(jobs, nodes)
    return cluster_state(
        [parse.node(pyslurm_rows.node(found, used.get(found.name, {}))) for found in nodes],
        partitions,
        [info for found in reservations for info in parse.reservation(pyslurm_rows.reservation(found))],
        (parse.job(pyslurm_rows.job(found)) for found in jobs),
        at=0.0,
        user=user_name(os.getuid()),
        names_prefix=request.names_prefix,
    )


def cancel(pyslurm: Any, request: Cancel) -> Cancelled:
    """Cancel jobs; those that have ended do not matter.

    pyslurm judges by the errno of the C library, which may be a stale one. So an error only makes a job doubtful.
    """
    doubtful = []
    for job_id in request.jobs:
        try:
            pyslurm.Job(job_id).cancel()
        except pyslurm.RPCError as error:
            if error.errno not in (_INVALID_JOB_ID, _ALREADY_DONE):
                doubtful.append(job_id)
    return Cancelled(doubtful)


def _send(out: BinaryIO, answer: Answer, encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode) -> None:
    data = encode(answer)
    out.write(LENGTH.pack(len(data)) + data)
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
