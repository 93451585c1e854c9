"""The others, poll by poll: whether we may harvest beside them, what they need of us, how long they waited. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fallow.core.allocations import Allocation
from fallow.core.neighbour import permission
from fallow.core.neighbour.declined import Declined
from fallow.core.neighbour.delays import DelayedJob, Delays
from fallow.core.neighbour.heads import Heads
from fallow.core.neighbour.lookout import Lookout, same_until
from fallow.core.neighbour.needs import Standing, preempts_again_s
from fallow.core.neighbour.room import whole_nodes
from fallow.core.neighbour.waiting import looked_at
from fallow.model import ClusterConfig, ClusterState, PartitionInfo

LEAVE_S = 3.5
"""From seeing that somebody waits until workers that have not left are killed; their node must be idle after 6 s."""

END_S = 1.5
"""From then until the job is cancelled, too."""

ALERT_POLLS = 2
"""So many polls come soon when Slurm takes a node from us: the next one shows who came at the same time, and the one
after it who came while that node was being left; they may have counted on it, too (`core.neighbour`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """What the configuration says about others; names and defaults as there."""

    partitions: Collection[str] = ()
    allow_without_preemption: bool = False
    nice: int = 100_000
    harvest_unseen: bool = False
    harvest_unfair: bool = False


class Neighbourhood:
    """Keeps an eye on others' jobs."""

    def __init__(self, manners: Manners) -> None:
        self.manners = manners
        self.refused: dict[str, str] = {}
        "partition -> why it is not harvested"
        self.nice = manners.nice
        "to submit with"
        self.delays = Delays()
        self.alert = 0
        "polls that are to come soon, once"
        self._taken_at = 0.0
        self._visibility = permission.Visibility()
        self._declined = Declined()
        self._lookout = Lookout()
        self._heads = Heads()
        self._partitions: list[PartitionInfo] = []
        "of the last poll"
        self._watchful: frozenset[str] = frozenset()
        "partitions where nothing preempts"
        self._watchful_nodes: dict[str, frozenset[str]] = {}
        "other partitions -> their nodes where nothing does"
        self.watched: frozenset[str] = frozenset()
        "all of these partitions"
        self._allowed: tuple[object, ...] = ()
        "from what `refused` and `nice` were made"
        self._awaited = False
        "somebody waits for a node there whose job is over for us, and not for Slurm"

    def look(
        self,
        cluster: ClusterState,
        config: ClusterConfig | None,
        live: Sequence[Allocation],
        over: Sequence[Allocation],
    ) -> tuple[Standing, list[DelayedJob]]:
        """Take in a poll.

        Args:
            cluster: the poll.
            config: None: Slurm has not told it yet.
            live: every allocation that is.
            over: those that are over for us and may not be for Slurm.

        Returns:
            What others' jobs need of us, and those whose waiting for us is over.
        """
        if cluster.at >= self._taken_at:
            self.alert = max(0, self.alert - 1)
        self._watch(cluster.partitions)
        self._be_allowed(cluster, config)
        standing = self._lookout.assess(
            cluster,
            live,
            former=[a.token for a in over],
            deaf=self._heads.deaf,
            whole_nodes=whole_nodes(config),
            declined=self._declined.nodes if self._declined.declines else None,
            most=looked_at(config),
            again_s=preempts_again_s(config),
        )
        self._declined.polled(cluster, standing.offered, config)
        self._heads.polled(cluster, standing.awaited)
        tokens = frozenset[str]().union(*standing.delayed.values())
        self._awaited = bool(tokens) and any(a.token in tokens and self._ours_to_give(a) for a in over)
        return standing, self.delays.note(cluster, standing.delayed)

    def stands_until(self, cluster: ClusterState, config: ClusterConfig | None, ours: Collection[str]) -> float:
        """Unix time until which others need the same of us, as long as polls show the same of them and of what is near.

        Args:
            cluster: the last poll.
            config: None: Slurm has not told it yet.
            ours: tokens of our allocations.
        """
        if self._declined.follows or self._heads.follows:
            return cluster.at
        return same_until(cluster, ours, preempts_again_s(config))

    def taken(self, at: float) -> None:
        """Slurm takes a node from us. Args: at: Unix time; polls before it do not count."""
        self.alert, self._taken_at = ALERT_POLLS, at

    def watches(self, allocations: Iterable[Allocation]) -> bool:
        """Do we hold nodes that nobody but us would give back, or does somebody wait for the end of a job there?"""
        if self._awaited or not self.watched:
            return self._awaited
        # Where Slurm takes back what we have, as nearly everywhere, a look at the partition will do.
        mine = [a for a in allocations if a.partition in self.watched]
        return any(a.harvested and a.live and self._ours_to_give(a) for a in mine)

    def _watch(self, partitions: list[PartitionInfo]) -> None:
        """Find out where nothing preempts; the same list has the same partitions."""
        if partitions is not self._partitions:
            self._partitions = partitions
            self._watchful = frozenset(p.partition for p in partitions if not p.preempts)
            self._watchful_nodes = {p.partition: p.unpreempted for p in partitions if p.preempts and p.unpreempted}
            self.watched = self._watchful.union(self._watchful_nodes)

    def _ours_to_give(self, allocation: Allocation) -> bool:
        """Would nobody but us give back what it has, or may get?"""
        nodes = self._watchful_nodes.get(allocation.partition)
        if nodes is None:
            return allocation.partition in self._watchful
        return not nodes.isdisjoint(allocation.nodes) if allocation.nodes else self.manners.allow_without_preemption

    def _be_allowed(self, cluster: ClusterState, config: ClusterConfig | None) -> None:
        manners = self.manners
        # Where the site allows what cannot be seen, nobody need look.
        unseen = not manners.harvest_unseen and self._visibility.look(cluster, config)
        if self._allowed == (cluster.partitions, config, unseen, manners):
            return
        self._allowed = cluster.partitions, config, unseen, manners
        refused = permission.refusals(
            cluster, config, unseen=unseen, allow_unseen=manners.harvest_unseen, allow_unfair=manners.harvest_unfair
        )
        if not manners.allow_without_preemption:
            # Nobody wants to harvest the others anyway.
            small = {p.partition for p in cluster.partitions if p.preempts and permission.too_small_for(p)}
            refused = {name: why for name, why in refused.items() if name in small}
        if manners.partitions:
            refused = {name: why for name, why in refused.items() if name in manners.partitions}
        self.refused = refused
        self.nice = permission.nice_for(config, manners.nice)
