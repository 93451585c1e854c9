"""Idle nodes on which Slurm does not start our requests. Pure.

A poll does not show all that keeps a job from a node: memory of a suspended job, licences, GPUs that are kept for
others. A node that lies idle beside a request that could have it, for as long as Slurm takes to look at everything a
few times, is one on which such requests do not start. So for a while they do not stand for it, and none is made for
it, each time for twice as long, until the node is used or looks otherwise.
"""

from __future__ import annotations

import msgspec

from fallow.core.accounting.backoff import Asker
from fallow.core.holes import UNUSABLE
from fallow.core.kinds import Kind
from fallow.model import ClusterState, NodeInfo

RunClass = tuple[Kind, tuple[str, ...], Asker]
"""Kind of node, partitions that were named, and in whose name: runs that share these can use the same nodes."""

Look = tuple[str, int, int, int]
"""State, and CPUs, memory and GPUs in use."""

LEAST_S = 90.0
"""Slurm is given so long in any case: it looks at everything once a minute."""

SOME_IDLE = ("IDLE", "MIXED")
"""States of nodes of which something may be had."""

FIRST_S, LONGEST_S = 600.0, 6 * 3600.0
"""A node is left alone for so long after the first time, and at most."""


class Declined(msgspec.Struct, frozen=True):
    """What is written down of a node that is left alone."""

    node: str
    look: Look
    since: float
    "for how it looks, Unix time"
    to: list[tuple[RunClass, str, int, float]]
    "class of run, partition, times, until when"


class AllDeclined(msgspec.Struct, frozen=True):
    """What is written down of all nodes that are left alone."""

    nodes: list[Declined] = []


class Unstarted:
    """Follows the polls of one head."""

    def __init__(self) -> None:
        self._looks: dict[str, tuple[Look, float]] = {}
        "idle node, or one with something idle -> how it looks, and since when (Unix time)"
        self._declined: dict[str, dict[tuple[RunClass, str], tuple[int, float]]] = {}
        "node -> (class of run, partition) -> times that it was left alone, and until when (Unix time)"

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
        times, until = self._declined.setdefault(node, {}).get((run_class, partition), (0, 0.0))
        if until <= at:
            self._declined[node][run_class, partition] = times + 1, at + min(LONGEST_S, FIRST_S * 2.0 ** min(times, 20))

    def remembered(self) -> AllDeclined:
        """What the next head needs to know."""
        return AllDeclined(
            [
                Declined(node, *self._looks[node], [(*key, *spell) for key, spell in to.items()])
                for node, to in self._declined.items()
                if node in self._looks
            ]
        )

    def recall(self, known: AllDeclined) -> None:
        """Go on from what an earlier head knew. A node that looks otherwise at the next poll was used since."""
        for each in known.nodes:
            self._looks[each.node] = each.look, each.since
            self._declined[each.node] = {(whom, partition): (times, until) for whom, partition, times, until in each.to}

    def nodes(self) -> set[str]:
        """Those that are, or were a while ago, declined to somebody."""
        return set(self._declined)

    def declined_s(self, node: str, run_class: RunClass, partition: str, at: float) -> float:
        """For how long it is left alone still; 0: it is not."""
        if node not in self._declined:
            return 0.0
        _, until = self._declined[node].get((run_class, partition), (0, 0.0))
        # When the clock was set back, nobody knows.
        return max(0.0, until - at) if until - at <= LONGEST_S else 0.0


def _look(node: NodeInfo) -> Look | None:
    """Of a node with something idle: changes when it is used otherwise; None: nothing of it can be had."""
    if not UNUSABLE.isdisjoint(node.flags):
        return None
    return node.state, node.cpus_used, node.memory_used_mb, node.gpus_used
