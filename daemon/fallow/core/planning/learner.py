"""What is learned from polls, from nodes that come, and from what Slurm does not start. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from math import inf

from fallow.core.accounting.backoff import Asker, Scope, scope_of
from fallow.core.allocations import Allocation
from fallow.core.holes import is_idle
from fallow.core.planning.rules import HarvestRules, Known, harvestable
from fallow.model import AllocationState, ClusterState

Asked = tuple[Allocation, Asker]
"""A harvest allocation, and in whose name it is asked for."""


class Learner:
    """Keeps `known` up to date."""

    def __init__(self) -> None:
        self.known = Known()
        self._polled_at = inf
        "Unix time of the last poll; infinity: no poll has been seen yet"
        self._holders: dict[str, Asker] = {}
        "token of an allocation that held a node by then -> in whose name"
        self._idle: set[str] | None = None
        "nodes that the last poll showed idle, ours included; None: no poll has been seen yet"

    def take_in(
        self, cluster: ClusterState, harvest: Sequence[Asked], rules: HarvestRules, now: float
    ) -> list[tuple[str, str]]:
        """Take in a poll, after the allocations have been brought up to date.

        Args:
            cluster: the poll.
            harvest: every harvest allocation that is still kept, live or not.
            rules: what may be asked for.
            now: Unix time.

        Returns:
            (run, text) of what is left alone from now on.
        """
        self.known.backoff.bound(now)
        held = (AllocationState.RUNNING, AllocationState.RELEASING)
        whole = [a for a, _ in harvest if (a.state in held or a.is_booting) and a.part is None]
        ours = {node for a in whole for node in a.nodes}
        self._count_fallen_idle(cluster, ours, {p.partition for p in harvestable(cluster, rules)})
        before, self._holders = self._holders, {a.token: who for a, who in harvest if a.live and a.start_at is not None}
        # Where jobs of ours have ended, a limit of their account or QOS has room for as many again.
        for who, count in Counter(who for token, who in before.items() if token not in self._holders).items():
            self.known.backoff.eased(who, now, count)
        # Those that began before this head did have been taken note of by the one before.
        begun = self._holders.keys() - before.keys() if self._polled_at < inf else set[str]()
        for allocation, asker in harvest:
            start_at, active_at = allocation.start_at, allocation.active_at
            if allocation.token in begun:
                self.known.backoff.started(asker, allocation.partition, now)
            # A successor is ready early and joins when the node before it leaves.
            if (
                start_at is not None
                and active_at is not None
                and active_at > self._polled_at
                and not allocation.replaces
            ):
                wait_s = None if allocation.ahead else start_at - allocation.requested_at
                self.known.experience.started(wait_s, active_at - start_at, active_at)
        self._polled_at = now
        # Those that start and those that wait in one poll tell of the same limit, which is at the last that started.
        pending = AllocationState.PENDING
        waits = [(a, asker) for a, asker in harvest if a.state is pending and a.asked_at is None]
        news = ((a.run, self._follow_wait(a, asker, now)) for a, asker in waits)
        return [(run, text) for run, text in news if text]

    def _count_fallen_idle(self, cluster: ClusterState, ours: Collection[str], partitions: AbstractSet[str]) -> None:
        """How many nodes have fallen idle since the last poll? One that we have, or had a moment ago, is idle to us."""
        before, self._idle = self._idle, {n.node for n in cluster.nodes if n.node in ours or is_idle(n)}
        if before is not None:
            ending = {n.node for n in cluster.nodes if "COMPLETING" in n.flags} & before
            fresh = self._idle - before
            self._idle |= ending
            matter = {n.node for n in cluster.nodes if n.node in fresh and not partitions.isdisjoint(n.partitions)}
            self.known.experience.came(len(matter), cluster.at)

    def _follow_wait(self, allocation: Allocation, asker: Asker, now: float) -> str:
        """Returns: what is left alone from now on, in words."""
        scope = scope_of(allocation.reason)
        if scope is Scope.NOTHING:
            return ""
        # What stands against one node says nothing about the partition.
        if allocation.part is not None and scope is not Scope.OWNER:
            return ""
        return self.strike(asker, allocation.partition, allocation.minutes, allocation.reason, now)

    def strike(self, asker: Asker, partition: str, minutes: int | None, reason: str, now: float) -> str:
        """Slurm said no, or lets a request wait, for a reason that may be none to leave anything alone.

        Returns:
            What is left alone from now on, in words; empty: nothing, or it was already.
        """
        backoff = self.known.backoff
        before = backoff.until(asker, partition)
        backoff.strike(reason, asker, partition, minutes, now)
        if backoff.until(asker, partition) > before:
            return f"Slurm says {reason}: {backoff.words(asker, partition, now)}"
        return ""
