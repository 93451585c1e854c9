"""Allocations of the simulated head, from their turn at sbatch until their node has left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import heappop, heappush

from fallow.core.accounting.backoff import Asker
from fallow.core.allocations import CANCEL_AGAIN_S, Agent, Allocation, forgo, observe, preempted_until, send, sent
from fallow.core.neighbour.watch import END_S, LEAVE_S
from fallow.core.planning.allowance import Limits, horizon_s
from fallow.core.planning.asking import Ask
from fallow.core.planning.learner import Learner
from fallow.model import AllocationState, JobInfo
from fallow.sim.book import Book
from fallow.sim.costs import SILENT_S
from fallow.sim.requests_queue import RequestsQueue
from fallow.sim.types import Active, Ended, Engine, Notice, Runs, Silent, Started, Wanted
from fallow.slurm.client import SubmitRejected

ASKER = Asker()
"""In whose name all is asked for."""

END, LEFT, GONE = "end", "left", "gone"
"""Timers of an allocation: its time is nearly over, its node has left, it must have left."""


class Leases:
    """What becomes of them: as `head.loop.turn`, and `submissions`, `jobs` and `orphans` of `head.slurm` have it.

    Args:
        engine: the cluster.
        runs: that are trained.
        book: where they are kept.
        learner: is told what Slurm refuses.
        limits: as configured.
        queue: for sbatch.
        called: is called for each submission.
        cancels: is called for each job that is cancelled.
    """

    def __init__(
        self,
        engine: Engine,
        runs: Runs,
        book: Book,
        learner: Learner,
        limits: Limits,
        queue: RequestsQueue,
        called: Callable[[], None],
        cancels: Callable[[], None],
    ) -> None:
        self.nice = 0
        "to submit with"
        self.touched = False
        "something has become of one of them; whoever looks sets it back"
        self.taken = False
        "Slurm takes a node from us; whoever looks sets it back"
        self._shown: dict[str, JobInfo] = {}
        "running allocation -> its job as it was taken in last; the engine makes a new one for each change"
        self._engine, self._runs, self._book, self._learner = engine, runs, book, learner
        self._limits, self._queue, self._called, self._cancels = limits, queue, called, cancels
        self._timers: list[tuple[float, int, str, str]] = []
        "(Unix time, order, which, token)"
        self._order = 0

    @property
    def queued(self) -> int:
        """That wait for sbatch, and the one that is being sent."""
        return len(self._queue)

    def next_at(self) -> float:
        queued_at = self._queue.next_at()
        return min(self._timers[0][0], queued_at) if self._timers else queued_at

    def play(self, at: float) -> bool:
        """What is due; was anything submitted?"""
        while self._timers and self._timers[0][0] <= at:
            _, _, which, token = heappop(self._timers)
            allocation = self._book.allocations.get(token)
            if allocation is not None and allocation.live:
                self._timer(which, allocation, at)
        return bool(self._queue.play(at, self._wanted, self._submit))

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
        self.touched = True
        self._called()
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

    def told(self, news: Started | Notice | Silent | Ended | Active) -> bool:
        """Take in what our jobs' agents notice. Did a run begin to train?"""
        allocation, at = self._book.of_job(news.job_id), news.at
        if allocation is None or not allocation.live:
            return False
        self.touched = True
        match news:
            case Started():
                if allocation.asked_at is None:
                    self._came(allocation, news.nodes[0], at)
            case Active():
                allocation.active_at = allocation.active_at or at
                return self._book.trains(allocation)
            case Notice() if allocation.agents:
                walltime = allocation.end_at is not None and at >= allocation.end_at
                self.taken = self.taken or not (walltime or allocation.state is AllocationState.RELEASING)
                self.release(allocation, "walltime" if walltime else "warned by Slurm", at)
            case Silent() if allocation.agents:
                self._lost(allocation, "its node is silent", at, SILENT_S)
            case Ended() if allocation.agents:
                self._lost(allocation, news.state, at)
        return False

    def _came(self, allocation: Allocation, node: str, at: float) -> None:
        allocation.agents[node] = Agent()
        if allocation.state in (AllocationState.UNKNOWN, AllocationState.PENDING):
            allocation.state, allocation.start_at = AllocationState.RUNNING, at
            if allocation.end_at is None and allocation.minutes is not None:
                # Until a poll shows what was granted.
                allocation.end_at = at + 60.0 * allocation.minutes
        self._runs.join(allocation.run, node, allocation.job_id or "", at)
        self._watch(allocation, at)

    # -- letting go -------------------------------------------------------------------------------------------------

    def release(self, allocation: Allocation, reason: str, at: float) -> None:
        """As `Turn.release_allocation`: its node leaves, then its job ends."""
        if allocation.state is AllocationState.RELEASING:
            return
        if not allocation.agents:
            self.cancel(allocation, reason, at)
            return
        self.touched = True
        allocation.state, allocation.asked_at, allocation.reason = AllocationState.RELEASING, at, reason
        left_at = self._runs.release(allocation.run, list(allocation.agents), at)
        self._book.changed(allocation.run, self._runs.members(allocation.run))
        self._later(left_at, LEFT, allocation)

    def give_back(self, allocation: Allocation, reason: str, at: float) -> None:
        """As `head.slurm.neighbours.give_back`: somebody waits."""
        if allocation.wanted_at is not None:
            return
        self.release(allocation, reason, at)
        allocation.wanted_at, allocation.gone_by = at, at + LEAVE_S
        self._later(allocation.gone_by, GONE, allocation)

    def cancel(self, allocation: Allocation, reason: str, at: float) -> None:
        """As `Turn.cancel`."""
        self.touched = True
        allocation.asked_at = allocation.asked_at or at
        allocation.reason = reason
        if allocation.queued:
            forgo(allocation)
        elif allocation.job_id is not None:
            self._cancels()
            self._engine.cancel(allocation.job_id)

    def _lost(self, allocation: Allocation, reason: str, at: float, silent_s: float = 0.0) -> None:
        self._runs.lost(allocation.run, list(allocation.agents), at, silent_s)
        self._book.changed(allocation.run, self._runs.members(allocation.run))
        self._over(allocation, reason)

    def _over(self, allocation: Allocation, reason: str) -> None:
        self.touched = True
        self._shown.pop(allocation.token, None)
        if allocation.state not in (AllocationState.ENDED, AllocationState.LOST):
            allocation.state = AllocationState.ENDED
        allocation.reason = allocation.reason or reason

    def _watch(self, allocation: Allocation, at: float) -> None:
        """Have it released in time."""
        if allocation.end_at is not None:
            self._later(max(at, allocation.end_at - self._margin_s(allocation)), END, allocation)

    def _margin_s(self, allocation: Allocation) -> float:
        return self._limits.release_margin_s + self._book.longest_pause_s(allocation.run)

    def _later(self, at: float, which: str, allocation: Allocation) -> None:
        self._order += 1
        heappush(self._timers, (at, self._order, which, allocation.token))

    def _timer(self, which: str, allocation: Allocation, at: float) -> None:
        if which == END and allocation.state is AllocationState.RUNNING and allocation.end_at is not None:
            if at >= allocation.end_at - self._margin_s(allocation):
                self.release(allocation, allocation.ends_because, at)
            else:
                self._watch(allocation, at)
        elif which == LEFT:
            self._over(allocation, "given back as planned")
            self._engine.left(allocation.job_id or "")
        elif which == GONE and not allocation.agents:
            self.cancel(allocation, allocation.reason, at)
        elif which == GONE:
            self._lost(allocation, "it has not left in time", at)
            self._engine.left(allocation.job_id or "")

    # -- what polls say ---------------------------------------------------------------------------------------------

    def observe(self, jobs: Mapping[str, Sequence[JobInfo]], polled_at: float, at: float) -> None:
        """As `head.slurm.jobs`: bring all up to date.

        Args:
            jobs: those of a poll, by the token that they carry.
            polled_at, at: Unix time of the poll, and now.
        """
        shown = self._shown
        for allocation in self._book.live():
            token = allocation.token
            mine = jobs.get(token, ())
            if allocation.state is AllocationState.RUNNING and len(mine) == 1:
                if shown.get(token) is mine[0] and not allocation.missing and allocation.asked_at is None:
                    continue
                shown[token] = mine[0]
            self._observe(allocation, mine, polled_at, at)

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

    def sweep(
        self, over: Sequence[Allocation], jobs: Mapping[str, Sequence[JobInfo]], wanted: Collection[str], at: float
    ) -> None:
        """As `head.slurm.orphans`: end jobs that have not ended by themselves.

        Args:
            over: allocations that are.
            jobs: those of the poll, by token.
            wanted: tokens of those for whose nodes somebody waits.
            at: Unix time.
        """
        for allocation in over:
            time_s = LEAVE_S + END_S if allocation.token in wanted else CANCEL_AGAIN_S
            if allocation.asked_at is not None and at - allocation.asked_at < time_s:
                continue
            for job in jobs.get(allocation.token, ()):
                if job.state in ("PENDING", "RUNNING"):
                    self._cancels()
                    self._engine.cancel(job.job_id)
