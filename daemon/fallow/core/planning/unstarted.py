"""Idle nodes on which Slurm does not start our requests. Pure.

A poll does not show all that keeps a job from a node: memory of a suspended job, licences, GPUs that are kept for
others. A node that lies idle beside a request that could have it, for as long as Slurm takes to look at everything a
few times, is one on which such requests do not start. So for a while they do not stand for it, and none is made for
it, each time for twice as long, until the node is used or looks otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

from fallow.core.accounting.backoff import Asker
from fallow.core.holes import UNUSABLE
from fallow.core.kinds import Kind
from fallow.model import ClusterState, NodeInfo


class RunClass(NamedTuple):
    """Runs that share these can use the same nodes."""

    kind: Kind
    partitions: tuple[str, ...]
    "that were named; empty: any"
    asker: Asker
    barred: frozenset[str]
    "nodes that they do without"


Look = tuple[str, int, int, int]
"""State, and CPUs, memory and GPUs in use."""

Request = tuple[Kind, Asker, str]
"""Kind of node, in whose name, and the partition: requests that share these start on the same nodes."""

LEAST_S = 90.0
"""Slurm is given so long in any case: it looks at everything once a minute."""

SOME_IDLE = ("IDLE", "MIXED")
"""States of nodes of which something may be had."""

FIRST_S, LONGEST_S = 600.0, 6 * 3600.0
"""A node is left alone for so long after the first time, and at most."""


class Unstarted:
    """Follows the polls of one head."""

    def __init__(self) -> None:
        self._looks: dict[str, tuple[Look, float]] = {}
        "idle node, or one with something idle -> how it looks, and since when (Unix time)"
        self._declined: dict[str, dict[Request, tuple[int, float]]] = {}
        "node -> requests -> times that it was left alone, and until when (Unix time)"

    def look(self, cluster: ClusterState) -> None:
        """Take in a poll."""
        before, self._looks = self._looks, {}
        for node in cluster.nodes:
            # Most are in use: a call less for each counts.
            look = _look(node) if node.state in SOME_IDLE else None
            if look is not None:
                known = before.get(node.node)
                self._looks[node.node] = known if known is not None and known[0] == look else (look, cluster.at)
        same = (node for node in self._declined if self._looks.get(node, 0) == before.get(node, 1))
        self._declined = {node: self._declined[node] for node in list(same)}

    def idle_s(self, node: str, at: float) -> float:
        """For how long it has been seen as it is."""
        return max(0.0, at - self._looks[node][1]) if node in self._looks else 0.0

    def decline(self, node: str, run_class: RunClass, partition: str, at: float) -> None:
        """Requests for runs of this class do not start there."""
        if self.declined_s(node, run_class, partition, at):
            return
        request, spells = (run_class.kind, run_class.asker, partition), self._declined.setdefault(node, {})
        times, _ = spells.get(request, (0, 0.0))
        spells[request] = times + 1, at + min(LONGEST_S, FIRST_S * 2.0 ** min(times, 20))

    def declined_s(self, node: str, run_class: RunClass, partition: str, at: float) -> float:
        """For how long it is left alone still; 0: it is not."""
        if node not in self._declined:
            return 0.0
        _, until = self._declined[node].get((run_class.kind, run_class.asker, partition), (0, 0.0))
        # When the clock was set back, nobody knows.
        return max(0.0, until - at) if until - at <= LONGEST_S else 0.0


def _look(node: NodeInfo) -> Look | None:
    """Of a node with something idle: changes when it is used otherwise; None: nothing of it can be had."""
    if not UNUSABLE.isdisjoint(node.flags):
        return None
    return node.state, node.cpus_used, node.memory_used_mb, node.gpus_used
