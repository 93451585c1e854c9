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
from fallow.core.planning.plan import Plan, plan
from fallow.core.planning.rules import HarvestRules
from fallow.core.planning.situation import Situation
from fallow.core.planning.withdrawals import Withdraw
from fallow.model import ClusterConfig, ClusterState, PartitionInfo
from fallow.sim.book import Book
from fallow.sim.leases import ASKER, Leases
from fallow.sim.requests_queue import RequestsQueue
from fallow.sim.types import (
    POLL_REQUESTS,
    Active,
    Ended,
    Engine,
    Happening,
    Measured,
    Notice,
    Options,
    Pool,
    RunPlan,
    Runs,
    Silent,
    Started,
)
from fallow.slurm.paced import BUSY, CONFIG_S, Bucket

ANSWER_S, SBATCH_S = 0.2, 0.1
"""From a poll to its answer, and what sbatch takes."""

AGAIN_S = 1.0
"""Without latency: from one poll to the next at the least."""

QUIET_S = 60.0
"""For so long after a plan that wished for nothing, polls that show the very same are left out."""


class VirtualHead:
    """See `fallow.sim.types.Head`.

    Args:
        engine: the cluster.
        runs: that are trained.
        plans: the same runs.
        options: of the simulation.
        limits: as configured; None: the defaults, and without preemption where the site has none.
        elide: leave out polls from which nothing would follow, and do not value nodes anew at every plan.
        name: of the policy, as asked for.
    """

    def __init__(
        self,
        engine: Engine,
        runs: Runs,
        plans: Sequence[RunPlan],
        options: Options,
        *,
        limits: Limits | None = None,
        elide: bool = True,
        name: str = "ours",
    ) -> None:
        self.name = name
        self.calls = 0
        self.elided = 0
        "polls that were left out"
        self.cluster: ClusterState | None = None
        "the last poll, put right (`core.neighbour.preemption`)"
        self.unused: dict[str, str] = {}
        "idle node -> why it is not used, as of the last plan"
        self.learner = Learner()
        self.book = Book(plans, options.costs)
        self._engine, self._runs, self._elide = engine, runs, elide
        self._at_once = options.latency == "none"
        self._answer_s = 0.0 if self._at_once else ANSWER_S
        self._limits = _limits(engine, options) if limits is None else limits
        self.watch = Watch(
            # What a trace does not say of others is not hidden from us: there is nothing behind it.
            Manners(allow_without_preemption=self._limits.allow_without_preemption, harvest_unseen=True)
        )
        per_min, sbatch_s = (inf, 0.0) if self._at_once else (options.submits_per_min, SBATCH_S)
        queue = RequestsQueue(per_min, sbatch_s, engine.now)
        self._leases = Leases(engine, runs, self.book, self.learner, self._limits, queue, self._called, self._cancels)
        self._now = engine.now
        self._queries = Bucket(options.queries_per_min, lambda: self._now)
        self._config: ClusterConfig | None = None
        self._config_at = -inf
        self._interval_s = options.poll_s
        "from one poll to the next, as of the last one"
        self._began, self._poll_at = -inf, engine.now
        self._sends_at = inf
        "when slurmctld may be asked, once that is wanted"
        self._asked_at = -inf
        "the last poll"
        self._answer: ClusterState | None = None
        "what the poll says that is under way"
        self._answer_at = inf
        "when that comes"
        self._external = ExternalDemand()
        "what others' jobs needed of us by the last poll"
        self._partitions: list[PartitionInfo] = []
        "of the last poll, as it came"
        self._archs: dict[str, str] = {}
        "node -> architecture, which stays as it is"
        self._shown: ClusterState | None = None
        "the last poll that was taken in, as it came"
        self._is_at_rest = False
        "nothing followed from it, and others need nothing of us"
        self._news = True
        "something new was measured since the last poll was asked for"

    # -- what happens -----------------------------------------------------------------------------------------------

    def next_at(self) -> float:
        return min(self._poll_at, self._sends_at, self._answer_at, self._leases.next_at())

    def wake(self, at: float) -> None:
        while True:
            leases_at = self._leases.next_at()
            if min(self._poll_at, self._sends_at, self._answer_at, leases_at) > at:
                return
            self._now = at
            if leases_at <= at:
                if self._leases.play(at):
                    self._pace()
                if self._leases.next_at() > at:
                    return  # what follows in the cluster comes before what is asked and answered in the same moment
            elif self._answer is not None and self._answer_at <= at:
                shown, self._answer, self._answer_at = self._answer, None, inf
                self._polled(shown)
                self._pace()
            elif self._sends_at <= at:
                self._ask()
            else:
                # What was the interval when this was fixed may not be it any more.
                self._pace()
                if self._poll_at <= at:
                    self._began, self._poll_at = self._now, inf
                    self._sends_at = self._now + self._tokens()

    def told(self, happening: Happening | Active | Measured) -> None:
        self._now = happening.at
        match happening:
            case Started() | Notice() | Silent() | Ended() | Active():
                if self._leases.told(happening):
                    self._plan_again()
                if self._leases.taken:
                    self._leases.taken = False
                    self.watch.taken(self._now)
                    self._pace()
            case Measured():
                self._news = self.book.measured(happening) or self._news
        if self._at_once and isinstance(happening, Pool | Ended):
            # What follows from a poll in the same moment is looked at a moment later, or there might be no end to it.
            wait_s = AGAIN_S if self._asked_at == self._now else 0.0
            self._began = self._now + wait_s - self._wanted_s()
            self._pace()

    def _called(self) -> None:
        self.calls += 1

    def _cancels(self) -> None:
        self.calls += 1
        self._queries.spend(1)

    # -- polls ------------------------------------------------------------------------------------------------------

    def _pace(self) -> None:
        """When to poll next; what has come since the last one may make that sooner."""
        if self._answer_at < inf or self._sends_at < inf:
            return
        usual_s, watches = self._limits.poll_interval_s, self._watches()
        longest = longest_interval_s(usual_s, watches)
        wanted_s = interval_s(usual_s, watches or self.watch.alert > 0)
        self._poll_at = max(self._now, self._began + poll_interval_s(wanted_s, self._answer_s / BUSY, 0, longest))

    def _wanted_s(self) -> float:
        """From one poll to the next, with what we hold now."""
        return interval_s(self._limits.poll_interval_s, self._watches())

    def _watches(self) -> bool:
        # Asked many times for each poll.
        any_there = any(map(self.book.partitions.get, self.watch.unpreempted))
        return self.watch.is_watchful(self.book.allocations.values() if any_there else ())

    def _ask(self) -> None:
        self._sends_at, self._asked_at = inf, self._now
        cluster = self._engine.poll()
        self.calls += POLL_REQUESTS
        if self._shows_nothing_new(cluster):
            self.elided += 1
            self.cluster = self._put_right(cluster)
            self._pace()
            return
        self._leases.touched = self._news = False
        self._answer, self._answer_at = cluster, self._now + self._answer_s

    def _tokens(self) -> float:
        """Seconds to wait until slurmctld may be asked."""
        if self._now - self._config_at >= CONFIG_S:
            self._config, self._config_at = self._engine.config(), self._now
            self.calls += 1
            self._queries.take()
        wait_s = self._queries.take(POLL_REQUESTS)
        return 0.0 if self._at_once else wait_s

    def _shows_nothing_new(self, cluster: ClusterState) -> bool:
        """Return True if nothing follows from a poll: it shows the same as one at rest a moment ago."""
        shown, going = self._shown, self._leases.touched or self._leases.queued or self._news or self.watch.alert
        if not self._elide or shown is None or going or not self._is_at_rest or self._now >= self.book.valued_until():
            return False
        return cluster.at - shown.at < QUIET_S and structs.replace(cluster, at=shown.at) == shown

    def _polled(self, shown: ClusterState) -> None:
        """As `Harvest.polled`."""
        self._shown = shown
        cluster = self.cluster = self._put_right(shown)
        jobs = by_token(cluster.jobs)
        self._leases.observe(jobs, cluster.at, self._now)
        live, over = self.book.live(), self.book.over()
        external, _ = self.watch.look(cluster, self._config, live, over)
        self._external, self._leases.nice = external, self.watch.nice
        self._leases.sweep(over, jobs, frozenset[str]().union(*external.delayed_jobs.values()), self._now)
        self._interval_s = self._wanted_s()
        rules = self._rules(cluster.at)
        harvest = [(allocation, ASKER) for allocation in self.book.allocations.values()]
        self.learner.take_in(cluster, harvest, rules, self._now)
        self.book.forget(over, jobs)
        found = self._plan(cluster, rules, live)
        self._is_at_rest = not (found.actions or external.delayed_jobs or external.offers)

    def _put_right(self, cluster: ClusterState) -> ClusterState:
        """As `core.neighbour.preemption` does; what is the same as before has been put right before."""
        before = self.cluster
        if before is not None and cluster.partitions == self._partitions:
            return structs.replace(cluster, partitions=before.partitions)
        self._partitions = cluster.partitions
        return as_for_us(cluster, self._config, None)

    def _rules(self, at: float) -> HarvestRules:
        experience, refused = self.learner.known.experience, self.watch.refused
        rules = allowance.rules(self._limits, self._config, refused, experience, at, self._interval_s)
        # No run takes parts of nodes, so they need not be looked for.
        return structs.replace(rules, whole_nodes=True)

    # -- plans ------------------------------------------------------------------------------------------------------

    def _plan(self, cluster: ClusterState, rules: HarvestRules, live: list[Allocation], *, again: bool = False) -> Plan:
        """As `Asking.plan`."""
        known = self.learner.known
        start_s = known.experience.wait_s(cluster.at) + known.experience.start_s(cluster.at)
        gains = self.book.gains(cluster.at, start_s, exact=not self._elide)
        archs = self._archs = self._archs or {node.node: node.arch for node in cluster.nodes}
        demands = [self.book.demand(run, archs, gain.worth) for run, gain in gains.items()]
        if not again:
            known.unstarted.look(cluster)
        situation = Situation(cluster, demands, live, rules, known, self._external, asks_only=again)
        found = plan(situation)
        for action in found.actions:
            match action:
                case Ask():
                    self._leases.ask(action, self._now)
                case Withdraw(token, reason):
                    allocation = self.book.allocations[token]
                    if allocation.asked_at is None:
                        withdrawn(situation, action, allocation)
                        self._leases.cancel(allocation, reason, self._now)
                case GiveBack(token, reason, urgent):
                    allocation = self.book.allocations[token]
                    let_go = self._leases.give_back if urgent else self._leases.release
                    let_go(allocation, reason, self._now)
        self.unused = dict(found.unused)
        return found

    def _plan_again(self) -> None:
        """As `Harvest.plan_again`: a run begins to train."""
        cluster = self.cluster
        if cluster is None or self._now - cluster.at > self._wanted_s():
            return
        live = self.book.live()
        held = {node for a in live for node in (*a.nodes, *a.agents)}
        nodes = [structs.replace(node, state="ALLOCATED") if node.node in held else node for node in cluster.nodes]
        self._plan(structs.replace(cluster, nodes=nodes), self._rules(cluster.at), live, again=True)


def _limits(engine: Engine, options: Options) -> Limits:
    """The configuration's defaults, as far as the options do not say otherwise."""
    partitions = list(engine.site.partitions)
    at_first = ClusterState(at=engine.now, nodes=[], jobs=[], partitions=partitions)
    found = as_for_us(at_first, engine.config(), None)
    return Limits(
        allow_without_preemption=not any(partition.preempts for partition in found.partitions),
        poll_interval_s=options.poll_s,
        submits_per_min=1e9 if options.latency == "none" else options.submits_per_min,
    )
