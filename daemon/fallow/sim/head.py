"""The head in virtual time: what `harvest`, `asking` and `calls` of `head.slurm` do, without their processes.

All that decides is the head's own, out of `fallow.core`. Here is the order in which it is done, and what happens
between two decisions: it waits for Slurm's answers and for its turns at sbatch, hears of its nodes and lets them go in
time. Nothing is put off, paused, paid for or hurried: no job comes to nothing, and runs have no budget and no deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from msgspec import structs

from fallow.core.accounting.spans import by_token
from fallow.core.allocations import Allocation
from fallow.core.neighbour.needs import ExternalDemand, GiveBack
from fallow.core.neighbour.preemption import as_for_us
from fallow.core.neighbour.watch import Manners, Watch, interval_s, longest_interval_s, poll_interval_s
from fallow.core.planning import allowance
from fallow.core.planning.allowance import Limits
from fallow.core.planning.asking import Ask
from fallow.core.planning.learner import Learner, withdrawn
from fallow.core.planning.plan import plan
from fallow.core.planning.rules import HarvestRules
from fallow.core.planning.situation import Situation
from fallow.core.planning.withdrawals import Withdraw
from fallow.model import ClusterConfig, ClusterState
from fallow.sim.book import Book
from fallow.sim.leases import ASKER, Leases
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import (
    POLL_REQUESTS,
    Active,
    Ended,
    Happening,
    Measured,
    Notice,
    Options,
    Pool,
    RunPlan,
    Started,
    Waited,
)
from fallow.sim.work import Work
from fallow.slurm.paced import BUSY, CONFIG_S, Bucket

ANSWER_S = 0.2
"""From a poll to its answer."""


class VirtualHead:
    """See `fallow.sim.types.Head`.

    Args:
        engine: the cluster.
        runs: that are trained.
        plans: the same runs.
        options: what it is told.
    """

    def __init__(self, engine: SlurmSim, runs: Work, plans: Sequence[RunPlan], options: Options) -> None:
        self._polls = 0
        "requests to slurmctld that polls were"
        self.cluster: ClusterState | None = None
        "the last poll, put right (`core.neighbour.preemption`)"
        self.learner = Learner()
        self.book = Book(plans, options.costs)
        self._engine = engine
        self._limits = _limits(engine, options)
        self.watch = Watch(
            # What a trace does not say of others is not hidden from us: there is nothing behind it.
            Manners(allow_without_preemption=self._limits.allow_without_preemption, harvest_unseen=True)
        )
        self._now = engine.now
        self._queries = Bucket(options.queries_per_min, lambda: self._now)
        self._leases = Leases(engine, runs, self.book, self.learner, self._limits, self._queries)
        self._config: ClusterConfig | None = None
        self._config_at = -inf
        self._interval_s = options.poll_s
        "from one poll to the next, as of the last one"
        self._began, self._poll_at = -inf, engine.now
        self._sends_at = inf
        "when slurmctld may be asked, once that is wanted"
        self._answer: ClusterState | None = None
        "what the poll says that is under way"
        self._answer_at = inf
        "when that comes"
        self._external = ExternalDemand()
        "what others' jobs needed of us by the last poll"

    # -- what happens -----------------------------------------------------------------------------------------------

    @property
    def calls(self) -> int:
        """Requests to slurmctld so far."""
        return self._polls + self._leases.calls

    def next_at(self) -> float:
        return min(self._poll_at, self._sends_at, self._answer_at, self._leases.next_at())

    def wake(self, at: float) -> None:
        while self.next_at() <= at:
            self._now = at
            if self._leases.next_at() <= at:
                if self._leases.play(at):
                    self._pace()
                if self._leases.next_at() > at:
                    return  # what follows in the cluster comes before what is asked and answered in the same moment
            elif self._answer is not None and self._answer_at <= at:
                shown, self._answer, self._answer_at = self._answer, None, inf
                self._polled(shown)
                self._pace()
            elif self._sends_at <= at:
                self._sends_at = inf
                self._answer, self._answer_at = self._engine.poll(), self._now + ANSWER_S
                self._polls += POLL_REQUESTS
            else:
                # What was the interval when this was fixed may not be it any more.
                self._pace()
                if self._poll_at <= at:
                    self._began, self._poll_at = self._now, inf
                    self._sends_at = self._now + self._wait_for_tokens_s()

    def told(self, happening: Happening | Active | Measured) -> None:
        self._now = happening.at
        if isinstance(happening, Measured):
            self.book.measured(happening)
            return
        if isinstance(happening, Pool | Waited):
            return  # nobody tells the head
        allocation = self.book.of_job(happening.job_id)
        if allocation is None or not allocation.live:
            return
        match happening:
            case Started():
                self._leases.started(allocation, happening)
            case Active():
                if self._leases.trains(allocation, happening):
                    self._plan_again()
            case Notice():
                if self._leases.noticed(allocation, happening):
                    self.watch.taken(self._now)
                    self._pace()
            case Ended():
                self._leases.ended(allocation, happening)

    # -- polls ------------------------------------------------------------------------------------------------------

    def _pace(self) -> None:
        """When to poll next; what has come since the last one may make that sooner."""
        if self._answer_at < inf or self._sends_at < inf:
            return
        usual_s, watches = self._limits.poll_interval_s, self._watches()
        longest = longest_interval_s(usual_s, watches)
        wanted_s = interval_s(usual_s, watches or self.watch.alert > 0)
        self._poll_at = max(self._now, self._began + poll_interval_s(wanted_s, ANSWER_S / BUSY, 0, longest))

    def _wanted_s(self) -> float:
        """From one poll to the next, with what we hold now."""
        return interval_s(self._limits.poll_interval_s, self._watches())

    def _watches(self) -> bool:
        return self.watch.is_watchful(self.book.allocations.values())

    def _wait_for_tokens_s(self) -> float:
        """Seconds to wait until slurmctld may be asked."""
        if self._now - self._config_at >= CONFIG_S:
            self._config, self._config_at = self._engine.config(), self._now
            self._polls += 1
            self._queries.take()
        return self._queries.take(POLL_REQUESTS)

    def _polled(self, shown: ClusterState) -> None:
        """As `Harvest.polled`."""
        cluster = self.cluster = as_for_us(shown, self._config, None)
        jobs = by_token(cluster.jobs)
        self._leases.observe(jobs, cluster.at, self._now)
        live, over = self.book.live(), self.book.over()
        self._external, _ = self.watch.look(cluster, self._config, live, over)
        self._leases.nice = self.watch.nice
        self._interval_s = self._wanted_s()
        rules = self._rules(cluster.at)
        harvest = [(allocation, ASKER) for allocation in self.book.allocations.values()]
        self.learner.take_in(cluster, harvest, rules, self._now)
        self.book.forget(over, jobs)
        self._plan(cluster, rules, live)

    def _rules(self, at: float) -> HarvestRules:
        experience, refused = self.learner.known.experience, self.watch.refused
        rules = allowance.rules(self._limits, self._config, refused, experience, at, self._interval_s)
        # No run takes parts of nodes, so they need not be looked for.
        return structs.replace(rules, whole_nodes=True)

    # -- plans ------------------------------------------------------------------------------------------------------

    def _plan(
        self, cluster: ClusterState, rules: HarvestRules, live: list[Allocation], *, asks_only: bool = False
    ) -> None:
        """As `Asking.plan`."""
        known = self.learner.known
        start_s = known.experience.wait_s(cluster.at) + known.experience.start_s(cluster.at)
        gains = self.book.gains(cluster.at, start_s)
        demands = [self.book.demand(run, gain.worth) for run, gain in gains.items()]
        if not asks_only:
            known.unstarted.look(cluster)
        situation = Situation(cluster, demands, live, rules, known, self._external, asks_only=asks_only)
        for action in plan(situation).actions:
            match action:
                case Ask():
                    self._leases.ask(action, self._now)
                case Withdraw(token, reason):
                    allocation = self.book.allocations[token]
                    if allocation.asked_at is None:
                        withdrawn(situation, action, allocation)
                        self._leases.cancel(allocation, reason, self._now)
                case GiveBack(token, reason, urgent):
                    let_go = self._leases.give_back if urgent else self._leases.release
                    let_go(self.book.allocations[token], reason, self._now)

    def _plan_again(self) -> None:
        """As `Harvest.plan_again`: a run begins to train."""
        cluster = self.cluster
        if cluster is None or self._now - cluster.at > self._wanted_s():
            return
        live = self.book.live()
        held = {node for a in live for node in (*a.nodes, *a.agents)}
        nodes = [structs.replace(node, state="ALLOCATED") if node.node in held else node for node in cluster.nodes]
        self._plan(structs.replace(cluster, nodes=nodes), self._rules(cluster.at), live, asks_only=True)


def _limits(engine: SlurmSim, options: Options) -> Limits:
    """The configuration's defaults, as far as the options do not say otherwise."""
    at_first = ClusterState(at=engine.now, nodes=[], jobs=[], partitions=list(engine.site.partitions))
    found = as_for_us(at_first, engine.config(), None)
    return Limits(
        allow_without_preemption=not any(partition.preempts for partition in found.partitions),
        poll_interval_s=options.poll_s,
        submits_per_min=options.submits_per_min,
    )
