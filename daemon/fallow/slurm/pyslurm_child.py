"""The process that uses pyslurm: `python -m fallow.slurm.pyslurm_child`, answers on its standard output what it reads.

A process of its own because pyslurm keeps the GIL in every call, for 20 s and more when slurmctld hangs, and because
libslurm ends the process at import when it finds no usable slurm.conf. What it prints goes to standard error.
A request for a poll is one byte. Answers: length (4 bytes, big endian), then msgpack.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from fallow import __version__
from fallow.model import ClusterState
from fallow.slurm import parse, pyslurm_rows
from fallow.slurm.state import cluster_state

_ACCESS_DENIED = 2002
"slurm_errno.h"

REQUEST = b"?"
LENGTH = struct.Struct(">I")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Said once, at the beginning: pyslurm has been imported."""

    version: str
    fallow: str
    "version of Fallow: while it is upgraded, an older head may start a newer child, which talks otherwise"


class Polled(msgspec.Struct, frozen=True, tag="polled"):
    state: ClusterState
    "`at` is 0: the asker knows slurmctld's clock"


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """slurmctld did not answer, or said no."""

    reason: str


Answer = Hello | Polled | Failed


def main() -> int:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import pyslurm

    _send(answers, Hello(pyslurm.__version__, __version__))
    while sys.stdin.buffer.read(len(REQUEST)):
        answer: Answer
        try:
            answer = Polled(poll(pyslurm))
        except pyslurm.RPCError as error:
            answer = Failed(error.msg or f"error {error.errno}")
        _send(answers, answer)
    return 0


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
    used = pyslurm_rows.gpus_of_jobs(jobs, nodes)
    return cluster_state(
        [parse.node(pyslurm_rows.node(found, used.get(found.name, {}))) for found in nodes],
        [parse.partition(pyslurm_rows.partition(found)) for found in partitions],
        [info for found in reservations for info in parse.reservation(pyslurm_rows.reservation(found))],
        (parse.job(pyslurm_rows.job(found)) for found in jobs),
        at=0.0,
    )


def _send(out: BinaryIO, answer: Answer, encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode) -> None:
    data = encode(answer)
    out.write(LENGTH.pack(len(data)) + data)
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
