"""The Slurm side of the head: what is observed, what is asked for, and what nobody looks after any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import astuple

from fallow.config import Config
from fallow.core.accounting.backoff import base_job
from fallow.core.allocations import Allocation, send
from fallow.core.kinds import may_use
from fallow.core.neighbour.needs import ExternalDemand
from fallow.core.neighbour.preemption import as_for_us
from fallow.core.planning.rules import HarvestRules, harvestable
from fallow.files import Paths
from fallow.head.loop.turn import Turn
from fallow.head.slurm import accounts, submissions
from fallow.head.slurm.asking import Asking
from fallow.head.slurm.budgets import keep_within_budget
from fallow.head.slurm.estimate import estimate
from fallow.head.slurm.jobs import sweep, take_in
from fallow.head.slurm.learning import Learning
from fallow.head.slurm.neighbours import DELAYS, Neighbours
from fallow.head.state.book import Book, Run, ordered
from fallow.model import (
    AllocationKind,
    ClusterConfig,
    ClusterState,
    Exit,
    FallowError,
    JobRequest,
    PartitionInfo,
    Prospect,
    RunSpec,
)

TRIAL = "fallow-trial"
"""Name of submissions that are only tried."""


class Harvest:
    """Keeps allocations and Slurm in step, and asks for more."""

    def __init__(self, config: Config, groups: frozenset[str] | None = None) -> None:
        """Args: groups: of the owner; None: not known."""
        self._config = config
        self._learning = Learning()
        self.asking = Asking(config, self._learning.known, groups)
        self.neighbours = Neighbours(config)
        self._site: ClusterConfig | None = None
        self.cluster: ClusterState | None = None
        "the last poll, put right (`core.neighbour.preemption`)"
        self._external = ExternalDemand()
        "what others' jobs needed of us then"

    def recall(self, notes: Mapping[str, bytes]) -> None:
        """Go on with what an earlier head has learned."""
        self._learning.recall(notes)
        if DELAYS in notes:
            self.neighbours.recall(notes[DELAYS])

    def note(self, turn: Turn) -> None:
        """Have what was learned written down with this turn: the head ends, or a pause does."""
        self._learning.note(turn)

    def polled(self, turn: Turn, cluster: ClusterState, site: ClusterConfig | None) -> None:
        """Take in one poll, then plan. `site` is None as long as Slurm has not told its configuration."""
        cluster = as_for_us(cluster, site, self._config.harvest.qos)
        self.cluster, self._site = cluster, site
        take_in(turn, cluster, self._learning.known.backoff)
        accounts.settle(turn, cluster.at)
        turn.for_each(turn.book.current.values(), "budget", lambda run: keep_within_budget(turn, run, cluster.at))
        with turn.apart("neighbours"):
            self._external = self.neighbours.polled(turn, cluster, site)
        external = self._external
        with turn.apart("orphans"):
            sweep(turn, cluster, frozenset[str]().union(*external.delayed_jobs.values()))
        with turn.apart("plan"):
            self.asking.interval_s = self.neighbours.interval_s(turn.book)
            rules = self._rules(cluster)
            self._learning.polled(turn, cluster, rules)
            self.asking.plan(turn, cluster, rules, external)

    def _rules(self, cluster: ClusterState) -> HarvestRules:
        return self.asking.rules(cluster.at, self._site, self.neighbours.refused)

    def request(self, paths: Paths, run: Run, allocation: Allocation) -> JobRequest:
        """What to hand to sbatch for an allocation."""
        return submissions.job_request(self._config, paths, run, allocation, self.neighbours.nice)

    def send(self, turn: Turn, run: Run, token: str) -> bool:
        """An allocation's turn at sbatch has come; False: it is not wanted any more."""
        allocation = run.allocations.get(token)
        if allocation is None:
            return False
        alone = self._learning.known.backoff.words(run.asks_as(allocation), allocation.partition, turn.now)
        harvest = allocation.kind is AllocationKind.HARVEST and not allocation.pinned
        if allocation.queued and harvest and alone:
            turn.record(run, "withdraw", f"{token}, not submitted yet: {alone}")
            turn.cancel(run, allocation, alone)
        if not send(allocation, turn.now):
            return False
        turn.dirty.add(run.id)
        return True

    def refused(self, turn: Turn, run: Run, token: str, reason: str) -> None:
        """Slurm said no to a submission."""
        allocation = run.allocations[token]
        news = True
        if allocation.kind is AllocationKind.HARVEST:
            asker = run.asks_as(allocation)
            news = self._learning.refused(turn, run, asker, allocation.partition, allocation.minutes, reason)
        else:
            self._learning.known.backoff.put_off(base_job(run.id), turn.now)
            # It is rare, and a head that is killed must not begin anew with it.
            self._learning.note(turn)
        usable: list[PartitionInfo] = []
        if self.cluster is not None:
            usable = _usable(run, harvestable(self.cluster, self._rules(self.cluster)))
        submissions.refused(turn, run, token, reason, [p.partition for p in usable], news)

    def example(self, run: Run) -> Allocation | str:
        """A harvest allocation as the run would ask for, or why it would ask for none; empty: nobody knows yet."""
        if self.cluster is None:
            return ""
        rules = self._rules(self.cluster)
        there = harvestable(self.cluster, rules)
        may = _usable(run, there)
        if run.spec.max_nodes <= run.spec.min_nodes:
            return ""
        if self.asking.stopped:
            return self.asking.stopped
        if not there:
            why = [f"{name} is not harvested: {reason}" for name, reason in self.neighbours.refused.items()]
            none = "in no partition would others' jobs preempt ours; see allow_without_preemption under [harvest]"
            return "; ".join(why) or none
        if not may:
            return f"it may use none of the partitions that are harvested: {', '.join(p.partition for p in there)}"
        return Allocation(
            token=TRIAL,
            run=run.id,
            kind=AllocationKind.HARVEST,
            public_key="",
            partition=may[0].partition,
            minutes=max(rules.min_minutes, run.spec.min_harvest_minutes),
        )

    def prospect(self, book: Book, spec: RunSpec) -> Prospect:
        """What a run would find that does not exist yet.

        Raises:
            FallowError: no poll has come yet.
        """
        if self.cluster is None:
            raise FallowError("the head has not seen Slurm yet; ask again in a moment", Exit.TEMPFAIL)
        live = [a for run in book.current.values() for a in run.live_allocations()]
        known, names = self._learning.known, ordered(self._config)
        return estimate(self.cluster, spec, self._rules(self.cluster), live, known, names)

    def tested(self, turn: Turn, run: Run, partition: str, reason: str) -> None:
        """Slurm would say no to harvest jobs of a run: they are not even tried for a while."""
        turn.record(run, "refused", f"harvest jobs in {partition} would be refused: {reason}")
        self._learning.refused(turn, run, run.asker, partition, None, reason)

    def submitted(self, turn: Turn, run: Run, token: str, job_id: str) -> None:
        """Slurm took a submission."""
        submissions.submitted(turn, run, token, job_id)
        if run.allocations[token].kind is AllocationKind.BASE:
            self._learning.known.backoff.take_up(base_job(run.id))
            self._learning.note(turn)

    unknown = staticmethod(submissions.unknown)


def _usable(run: Run, harvestable: Sequence[PartitionInfo]) -> list[PartitionInfo]:
    """Those in which the run wants to harvest and its account and QOS may."""
    wanted = run.spec.harvest_partitions
    named = [p for p in harvestable if not wanted or p.partition in wanted]
    return [p for p in named if may_use(p, *astuple(run.asker))]
