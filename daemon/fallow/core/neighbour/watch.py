"""The good neighbour from poll to poll: permission, needs, delays, and how soon the next poll comes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fallow.core.allocations import Allocation
from fallow.core.neighbour.delays import DelayedJob, Delays
from fallow.core.neighbour.needs import ExternalDemand, assess
from fallow.core.neighbour.permission import Visibility, nice_for, refusals, too_small_for
from fallow.core.neighbour.site import site_rules
from fallow.model import ClusterConfig, ClusterState

LEAVE_S = 3.5
"""From seeing that somebody waits until workers that have not left are killed; their node must be idle after 6 s."""

END_S = 1.5
"""From then until the job is cancelled, too."""

ALERT_POLLS = 2
"""So many polls come soon when Slurm takes a node from us. The next one shows who came at the same time, and the one
after it who came while that node was being left: they may have counted on the node, too (`needs`)."""

WATCHFUL_S, LONGEST_WATCHFUL_S = 5.0, 15.0
"""Polls are at most so far apart while we hold nodes that nobody but us would give back, and while they get no
answer."""

CYCLES = 3
"""Slurm has looked at a job so often without starting it before we believe that it will not."""

AGAIN = 10
"""A job is passed over for so many times as long as it took to find out."""


def interval_s(usual: float, watchful: bool) -> float:
    """From one poll to the next that is wanted. Args: usual: as configured."""
    return min(usual, WATCHFUL_S) if watchful else usual


def longest_interval_s(usual: float, watchful: bool) -> float:
    """Between polls that get no answer: others' jobs may wait for what only we give back."""
    return LONGEST_WATCHFUL_S if watchful else 10 * usual


def poll_interval_s(wanted: float, least: float, failures: int, longest: float) -> float:
    """From the begin of one poll to that of the next.

    Args:
        wanted: where Slurm answers at once.
        least: what its load allows for; a tenth of the polls that are wanted come in any case.
        failures: polls in a row without an answer; each doubles the interval.
        longest: up to which they do.
    """
    usual = min(max(wanted, least), 10 * wanted)
    return max(usual, min(usual * 2.0 ** min(failures, 4), longest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """What the configuration says about others; names and defaults as there."""

    partitions: Collection[str] = ()
    allow_without_preemption: bool = False
    nice: int = 100_000
    harvest_unseen: bool = False
    harvest_unfair: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Which jobs could have started in earlier polls, and did not."""

    at: float = 0.0
    "Unix time of the last poll"
    offered: Mapping[tuple[str, str], float] = field(default_factory=dict)
    "(job, node) -> Unix time since which the job could start there"
    passed_over: Mapping[str, float] = field(default_factory=dict)
    "job that does not start -> Unix time until which nothing is kept free or given back for it"


def remember(memory: Memory, at: float, demand: ExternalDemand, looks_again_s: float) -> Memory:
    """Add a poll to the memory.

    A poll does not show all that keeps a job from starting: licences, excluded nodes before 24.05, another head that is
    dead. So nodes are kept for a job until Slurm has looked at it `CYCLES` times, and then not for `AGAIN` times as
    long.
    """
    # While nobody saw anything, Slurm may have been away.
    away_s = max(0.0, at - memory.at - looks_again_s)
    before = {pair: since + away_s for pair, since in memory.offered.items()}
    pairs = ((job.job_id, node) for job, nodes in demand.offers for node in nodes)
    offered = {pair: before.get(pair, at) for pair in pairs}
    patience_s = CYCLES * looks_again_s
    passed_over = {job: until for job, until in memory.passed_over.items() if until > at}
    passed_over |= {job: at + AGAIN * patience_s for (job, _), since in offered.items() if at - since >= patience_s}
    return Memory(at, offered, passed_over)


class Watch:
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
        self.unpreempted: dict[str, frozenset[str]] = {}
        "partition -> its nodes that nobody but us would give back; only partitions with such nodes"
        self._taken_at = 0.0
        self._visibility = Visibility()
        self._memory = Memory()
        self._awaited = False
        "somebody waits for a node there whose job is over for us, and not for Slurm"

    def look(
        self,
        cluster: ClusterState,
        config: ClusterConfig | None,
        live: Sequence[Allocation],
        over: Sequence[Allocation],
    ) -> tuple[ExternalDemand, list[DelayedJob]]:
        """Take in a poll.

        Args:
            cluster: the poll.
            config: None: Slurm has not told it yet.
            live: every live allocation.
            over: allocations that are over for us and may not be for Slurm.

        Returns:
            What others' jobs need of us, and those whose waiting for us is over.
        """
        if cluster.at >= self._taken_at:
            self.alert = max(0, self.alert - 1)
        nodes = {p.partition: p.unpreempted if p.preempts else frozenset(p.nodes) for p in cluster.partitions}
        self.unpreempted = {name: some for name, some in nodes.items() if some}
        self._ask_permission(cluster, config)
        site = site_rules(config)
        demand = assess(
            cluster,
            live,
            former=[a.token for a in over],
            passed_over=self._memory.passed_over,
            site=site,
        )
        self._memory = remember(self._memory, cluster.at, demand, site.looks_again_s)
        tokens = frozenset[str]().union(*demand.delayed_jobs.values())
        self._awaited = any(a.token in tokens and self._is_ours_to_give(a) for a in over)
        return demand, self.delays.note(cluster, demand.delayed_jobs)

    def taken(self, at: float) -> None:
        """Slurm takes a node from us. Args: at: Unix time; polls before it do not count."""
        self.alert, self._taken_at = ALERT_POLLS, at

    def is_watchful(self, allocations: Iterable[Allocation]) -> bool:
        """Return True if polls must come soon: we hold nodes that nobody but us would give back, or somebody waits for
        the end of a job of ours there."""
        ours = (a for a in allocations if a.partition in self.unpreempted and a.harvested and a.live)
        return self._awaited or any(map(self._is_ours_to_give, ours))

    def _is_ours_to_give(self, allocation: Allocation) -> bool:
        """Return True if nobody but us would give back what the allocation has, or may get."""
        nodes = self.unpreempted.get(allocation.partition, frozenset())
        may_get = bool(nodes) and self.manners.allow_without_preemption
        return not nodes.isdisjoint(allocation.nodes) if allocation.nodes else may_get

    def _ask_permission(self, cluster: ClusterState, config: ClusterConfig | None) -> None:
        manners = self.manners
        # Where the site allows what cannot be seen, nobody need look.
        unseen = not manners.harvest_unseen and self._visibility.look(cluster, config)
        refused = refusals(
            cluster, config, unseen=unseen, allow_unseen=manners.harvest_unseen, allow_unfair=manners.harvest_unfair
        )
        if not manners.allow_without_preemption:
            # Nobody wants to harvest the others anyway.
            small = {p.partition for p in cluster.partitions if p.preempts and too_small_for(p)}
            refused = {name: why for name, why in refused.items() if name in small}
        self.refused = {
            name: why for name, why in refused.items() if not manners.partitions or name in manners.partitions
        }
        self.nice = nice_for(config, manners.nice)
