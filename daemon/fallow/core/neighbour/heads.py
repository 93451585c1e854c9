"""Other heads on the cluster, of which nothing but their jobs is seen. Pure.

A head gives nodes back within seconds of seeing that somebody waits for them. One that is dead, or cut off, does not,
and its jobs go on until their time is over: to count on their nodes would keep others' idle for hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from fallow.core.neighbour.waiting import picks_up
from fallow.core.states import ENDING, ON_NODES
from fallow.model import ClusterState

PATIENCE_S = 60.0
"""So long a job has waited for nodes of a head that gives none back before we believe that it will not: some polls of
that head's, each followed by what its workers may take."""

BETWEEN_S = 15.0
"""More than that between two polls says nothing of the other head: Slurm may have been away for it, too."""


class Heads:
    """Follows the polls of one head."""

    def __init__(self) -> None:
        self.deaf: frozenset[str] = frozenset()
        "names of jobs whose head does not give their nodes back"
        self._waited_s: dict[tuple[str, str], float] = {}
        "(job that waits, owner of a head) -> seconds that it has waited for nodes of that head, which kept them all"
        self._running: dict[str, str] = {}
        "job of a head -> its owner"
        self._polled_at = 0.0

    @property
    def follows(self) -> bool:
        """Does it count polls?"""
        return bool(self._waited_s or self.deaf)

    def polled(self, cluster: ClusterState, awaited: Mapping[str, AbstractSet[str]]) -> None:
        """Take in a poll. Args: awaited: `Standing.awaited`."""
        passed, self._polled_at = max(0.0, min(BETWEEN_S, cluster.at - self._polled_at)), cluster.at
        if not (awaited or self.deaf):
            self._waited_s, self._running = {}, {}
            return
        there = (job for job in cluster.jobs if job.state in ON_NODES - ENDING and picks_up(job))
        before, self._running = self._running, {job.name: job.user for job in there}
        hear = {owner for name, owner in before.items() if name not in self._running}
        pairs = {(job, self._running[name]) for job, names in awaited.items() for name in names & self._running.keys()}
        known = self._waited_s
        self._waited_s = {
            pair: known[pair] + passed if pair in known and pair[1] not in hear else 0.0 for pair in pairs
        }
        deaf = {owner for (_, owner), waited_s in self._waited_s.items() if waited_s >= PATIENCE_S}
        stay = {name for name, owner in self._running.items() if owner in deaf}
        self.deaf = frozenset(stay | (self.deaf & self._running.keys()))
