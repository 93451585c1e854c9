"""The node-hour budget (I10), checked against a job queue of the test. Its Slurm answers late, loses answers and
forgets jobs, and its clocks step.
"""

from dataclasses import dataclass
from math import floor
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from builders import NOW, allocation
from builders import job as poll_job
from fallow.core.accounting import budget
from fallow.core.accounting.spans import Span, follow
from fallow.core.allocations import (
    SUBMIT_S,
    Allocation,
    PolledJobs,
    begin_again,
    begin_sbatch,
    end_sbatch,
    forgo,
    observe,
)
from fallow.core.states import ENDED_STATES
from fallow.model import AllocationKind, AllocationState, JobInfo

HORIZON_S = 60.0


def harvest(token: str = "fallow-r-h1-x", minutes: int | None = 10, **more: Any) -> Allocation:
    return allocation(token, **{"state": AllocationState.UNKNOWN, "partition": "", "minutes": minutes, **more})


def span(start: float, end: float | None = None, nodes: int = 1) -> Span:
    return Span(nodes={f"n{i}": 4 for i in range(nodes)}, start_at=start, end_at=end)


@dataclass
class SlurmJob:
    """A job as it is in Slurm, whatever the head knows of it."""

    token: str
    job_id: str
    limit_s: float
    state: str = "PENDING"
    start_at: float | None = None
    end_at: float | None = None
    forgotten: bool = False

    def claim(self) -> float:
        """Node-seconds that the job has held, or may yet hold."""
        if self.state not in ("PENDING", "RUNNING"):
            return 0.0 if self.start_at is None or self.end_at is None else self.end_at - self.start_at
        return self.limit_s

    def info(self) -> JobInfo:
        shown_end = self.end_at if self.end_at is not None or self.start_at is None else self.start_at + self.limit_s
        shown = {"start_at": self.start_at, "end_at": shown_end, "time_limit_s": self.limit_s, "exclusive": True}
        nodes = ["n1"] if self.start_at is not None else []
        return poll_job(self.job_id, self.state, name=self.token, user="me", nodes=nodes, **shown)


@dataclass
class Call:
    """A call of sbatch that has not ended."""

    allocation: Allocation
    job: SlurmJob
    outcome: str
    shows_at: float
    ends_at: float


class NeverAboveTheBudget(RuleBasedStateMachine):
    """In every order of events, the time that Slurm's jobs held and may still hold is within the budget."""

    @initialize(minutes=st.just(10) | st.integers(0, 40))
    def begin(self, minutes: int) -> None:
        self.budget_s = minutes * 60.0
        self.now = NOW
        self.jobs: list[SlurmJob] = []
        self.coming: list[tuple[float, SlurmJob]] = []  # (appears at, job): requests whose answer was lost
        self.queue: list[Allocation] = []  # asked for, and not at sbatch yet: one goes there at a time
        self.call: Call | None = None
        self.allocations: list[Allocation] = []
        self.skew_s = 0.0
        self.polled_at = NOW

    @rule(minutes=st.just(30) | st.integers(1, 30))
    def ask(self, minutes: int) -> None:
        room = budget.remaining_node_s(self.budget_s, 0.0, self.allocations, self.polled_at)
        granted = min(minutes, floor(room / 60))
        if granted < 1:
            return
        number = len(self.allocations)
        asked = harvest(f"fallow-r-h{number}-x", granted, requested_at=self.now + self.skew_s)
        self.allocations.append(asked)
        self.queue.append(asked)

    @rule(pick=st.integers(0, 10**6))
    def withdraw_what_waits_in_our_queue(self, pick: int) -> None:
        waiting = [a for a in self.queue if a.is_queued]
        if waiting:
            forgo(waiting[pick % len(waiting)])

    @rule(
        outcome=st.sampled_from(["taken", "lost answer", "refused", "lost request"]),
        takes_s=st.sampled_from([0.0, SUBMIT_S]) | st.floats(0, SUBMIT_S),
        within=st.just(1.0) | st.floats(0, 1),
        after_s=st.floats(0, 40),
    )
    def the_next_goes_to_sbatch(self, outcome: str, takes_s: float, within: float, after_s: float) -> None:
        if self.call is not None or not self.queue:
            return
        allocation = self.queue.pop(0)
        if not begin_sbatch(allocation, self.now + self.skew_s):
            return
        assert allocation.minutes is not None
        number = self.allocations.index(allocation)
        job = SlurmJob(allocation.token, str(100 + number), allocation.minutes * 60.0)
        # A lost answer: Slurm shows the job within the horizon after sbatch gave up.
        late_s = after_s if outcome == "lost answer" and within > 0.5 else 0.0
        shows_at = self.now + within * takes_s if not late_s else self.now + takes_s + late_s
        self.call = Call(allocation, job, outcome, shows_at, self.now + takes_s)
        if outcome in ("taken", "lost answer"):
            self.coming.append((shows_at, job))
        self.pass_time(0.0)

    def sbatch_ends(self, call: Call) -> None:
        self.call = None
        if call.outcome == "taken":
            call.allocation.job_id = call.job.job_id
            if call.allocation.state is AllocationState.UNKNOWN:
                call.allocation.state = AllocationState.PENDING
        elif call.outcome == "refused":
            call.allocation.state = AllocationState.ENDED
            return
        end_sbatch(call.allocation, self.now + self.skew_s)

    @rule(seconds=st.just(50.0) | st.floats(1, 50))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        call = self.call
        if call is not None and call.ends_at <= self.now:
            self.sbatch_ends(call)
        for at, job in list(self.coming):
            if at <= self.now:
                self.coming.remove((at, job))
                self.jobs.append(job)
        for job in self.jobs:
            if job.state == "RUNNING" and job.start_at is not None and job.start_at + job.limit_s <= self.now:
                job.state, job.end_at = "TIMEOUT", job.start_at + job.limit_s

    @rule(by=st.floats(-10_000, 10_000))
    def our_clock_steps(self, by: float) -> None:
        # Requests that are waited for are dated by it, so the horizon is judged wrongly: that alone is left out.
        if not any(a.state is AllocationState.UNKNOWN and not a.is_queued for a in self.allocations):
            self.skew_s = by

    @rule(pick=st.integers(0, 10**6))
    def starts(self, pick: int) -> None:
        waiting = [job for job in self.jobs if job.state == "PENDING"]
        if waiting:
            job = waiting[pick % len(waiting)]
            job.state, job.start_at = "RUNNING", self.now

    @rule(pick=st.integers(0, 10**6), state=st.sampled_from(["CANCELLED", "PREEMPTED", "COMPLETED"]))
    def ends(self, pick: int, state: str) -> None:
        alive = [job for job in self.jobs if job.state in ("PENDING", "RUNNING")]
        if alive:
            job = alive[pick % len(alive)]
            job.state, job.end_at = state, self.now

    @rule()
    def slurm_forgets_the_ended(self) -> None:
        for job in self.jobs:
            job.forgotten |= job.state in ENDED_STATES

    @rule(pick=st.integers(0, 10**6))
    def its_agents_say_goodbye_first(self, pick: int) -> None:
        running = [a for a in self.allocations if a.state is AllocationState.RUNNING]
        if running:
            running[pick % len(running)].state = AllocationState.ENDED

    @rule()
    def poll(self) -> None:
        self.polled_at = self.now + self.skew_s
        shown = PolledJobs([job.info() for job in self.jobs if not job.forgotten])
        for mine in self.allocations:
            waits = mine.is_queued
            if mine.is_live:
                observe(mine, shown.jobs_of(mine), self.polled_at, HORIZON_S)
            assert mine.is_queued == waits, "Slurm has never heard of it, so no poll says anything about it"
            follow(mine, shown.jobs_of(mine), self.polled_at, {})

    @invariant()
    def within_the_budget(self) -> None:
        if not hasattr(self, "jobs"):
            return
        claims = sum(job.claim() for job in self.jobs) + sum(job.claim() for _, job in self.coming)
        assert claims <= self.budget_s + 1e-3


TestNeverAboveTheBudget = NeverAboveTheBudget.TestCase
TestNeverAboveTheBudget.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def test_a_released_allocation_gives_back_what_it_did_not_use() -> None:
    mine = harvest(minutes=60, state=AllocationState.ENDED, job_id="7", spans={"7": span(NOW)})
    assert budget.booked_node_s(mine, NOW + 60.0) == 3600.0, "Slurm has not shown its end yet"
    mine.spans["7"].end_at, mine.is_settled = NOW + 90.0, True
    assert budget.booked_node_s(mine, NOW + 10_000.0) == 90.0
    mine.end_guessed = True
    assert budget.booked_node_s(mine, NOW + 10_000.0) == 3600.0


def test_the_first_base_job_is_free_and_a_renewed_one_is_not() -> None:
    known = {"job_id": "1", "nodes_wanted": 2, "limit_s": 600.0, "spans": {"1": span(NOW, nodes=2)}}
    base = allocation("t", kind=AllocationKind.BASE, **known)
    assert budget.booked_node_s(base, NOW + 60) == 0.0
    base.was_renewed = True
    assert budget.booked_node_s(base, NOW + 60) == 1200.0
    base.limit_s = None
    assert budget.remaining_node_s(3600.0, 0.0, [base], NOW) < 0, "a job without end leaves room for nothing"


@given(
    extended=st.lists(st.tuples(st.integers(1, 120), st.integers(0, 3600), st.integers(1, 4)), min_size=1, max_size=6),
    budget_s=st.integers(0, 20_000),
)
def test_what_was_granted_more_than_asked_is_over_before_the_budget_is(
    extended: list[tuple[int, int, int]], budget_s: int
) -> None:
    """(minutes granted, seconds held so far, nodes): somebody extended the jobs, or the site rounds limits up."""
    running = [
        allocation(f"t{i}", minutes=1, job_id=str(i), limit_s=60.0 * m, spans={str(i): span(NOW - held, nodes=n)})
        for i, (m, held, n) in enumerate(extended)
    ]
    end = budget.exhausted_at(budget_s, 0.0, running, NOW)
    fits = budget.remaining_node_s(budget_s, 0.0, running, NOW) >= 0
    assert (end is None) == fits
    if end is not None:
        assert end >= NOW
        held = sum(budget.spent_node_s(a, end) for a in running)
        already = sum(budget.spent_node_s(a, NOW) for a in running)
        assert held <= max(budget_s, already) + 1e-3


def test_a_poll_tells_what_was_held() -> None:
    mine, job = (
        harvest(job_id="5", state=AllocationState.RUNNING),
        SlurmJob("fallow-r-h1-x", "5", 900.0, "RUNNING", NOW),
    )
    assert follow(mine, [job.info()], NOW + 30, {"n1": 8})
    assert not follow(mine, [job.info()], NOW + 60, {"n1": 8})
    assert mine.limit_s == 900.0, "Slurm granted more than was asked for"
    job.state, job.end_at = "CANCELLED", NOW + 70
    assert follow(mine, [job.info()], NOW + 90, {}) and mine.is_settled
    assert mine.spans["5"] == Span(nodes={"n1": 8}, partition="p", start_at=NOW, end_at=NOW + 70)


def test_a_requeued_job_that_completes_has_held_its_node_since_it_started() -> None:
    """squeue shows the next possible start of such a job, which moves with the clock (seen with 22.05)."""
    mine, job = harvest(job_id="5"), SlurmJob("fallow-r-h1-x", "5", 900.0, "RUNNING", NOW)
    follow(mine, [job.info()], NOW + 30, {"n1": 8})
    job.state, job.start_at = "COMPLETING", NOW + 60
    follow(mine, [job.info()], NOW + 60, {"n1": 8})
    begin_again(mine, NOW + 62)
    assert budget.spent_node_s(mine, NOW + 100) == 62.0


def test_a_forgotten_job_ended_at_its_limit_at_the_latest() -> None:
    attempts = {"5.1": span(NOW - 1000, NOW - 900), "5": span(NOW)}
    mine = harvest(job_id="5", state=AllocationState.ENDED, limit_s=600.0, spans=attempts)
    assert follow(mine, [], NOW + 100_000, {})
    assert not mine.is_settled, "one answer may be wrong"
    assert follow(mine, [], NOW + 100_030, {})
    assert mine.is_settled and mine.end_guessed
    assert [each.end_at for each in attempts.values()] == [NOW - 900, NOW + 600]


def test_a_job_that_was_over_before_a_poll_saw_it_counts_in_full() -> None:
    mine = harvest(job_id="5", state=AllocationState.ENDED, limit_s=600.0)
    assert follow(mine, [], NOW + 30, {}) and follow(mine, [], NOW + 60, {}) and mine.is_settled
    assert budget.booked_node_s(mine, NOW + 100_000) == 600.0
