"""Allocations of the simulated head, from their turn at sbatch until their node has left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush

from fallow.core.accounting.backoff import Asker
from fallow.core.allocations import CANCEL_AGAIN_S, Agent, Allocation, forgo, observe, preempted_until, send, sent
from fallow.core.planning.allowance import Limits, horizon_s
from fallow.core.planning.asking import Ask
from fallow.core.planning.learner import Learner
from fallow.model import AllocationState, JobInfo
from fallow.sim.book import Book
from fallow.sim.requests_queue import RequestsQueue
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import Active, Ended, Notice, Started, Wanted
from fallow.sim.work import Work
from fallow.slurm.client import SubmitRejected
from fallow.slurm.paced import Bucket

ASKER = Asker()
"""In whose name all is asked for."""


class Leases:
    """What becomes of them: as `head.loop.turn`, and `submissions` and `jobs` of `head.slurm` have it.

    Args:
        engine: the cluster.
        runs: that are trained.
        book: where they are kept.
        learner: is told what Slurm refuses.
        limits: as configured.
        queries: of slurmctld's that are left; cancelling takes one.
    """

    def __init__(
        self,
        engine: SlurmSim,
        runs: Work,
        book: Book,
        learner: Learner,
        limits: Limits,
        queries: Bucket,
    ) -> None:
        self.calls = 0
        "requests to slurmctld so far"
        self.nice = 0
        "to submit with"
        self._engine, self._runs, self._book, self._learner = engine, runs, book, learner
        self._limits, self._queries = limits, queries
        self._queue = RequestsQueue(limits.submits_per_min, engine.now)
        self._timers: list[tuple[float, int, Callable[[Allocation, float], None], str]] = []
        "(Unix time, order, what is to be done, token)"
        self._order = 0

    def next_at(self) -> float:
        """When something is due; infinity: nothing."""
        queued_at = self._queue.next_at()
        return min(self._timers[0][0], queued_at) if self._timers else queued_at

    def play(self, at: float) -> bool:
        """Do what is due; was anything submitted?"""
        while self._timers and self._timers[0][0] <= at:
            _, _, what, token = heappop(self._timers)
            allocation = self._book.allocations.get(token)
            if allocation is not None and allocation.live:
                what(allocation, at)
        return self._queue.play(at, self._wanted, self._submit)

    # -- from the request to the job --------------------------------------------------------------------------------

    def ask(self, wish: Ask, at: float) -> None:
        """Put a request of the planner's into the queue."""
        self._queue.put(self._book.new_allocation(wish, at).token, at)

    def _wanted(self, token: str, at: float) -> bool:
        """As `Harvest.send`: its turn at sbatch has come."""
        allocation = self._book.allocations.get(token)
        if allocation is None:
            return False
        alone = self._learner.known.backoff.words(ASKER, allocation.partition, at)
        if allocation.queued and not allocation.pinned and alone:
            self.cancel(allocation, alone, at)
        return send(allocation, at)

    def _submit(self, token: str, at: float) -> None:
        self.calls += 1
        allocation = self._book.allocations[token]
        request = Wanted(
            token=token,
            partition=allocation.partition,
            minutes=allocation.minutes or self._limits.min_minutes,
            node=allocation.pinned,
            exclude=frozenset(filter(None, allocation.exclude.split(","))),
            nice=self.nice,
        )
        try:
            job_id = self._engine.submit(request)
        except SubmitRejected as refusal:
            self._over(allocation, refusal.reason)
            self._learner.strike(ASKER, allocation.partition, allocation.minutes, refusal.reason, at)
            return
        self._book.has_job(allocation, job_id)
        sent(allocation, at)
        if allocation.state is AllocationState.UNKNOWN:
            allocation.state = AllocationState.PENDING
        if allocation.asked_at is not None:
            self.cancel(allocation, allocation.reason, at)

    # -- what its node says -----------------------------------------------------------------------------------------

    def started(self, allocation: Allocation, news: Started) -> None:
        """Its agent says hello."""
        if allocation.asked_at is not None:
            return
        at, node = news.at, news.nodes[0]
        allocation.agents[node] = Agent()
        if allocation.state in (AllocationState.UNKNOWN, AllocationState.PENDING):
            allocation.state, allocation.start_at = AllocationState.RUNNING, at
            if allocation.end_at is None and allocation.minutes is not None:
                # Until a poll shows what was granted.
                allocation.end_at = at + 60.0 * allocation.minutes
        self._runs.join(allocation.run, node, allocation.job_id or "", at)
        self._watch(allocation, at)

    def trains(self, allocation: Allocation, news: Active) -> bool:
        """Its node has taken its first step. Did the run begin to train?"""
        allocation.active_at = allocation.active_at or news.at
        return self._book.trains(allocation)

    def noticed(self, allocation: Allocation, news: Notice) -> bool:
        """Its agent was warned. Does Slurm take the node from us?"""
        is_walltime = allocation.end_at is not None and news.at >= allocation.end_at
        is_taken = bool(allocation.agents) and not (is_walltime or allocation.state is AllocationState.RELEASING)
        if allocation.agents:
            self.release(allocation, "walltime" if is_walltime else "warned by Slurm", news.at)
        return is_taken

    def ended(self, allocation: Allocation, news: Ended) -> None:
        """Its agent is gone."""
        if allocation.agents:
            self._lost(allocation, news.state, news.at)

    # -- letting go -------------------------------------------------------------------------------------------------

    def release(self, allocation: Allocation, reason: str, at: float) -> None:
        """As `Turn.release_allocation`: its node leaves, then its job ends."""
        if allocation.state is AllocationState.RELEASING:
            return
        if not allocation.agents:
            self.cancel(allocation, reason, at)
            return
        allocation.state, allocation.asked_at, allocation.reason = AllocationState.RELEASING, at, reason
        left_at = self._runs.release(allocation.run, list(allocation.agents), at)
        self._book.changed(allocation.run, self._runs.members(allocation.run))
        self._later(left_at, self._left, allocation)

    def give_back(self, allocation: Allocation, reason: str, at: float) -> None:
        """As `head.slurm.neighbours.give_back`: somebody waits."""
        if allocation.wanted_at is None:
            self.release(allocation, reason, at)
            allocation.wanted_at = at

    def cancel(self, allocation: Allocation, reason: str, at: float) -> None:
        """As `Turn.cancel`."""
        allocation.asked_at = allocation.asked_at or at
        allocation.reason = reason
        if allocation.queued:
            forgo(allocation)
        elif allocation.job_id is not None:
            self.calls += 1
            self._queries.spend(1)
            self._engine.cancel(allocation.job_id)

    def _left(self, allocation: Allocation, at: float) -> None:
        self._over(allocation, "given back as planned")
        self._engine.left(allocation.job_id or "")

    def _lost(self, allocation: Allocation, reason: str, at: float) -> None:
        self._runs.lost(allocation.run, list(allocation.agents), at)
        self._book.changed(allocation.run, self._runs.members(allocation.run))
        self._over(allocation, reason)

    def _over(self, allocation: Allocation, reason: str) -> None:
        if allocation.state not in (AllocationState.ENDED, AllocationState.LOST):
            allocation.state = AllocationState.ENDED
        allocation.reason = allocation.reason or reason

    # -- its time ---------------------------------------------------------------------------------------------------

    def _watch(self, allocation: Allocation, at: float) -> None:
        """Have it released in time."""
        if allocation.end_at is not None:
            self._later(max(at, allocation.end_at - self._margin_s(allocation)), self._expire, allocation)

    def _margin_s(self, allocation: Allocation) -> float:
        return self._limits.release_margin_s + self._book.longest_pause_s(allocation.run)

    def _expire(self, allocation: Allocation, at: float) -> None:
        """Release it if its time is nearly over; it may have changed since."""
        if allocation.state is AllocationState.RUNNING and allocation.end_at is not None:
            if at >= allocation.end_at - self._margin_s(allocation):
                self.release(allocation, allocation.ends_because, at)
            else:
                self._watch(allocation, at)

    def _later(self, at: float, what: Callable[[Allocation, float], None], allocation: Allocation) -> None:
        self._order += 1
        heappush(self._timers, (at, self._order, what, allocation.token))

    # -- what polls say ---------------------------------------------------------------------------------------------

    def observe(self, jobs: Mapping[str, Sequence[JobInfo]], polled_at: float, at: float) -> None:
        """As `head.slurm.jobs`: bring all up to date.

        Args:
            jobs: those of a poll, by the token that they carry.
            polled_at, at: Unix time of the poll, and now.
        """
        for allocation in self._book.live():
            self._observe(allocation, jobs.get(allocation.token, ()), polled_at, at)

    def _observe(self, allocation: Allocation, jobs: Sequence[JobInfo], polled_at: float, at: float) -> None:
        unseen, end_at = allocation.job_id is None, allocation.end_at
        observe(allocation, jobs, polled_at, horizon_s(self._limits.poll_interval_s))
        grace_end = preempted_until(allocation, jobs)
        if grace_end is not None and allocation.state is AllocationState.RUNNING:
            allocation.end_at = grace_end
            self.release(allocation, "preempted", at)
        if not allocation.live:
            if allocation.agents:
                self._lost(allocation, allocation.reason, at)
        elif allocation.asked_at is not None and not allocation.agents and allocation.job_id is not None:
            if unseen or polled_at - allocation.asked_at > CANCEL_AGAIN_S:
                self.cancel(allocation, allocation.reason, at)
                allocation.asked_at = at
        elif allocation.agents and allocation.end_at != end_at:
            self._watch(allocation, at)
