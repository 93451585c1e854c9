"""Idle nodes on which Slurm does not start our requests. Pure.

A poll does not show all that keeps a job from a node: memory of a suspended job, licences, GPUs that are kept for
others. A node that lies idle beside a request that could have it, for as long as Slurm takes to look at everything a
few times, is one on which such requests do not start. So for a while they do not stand for it, and none is made for
it, each time for twice as long, until the node is used or looks otherwise.
"""

from __future__ import annotations

from fallow.core.accounting.backoff import Asker
from fallow.core.holes import UNUSABLE
from fallow.core.kinds import Kind
from fallow.model import ClusterState

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


class Unstarted:
    """Follows the polls of one head."""

    def __init__(self) -> None:
        self._looks: dict[str, tuple[Look, float]] = {}
        "idle node, or one with something idle -> how it looks, and since when (Unix time)"
        self._declined: dict[tuple[str, RunClass, str], tuple[int, float]] = {}
        "(node, class of run, partition) -> times that it was left alone, and until when (Unix time)"

    def look(self, cluster: ClusterState) -> None:
        """Take in a poll."""
        before, self._looks = self._looks, {}
        for node in cluster.nodes:
            if node.state in SOME_IDLE and UNUSABLE.isdisjoint(node.flags):
                look = node.state, node.cpus_used, node.memory_used_mb, node.gpus_used
                known = before.get(node.node)
                self._looks[node.node] = known if known is not None and known[0] == look else (look, cluster.at)
        same = {name for name, seen in self._looks.items() if before.get(name) == seen}
        self._declined = {key: spell for key, spell in self._declined.items() if key[0] in same}

    def idle_s(self, node: str, at: float) -> float:
        """For how long it has been seen as it is."""
        return max(0.0, at - self._looks[node][1]) if node in self._looks else 0.0

    def decline(self, node: str, run_class: RunClass, partition: str, at: float) -> None:
        """Requests for runs of this class do not start there."""
        key = node, run_class, partition
        times, until = self._declined.get(key, (0, 0.0))
        if until <= at:
            self._declined[key] = times + 1, at + min(LONGEST_S, FIRST_S * 2.0 ** min(times, 20))

    def declined_s(self, node: str, run_class: RunClass, partition: str, at: float) -> float:
        """For how long it is left alone still; 0: it is not."""
        if not self._declined:
            return 0.0
        _, until = self._declined.get((node, run_class, partition), (0, 0.0))
        # When the clock was set back, nobody knows.
        return max(0.0, until - at) if until - at <= LONGEST_S else 0.0
