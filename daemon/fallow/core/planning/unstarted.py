"""Idle nodes on which Slurm does not start our requests. Pure.

A poll does not show all that keeps a job from a node: memory of a suspended job, licences, GPUs that are kept for
others. A node that a request could get, and that lies idle for as long as Slurm takes to look at everything a few
times, is one on which such requests do not start. So for a while they do not stand for it, and none is made for it,
each time for twice as long, until the node is used or looks otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fallow.core.accounting.backoff import Asker
from fallow.core.holes import UNUSABLE
from fallow.core.kinds import Kind
from fallow.model import ClusterState


class RunClass(NamedTuple):
    """Runs that share these can use the same nodes."""

    kind: Kind
    partitions: tuple[str, ...]
    "that were named; empty: any"
    asker: Asker
    barred: frozenset[str]
    "nodes that they do without"


Look = tuple[str, int, int, int]
"""State, and CPUs, memory and GPUs in use: changes when a node is used otherwise."""

Request = tuple[str, Kind, Asker, str]
"""Node, kind of node, in whose name, and the partition: requests that share these start there, or none does."""

LEAST_S = 90.0
"""Slurm is given so long in any case: it looks at everything once a minute."""

SOME_IDLE = ("IDLE", "MIXED")
"""States of nodes of which something may be had."""

FIRST_S, LONGEST_S = 600.0, 6 * 3600.0
"""A node is left alone for so long after the first time, and at most."""


@dataclass(frozen=True, slots=True)
class Unstarted:
    """What the polls of one head have shown."""

    looks: Mapping[str, tuple[Look, float]] = field(default_factory=dict)
    "idle node, or one with something idle -> how it looks, and since when (Unix time)"
    declined: Mapping[Request, tuple[int, float]] = field(default_factory=dict)
    "times that a node was left alone, and until when (Unix time)"

    def look(self, cluster: ClusterState) -> Unstarted:
        """After one more poll."""
        looks: dict[str, tuple[Look, float]] = {}
        for node in cluster.nodes:
            if node.state in SOME_IDLE and UNUSABLE.isdisjoint(node.flags):
                look = node.state, node.cpus_used, node.memory_used_mb, node.gpus_used
                known = self.looks.get(node.node)
                looks[node.node] = known if known is not None and known[0] == look else (look, cluster.at)
        same = (request for request in self.declined if looks.get(request[0], 0) == self.looks.get(request[0], 1))
        return Unstarted(looks, {request: self.declined[request] for request in same})

    def idle_s(self, node: str, at: float) -> float:
        """For how long it has been seen as it is."""
        return max(0.0, at - self.looks[node][1]) if node in self.looks else 0.0

    def decline(self, found: Iterable[tuple[str, RunClass, str]], at: float) -> Unstarted:
        """After requests for runs of such classes were found not to start on such nodes, in such partitions."""
        declined = dict(self.declined)
        for node, run_class, partition in found:
            if not self.declined_s(node, run_class, partition, at):
                request = node, run_class.kind, run_class.asker, partition
                times, _ = self.declined.get(request, (0, 0.0))
                declined[request] = times + 1, at + min(LONGEST_S, FIRST_S * 2.0 ** min(times, 20))
        return Unstarted(self.looks, declined)

    def declined_s(self, node: str, run_class: RunClass, partition: str, at: float) -> float:
        """For how long it is left alone still; 0: it is not."""
        if not self.declined:
            return 0.0
        _, until = self.declined.get((node, run_class.kind, run_class.asker, partition), (0, 0.0))
        # When the clock was set back, nobody knows.
        return max(0.0, until - at) if until - at <= LONGEST_S else 0.0
