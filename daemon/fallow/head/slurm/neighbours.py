"""The others: whether we may harvest beside them, what they are given back and how soon, and how long they waited."""

from __future__ import annotations

from fallow.config import Config
from fallow.core import records
from fallow.core.allocations import CANCEL_AGAIN_S, Allocation
from fallow.core.neighbour.delays import Delays
from fallow.core.neighbour.needs import ExternalDemand
from fallow.core.neighbour.watch import END_S, LEAVE_S, Manners, Watch, interval_s
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Book, Run
from fallow.model import AllocationKind, AllocationState, ClusterConfig, ClusterState, DelayReport, Exit

DELAYS = "delays"
"""Their key among the notes of the store."""


def _without_histogram(fields: records.Fields) -> records.Fields:
    past = fields.pop("past")
    return fields | {"forgotten": sum(past["classes"].values()), "longest_s": past["max_s"]}


records.SCHEMAS[Delays] = 2
records.MIGRATIONS[Delays, 1] = _without_histogram


class Neighbours(Watch):
    """The head's watch over others' jobs: records what it finds."""

    def __init__(self, config: Config) -> None:
        harvest, site = config.harvest, config.site
        super().__init__(
            Manners(
                partitions=harvest.partitions,
                allow_without_preemption=harvest.allow_without_preemption,
                nice=harvest.nice,
                harvest_unseen=site.harvest_unseen,
                harvest_unfair=site.harvest_unfair,
            )
        )
        self._config = config

    def recall(self, note: bytes) -> None:
        """Go on from what a head before us noted; what happened in between, nobody has seen.

        Raises:
            Unreadable: it is damaged, or of a newer Fallow.
        """
        self.delays = records.decode(note, Delays)
        self.delays.polled_at = None

    def polled(self, turn: Turn, cluster: ClusterState, config: ClusterConfig | None) -> ExternalDemand:
        """Take in a poll; what follows for our nodes is the planner's."""
        runs = [run for run in turn.book.current.values() if not run.spec.local]
        live = [a for run in runs for a in run.live_allocations()]
        over = [a for run in runs for a in run.allocations.values() if not a.live]
        # The end of a user's batch script may run on in a base job. Of those that were lost, the head's own are
        # cancelled when they appear (`orphans`).
        lost = AllocationState.LOST
        over = [a for a in over if a.kind is AllocationKind.HARVEST or (a.state is lost and a.renewed)]
        refused, nice = self.refused, self.nice
        external, waited = self.look(cluster, config, live, over)
        self._tell(turn, refused, nice)
        for job in waited:
            text = f"job {job.job_id} of {job.user} has waited {job.waited_s:.1f} s for nodes of ours"
            turn.record(None, "delayed", text, job=job.job_id, user=job.user, waited_s=job.waited_s)
        if waited or external.delayed_jobs:
            turn.notes[DELAYS] = records.encode(self.delays)
        return external

    def report(self, now: float) -> DelayReport:
        return self.delays.report(now)

    def interval_s(self, book: Book) -> float:
        """From one poll to the next."""
        return interval_s(self._config.slurm.poll_interval_s, self.watchful(book))

    def watchful(self, book: Book) -> bool:
        """Do we hold nodes that nobody but us would give back, or does somebody wait for the end of a job there?"""
        return self.is_watchful(a for run in book.current.values() for a in run.live_allocations())

    def _tell(self, turn: Turn, refused: dict[str, str], nice: int) -> None:
        """Say what has changed since partitions were `refused` and requests had that `nice`."""
        for name in sorted(refused.keys() | self.refused.keys()):
            if refused.get(name) != self.refused.get(name):
                why = self.refused.get(name)
                text = f"is not harvested: {why}" if why else "may be harvested again"
                turn.record(None, "courtesy", f"partition {name} {text}")
        if nice != self.nice:
            wanted = self._config.harvest.nice
            text = f"requests are submitted with --nice={self.nice}: {wanted} is too little for the site's weights"
            turn.record(None, "courtesy", text)


def give_back(turn: Turn, run: Run, allocation: Allocation, reason: str) -> None:
    """Release a node for somebody who waits: its members leave at the next boundary, and soon in any case."""
    if allocation.wanted_at is not None:
        return
    if allocation.state is AllocationState.RELEASING:
        turn.record(run, "release", f"{allocation.token} has to hurry: {reason}")
    turn.release_allocation(run, allocation, reason)
    allocation.wanted_at, allocation.gone_by = turn.now, turn.now + LEAVE_S
    turn.dirty.add(run.id)
    if not allocation.agents:
        # Its script has not come to `fallow run` yet.
        turn.cancel(run, allocation, reason)


def hurry(turn: Turn, run: Run, allocation: Allocation) -> None:
    """End what has not left in time: its workers first, then its job."""
    if allocation.gone_by is None or turn.now < allocation.gone_by or not allocation.live:
        return
    turn.dirty.add(run.id)
    last_at = (allocation.wanted_at or 0.0) + LEAVE_S + END_S
    if allocation.hosts and turn.now < last_at:
        turn.record(run, "release", f"{allocation.token} has not left in time and is ended: {allocation.reason}")
        turn.end_agents(allocation, Exit.NO_RESTART, allocation.reason, kill_after_s=0.0)
        allocation.gone_by = last_at
    else:
        # Again and again, as long as its job is there: a scancel may have failed, or a head died before it.
        turn.cancel(run, allocation, allocation.reason)
        allocation.gone_by = turn.now + CANCEL_AGAIN_S
