"""The others: whether we may harvest beside them, what they are given back and how soon, and how long they waited."""

from __future__ import annotations

import msgspec

from fallow.config import Config
from fallow.core import courtesy
from fallow.core.allocations import Allocation
from fallow.core.declined import Declined
from fallow.core.delays import Delays
from fallow.core.neighbour import Standing, assess
from fallow.core.room import whole_nodes
from fallow.head.book import Book, Run
from fallow.head.turn import Turn
from fallow.model import AllocationKind, AllocationState, ClusterConfig, ClusterState, DelayReport, Exit

WATCHFUL_S = 5.0
"""Polls are at most so far apart while we hold nodes that nobody but us would give back."""

LEAVE_S = 3.5
"""From seeing that somebody waits until workers that have not left are killed; their node must be idle after 6 s."""

END_S = 1.5
"""From then until the job is cancelled, too."""

DELAYS = "delays"
"""Their key among the notes of the store."""


class Neighbours:
    """Keeps an eye on others' jobs, poll by poll."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._visibility = courtesy.Visibility()
        self._declined = Declined()
        self._watchful: frozenset[str] = frozenset()
        "partitions where nothing preempts"
        self._awaited = False
        "somebody waits for a node there whose job is over for us, and not for Slurm"
        self.refused: dict[str, str] = {}
        "partition -> why it is not harvested"
        self.nice = config.harvest.nice
        self.delays = Delays()

    def recall(self, note: bytes) -> None:
        """Go on from what a head before us noted; what happened in between, nobody has seen."""
        self.delays = msgspec.msgpack.decode(note, type=Delays)
        self.delays.polled_at = None

    def polled(self, turn: Turn, cluster: ClusterState, config: ClusterConfig | None) -> Standing:
        """Take in a poll; what follows for our nodes is the planner's."""
        self._watchful = frozenset(p.partition for p in cluster.partitions if not p.preempts)
        self._be_allowed(turn, cluster, config)
        runs = [run for run in turn.book.runs.values() if not run.spec.local]
        live = [a for run in runs for a in run.live_allocations()]
        over = [a for run in runs for a in run.record.allocations.values() if not a.live]
        # The end of a user's batch script may run on in a base job; one that was lost is cancelled when it appears.
        over = [a for a in over if a.kind is AllocationKind.HARVEST or a.state is AllocationState.LOST]
        standing = assess(
            cluster,
            live,
            former=[a.token for a in over],
            whole_nodes=whole_nodes(config),
            declined=self._declined.nodes,
        )
        self._declined.polled(cluster, standing.offered, 0.0 if config is None else config.backfill_interval_s)
        tokens = frozenset[str]().union(*standing.delayed.values())
        self._awaited = any(a.token in tokens and a.partition in self._watchful for a in over)
        waited = self.delays.note(cluster, standing.delayed)
        for job in waited:
            text = f"job {job.job_id} of {job.user} has waited {job.waited_s:.1f} s for nodes of ours"
            turn.record(None, "delayed", text, job=job.job_id, user=job.user, waited_s=job.waited_s)
        if waited or standing.delayed:
            turn.notes[DELAYS] = msgspec.msgpack.encode(self.delays)
        return standing

    def report(self, now: float) -> DelayReport:
        return self.delays.report(now)

    def interval_s(self, book: Book) -> float:
        """From one poll to the next."""
        usual = self._config.slurm.poll_interval_s
        return min(usual, WATCHFUL_S) if self.watchful(book) else usual

    def watchful(self, book: Book) -> bool:
        """Do we hold nodes that nobody but us would give back, or does somebody wait for the end of a job there?"""
        live = (allocation for run in book.runs.values() for allocation in run.live_allocations())
        return self._awaited or any(a.harvested and a.partition in self._watchful for a in live)

    def _be_allowed(self, turn: Turn, cluster: ClusterState, config: ClusterConfig | None) -> None:
        unseen = self._visibility.look(cluster, config)
        site = self._config.site
        refused = courtesy.refusals(
            cluster, config, unseen=unseen, allow_unseen=site.harvest_unseen, allow_unfair=site.harvest_unfair
        )
        wanted = self._config.harvest
        if not wanted.allow_without_preemption:
            # Nobody wants to harvest the others anyway.
            preempting = {p.partition for p in cluster.partitions if p.preempts}
            refused = {name: why for name, why in refused.items() if name in preempting}
        if wanted.partitions:
            refused = {name: why for name, why in refused.items() if name in wanted.partitions}
        for name in sorted(refused.keys() | self.refused.keys()):
            if refused.get(name) != self.refused.get(name):
                why = refused.get(name)
                text = f"is not harvested: {why}" if why else "may be harvested again"
                turn.record(None, "courtesy", f"partition {name} {text}")
        self.refused = refused
        nice = courtesy.nice_for(config, wanted.nice)
        if nice != self.nice:
            text = f"requests are submitted with --nice={nice}: {wanted.nice} is too little for the site's weights"
            turn.record(None, "courtesy", text)
        self.nice = nice


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
    if set(allocation.agents) - set(allocation.agents_gone) and turn.now < last_at:
        turn.record(run, "release", f"{allocation.token} has not left in time and is ended: {allocation.reason}")
        turn.end_agents(allocation, Exit.NO_RESTART, allocation.reason, kill_after_s=0.0)
        allocation.gone_by = last_at
    else:
        turn.cancel(run, allocation, allocation.reason)
        allocation.gone_by = None
