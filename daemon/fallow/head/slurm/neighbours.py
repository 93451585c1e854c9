"""The others: whether we may harvest beside them, what they are given back and how soon, and how long they waited."""

from fallow.config import Config
from fallow.core import records
from fallow.core.allocations import CANCEL_AGAIN_S, Allocation
from fallow.core.neighbour.needs import ExternalDemand, assess
from fallow.core.neighbour.permission import Visibility, nice_for, refusals, too_small_for
from fallow.core.neighbour.waiting import UNKNOWN, site_rules
from fallow.core.neighbour.watch import END_S, LEAVE_S, Delays, Memory, poll_interval_s, remember
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Book, Run
from fallow.model import AllocationKind, AllocationState, ClusterConfig, ClusterState, Exit

DELAYS = "delays"
"""Their key among the notes of the store."""

ALERT_POLLS = 2
"""So many polls come soon when a run first trains, or Slurm takes a node from us. The next one then shows who came
at the same time, and the one after it who came while that node was being left: they may have counted on the node, too
(`core.neighbour.needs`)."""


def _without_histogram(fields: "records.Fields") -> "records.Fields":
    past = fields.pop("past")
    return fields | {"forgotten": sum(past["classes"].values()), "longest_s": past["max_s"]}


records.SCHEMAS[Delays] = 2
records.MIGRATIONS[Delays, 1] = _without_histogram


class Neighbours:
    """The head's watch over others' jobs, from poll to poll."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.refused: dict[str, str] = {}
        "partition -> why it is not harvested"
        self.nice = config.harvest.nice
        "to submit with"
        self.delays = Delays()
        self._alert = 0
        "polls that are to come soon, once"
        self._taken_at = 0.0
        self._unpreempted: dict[str, frozenset[str]] = {}
        "partition -> its nodes that nobody but us would give back; only partitions with such nodes"
        self._visibility = Visibility()
        self._memory = Memory()
        self._awaited = False
        "somebody waits for a node there whose job is over for us, and not for Slurm"

    def polled(self, turn: Turn, cluster: ClusterState, site: ClusterConfig | None) -> ExternalDemand:
        """Take in a poll; what follows for our nodes is the planner's.

        Args:
            turn: takes the effects.
            cluster: the poll.
            site: None: Slurm has not told its configuration yet.

        Returns:
            What others' jobs need of us.
        """
        every = [a for run in turn.book.on_slurm for a in run.allocations.values()]
        live, lost = [a for a in every if a.is_live], AllocationState.LOST
        # The end of a user's batch script may run on in a base job. Of those that were lost, the head's own are
        # cancelled when they appear (`jobs.sweep`).
        own = (a for a in every if a.kind is AllocationKind.HARVEST or (a.state is lost and a.was_renewed))
        over = [a for a in own if not a.is_live]
        if cluster.at >= self._taken_at:
            self._alert = max(0, self._alert - 1)
        nodes = {p.partition: p.unpreempted if p.preempts else frozenset(p.nodes) for p in cluster.partitions}
        self._unpreempted = {name: some for name, some in nodes.items() if some}
        self._ask_permission(turn, cluster, site)
        rules, former = site_rules(site or UNKNOWN), [a.token for a in over]
        demand = assess(cluster, live, former=former, passed_over=self._memory.passed_over, site=rules)
        self._memory = remember(self._memory, cluster.at, demand, rules.looks_again_s)
        tokens = frozenset[str]().union(*demand.delayed_jobs.values())
        self._awaited = any(a.token in tokens and self._is_ours_to_give(a) for a in over)
        waited = self.delays.note(cluster, demand.delayed_jobs)
        for job in waited:
            text = f"job {job.job_id} of {job.user} has waited {job.waited_s:.1f} s for nodes of ours"
            turn.record(None, "delayed", text, job=job.job_id, user=job.user, waited_s=job.waited_s)
        if waited or demand.delayed_jobs:
            turn.notes[DELAYS] = records.encode(self.delays)
        return demand

    def poll_soon(self, at: float) -> None:
        """Slurm takes a node from us, or a run trains at last. Args: at: Unix time; polls before it do not count."""
        self._alert, self._taken_at = ALERT_POLLS, at

    def interval_s(self, book: Book) -> float:
        """From one poll to the next, with what we hold now."""
        return poll_interval_s(self._config.slurm.poll_interval_s, watchful=self._is_watchful(book))

    def next_poll_s(self, book: Book, least_s: float = 0.0, failures: int = 0) -> float:
        """From the begin of the last poll to that of the next one.

        Args:
            book: with what we hold now.
            least_s, failures: as in `poll_interval_s`.
        """
        usual_s, watchful = self._config.slurm.poll_interval_s, self._is_watchful(book)
        return poll_interval_s(usual_s, watchful=watchful, alert=self._alert > 0, least=least_s, failures=failures)

    def _is_watchful(self, book: Book) -> bool:
        """Do we hold nodes that nobody but us would give back, or does somebody wait for the end of a job there?"""
        live = (a for run in book.current.values() for a in run.live_allocations() if a.is_harvested)
        return self._awaited or any(map(self._is_ours_to_give, live))

    def _is_ours_to_give(self, allocation: Allocation) -> bool:
        """Return True if nobody but us would give back what the allocation has, or may get."""
        nodes = self._unpreempted.get(allocation.partition, frozenset())
        may_get = bool(nodes) and self._config.harvest.allow_without_preemption
        return not nodes.isdisjoint(allocation.nodes) if allocation.nodes else may_get

    def _ask_permission(self, turn: Turn, cluster: ClusterState, site: ClusterConfig | None) -> None:
        """See where we may harvest, and how, and say what has changed."""
        harvest, allowed, before = self._config.harvest, self._config.site, self.refused
        # Where the site allows what cannot be seen, nobody need look.
        unseen = not allowed.harvest_unseen and self._visibility.look(cluster, site)
        refused = refusals(cluster, site, are_jobs_hidden=unseen, allow_unfair=allowed.harvest_unfair)
        if not harvest.allow_without_preemption:
            # Nobody wants to harvest the others anyway.
            small = {p.partition for p in cluster.partitions if p.preempts and too_small_for(p)}
            refused = {name: why for name, why in refused.items() if name in small}
        named = harvest.partitions
        self.refused = {name: why for name, why in refused.items() if not named or name in named}
        for name in sorted(before.keys() | self.refused.keys()):
            if before.get(name) != self.refused.get(name):
                why = self.refused.get(name)
                text = f"is not harvested: {why}" if why else "may be harvested again"
                turn.record(None, "courtesy", f"partition {name} {text}")
        nice, self.nice = self.nice, nice_for(site, harvest.nice)
        if nice != self.nice:
            text = (
                f"requests are submitted with --nice={self.nice}: {harvest.nice} is too little for the site's weights"
            )
            turn.record(None, "courtesy", text)


def give_back(turn: Turn, run: Run, allocation: Allocation, reason: str) -> None:
    """Release a node for somebody who waits: its members leave at the next boundary, and soon in any case."""
    if allocation.wanted_at is not None:
        return
    if allocation.state is AllocationState.RELEASING:
        turn.record(run, "release", f"{allocation.token} has to hurry: {reason}")
    turn.release_allocation(run, allocation, reason)
    allocation.wanted_at, allocation.kill_at = turn.now, turn.now + LEAVE_S
    if not allocation.agents:
        # Its script has not come to `fallow run` yet.
        turn.cancel(run, allocation, reason)


def hurry(turn: Turn, run: Run, allocation: Allocation) -> None:
    """End what has not left in time: its workers first, then its job."""
    if (
        allocation.kill_at is None
        or turn.now < allocation.kill_at <= turn.now + CANCEL_AGAIN_S
        or not allocation.is_live
    ):
        return
    # Never later than now: a clock may be set back.
    allocation.wanted_at = min(allocation.wanted_at or 0.0, turn.now)
    last_at = allocation.wanted_at + LEAVE_S + END_S
    if allocation.hosts and turn.now < last_at:
        turn.record(run, "release", f"{allocation.token} has not left in time and is ended: {allocation.reason}")
        turn.end_agents(allocation, Exit.NO_RESTART, allocation.reason, kill_after_s=0.0)
        allocation.kill_at = last_at
    else:
        # Again and again, as long as its job is there: a scancel may have failed, or a head died before it.
        turn.cancel(run, allocation, allocation.reason)
        allocation.kill_at = turn.now + CANCEL_AGAIN_S
