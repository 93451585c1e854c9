"""Allocations: the Slurm jobs of a run, and their updates from polls.

The identity of an allocation is (cluster, job id, submit time) and our token. A job id alone is not enough: after a
crash slurmctld reuses ids (Slurm `state_save.c`: up to 5 s of acknowledged submissions are not yet on disk).
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec

from fallow.core.accounting.spans import Span, Use
from fallow.core.holes import Part
from fallow.core.states import BOOTING, BOOTS, ENDED_STATES, ENDING, ON_NODES, REQUEUED
from fallow.core.tokens import PREFIX, token_in
from fallow.model import AllocationKind, AllocationState, Exit, JobInfo

LIVE = (AllocationState.RUNNING, AllocationState.PENDING, AllocationState.RELEASING, AllocationState.UNKNOWN)
"""States of live allocations. RUNNING comes first, since most of them run."""

WAITING = (AllocationState.PENDING, AllocationState.UNKNOWN)
"""Requests that have no node yet."""

SUBMIT_S = 90.0
"""Longest duration of a call of sbatch: sbatch gives up after some tries of MessageTimeout (10 s; sites raise it), and
our caller gives up after this time."""

CANCEL_AGAIN_S = 30.0
"""A job that a poll still shows this long after it was cancelled is cancelled again."""

SAME_S = 3.0
"""Submit times that differ by less are equal: Slurm cuts off parts of seconds, and clocks may be up to 2 s apart."""

MISSING_POLLS = 2
"""Number of polls without a job after which the job has ended: one answer may be older than its submission."""


class Agent(msgspec.Struct, kw_only=True):
    """The agent on one node of an allocation. A node has one agent at a time."""

    process: str = ""
    "id of the agent's process; a new id means a new agent, and the workers of the old one have ended"
    node: int = 0
    "node number of its workers in the run's membership; 0: the workers have not joined yet"
    boot: int = 1
    "number of the start of workers that the head wants, from 1"
    has_left: bool = msgspec.field(default=False, name="gone")
    "True: the head expects no more of the agent"
    retry_at: float | None = msgspec.field(default=None, name="again_at")
    "Unix time at which crashed workers are started again"
    restarts: int = 0
    "number of restarts of crashed workers"


class Allocation(msgspec.Struct, kw_only=True):
    """One job of a run, with all components if it is heterogeneous."""

    token: str
    run: str
    kind: AllocationKind
    public_key: str
    "key of its agents"
    number: int = 0
    "position among the run's allocations in the order of their requests, from 0"
    state: AllocationState = AllocationState.UNKNOWN
    job_id: str | None = None
    partition: str = ""
    minutes: int | None = None
    "time limit that was requested; Slurm's is in `end_at`"
    part: Part | None = None
    "part of a shared node that it takes; None: whole nodes"
    exclude: str = ""
    "nodes that the run cannot use, as a Slurm host list"
    replaces: str = ""
    "token of the allocation whose place it takes"
    requested_ahead: bool = msgspec.field(default=False, name="ahead")
    "True: all nodes were in use when it was requested, so its wait says nothing about Slurm"
    active_at: float | None = None
    "Unix time of its first training step"
    has_normal_priority: bool = msgspec.field(default=False, name="hurried")
    "True: requested with normal priority, because the run was late for its deadline"
    nodes_wanted: int = 1
    requested_at: float = 0.0
    sent_by: float | None = None
    "Unix time by which its sbatch has ended; None: it waits in the head's queue, and Slurm does not know it"
    submit_at: float | None = None
    "Unix time by slurmctld's clock"
    requeues: int = 0
    "number of requeues of its job, as of the last poll that showed it"
    start_at: float | None = None
    ready_at: float | None = None
    "Unix time of the first poll that showed it running, if an earlier poll showed its nodes booting"
    end_at: float | None = None
    ends_because: str = "walltime"
    "cause of `end_at`"
    limit_s: float | None = None
    "time limit that Slurm shows; None: not seen yet, or unlimited"
    was_renewed: bool = msgspec.field(default=False, name="renewed")
    "True: a base job that the head itself submitted again"
    nodes: list[str] = []
    spans: dict[str, Span] = {}
    "job id -> time that the job held nodes"
    unseen_at: float | None = None
    "Unix time of the first poll without its job; None: the last poll showed it"
    is_settled: bool = msgspec.field(default=False, name="settled")
    "True: its jobs have ended, and `spans` is final"
    end_guessed: bool = False
    "True: Slurm forgot the jobs before it showed their end"
    slurm_state: str = ""
    "final state that Slurm shows"
    is_counted: bool = msgspec.field(default=False, name="counted")
    "True: the sums of its run include it"
    uses: dict[str, Use] = {}
    "node -> use; only nodes that had a member"
    agents: dict[str, Agent] = {}
    "node -> its agent"
    missing: int = 0
    looked_at: float | None = None
    "Unix time of the last look that did not show it, while it is unknown whether Slurm accepted it"
    blind_s: float = 0.0
    "longest time between two of these looks, in which Slurm may have run and forgotten it"
    reason: str = ""
    asked_at: float | None = None
    "Unix time at which its release began"
    was_warned: bool = msgspec.field(default=False, name="warned")
    "True: Slurm warned its steps early, although nobody had asked for its release"
    wanted_at: float | None = None
    "Unix time of the first poll that showed somebody waiting for its node"
    kill_at: float | None = msgspec.field(default=None, name="gone_by")
    "Unix time at which remaining workers are killed, because somebody waits for the node"
    end_code: int | None = None
    "exit code that its agents were told; repeated until they have left"
    left_at: float | None = None
    "Unix time at which an agent reported its end; `fallow run` then ends the job"
    told_to_end: bool = False
    "True: the head refused its agent, or told the agent that it was given up; `fallow run` ends the job"
    reserved: int = 0
    "number that its node gets (`fallow local`); 0: the next free one"

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    @property
    def is_elected(self) -> bool:
        """True if the lines after `fallow run` run in this allocation, because the run has ended."""
        return self.end_code in (Exit.OK, Exit.SOFTWARE)

    @property
    def is_queued(self) -> bool:
        """True while it waits in the head's queue for sbatch; a user's own base job never does."""
        by_head = self.kind is AllocationKind.HARVEST or self.was_renewed
        return by_head and self.state is AllocationState.UNKNOWN and self.sent_by is None

    @property
    def is_booting(self) -> bool:
        """True while Slurm boots its nodes: nothing of it runs yet."""
        return self.state is AllocationState.PENDING and self.reason == BOOTS

    @property
    def waits_since(self) -> float:
        """Unix time since which Slurm has had it, or of the request while Slurm does not have it."""
        return self.requested_at if self.sent_by is None else self.sent_by

    @property
    def is_harvested(self) -> bool:
        """True if it took an idle node, which goes back whenever somebody else wants it."""
        return self.kind is AllocationKind.HARVEST and not self.has_normal_priority

    @property
    def hosts(self) -> list[str]:
        """Nodes that have an agent of it."""
        return [host for host, agent in self.agents.items() if not agent.has_left]

    @property
    def members(self) -> list[int]:
        """Numbers of its nodes in the run's membership, alive or not."""
        return [agent.node for agent in self.agents.values() if agent.node]


def _is_unmarked(allocation: Allocation, job: JobInfo) -> bool:
    """Return True for a base job whose comment was replaced. Its name is the user's, so id and submit time decide."""
    if allocation.kind is not AllocationKind.BASE or job.submit_at is None or token_in(job):
        return False
    if allocation.submit_at is not None:
        return job.submitted is not None and abs(job.submitted - allocation.submit_at) <= SAME_S
    # Until sbatch has ended, `sent_by` is its latest end.
    last = allocation.sent_by
    return last is not None and allocation.requested_at - SAME_S <= job.submit_at <= last + SAME_S


class PolledJobs:
    """The jobs of a poll, by allocation."""

    def __init__(self, jobs: Sequence[JobInfo]) -> None:
        self._jobs = jobs
        self._marked: dict[str, list[JobInfo]] = {}
        "word in a job's name or comment -> jobs; tokens are among these words"
        for job in jobs:
            if PREFIX in job.name or PREFIX in job.comment:
                for word in {job.name, *job.comment.split()}:
                    self._marked.setdefault(word, []).append(job)

    def jobs_of(self, allocation: Allocation) -> list[JobInfo]:
        """Return the jobs of an allocation: by its token, and by job id once the id is known.

        A job with this id and a different token is another user's job that got the reused id.
        """
        job_id, marked = allocation.job_id, self._marked.get(allocation.token, [])
        if job_id is None:
            return marked
        if marked or allocation.kind is not AllocationKind.BASE or allocation.is_settled:
            return [job for job in marked if job_id in (job.job_id, job.het_job_id)]
        return [job for job in self._by_id.get(job_id, ()) if _is_unmarked(allocation, job)]

    @cached_property
    def _by_id(self) -> dict[str, list[JobInfo]]:
        jobs: dict[str, list[JobInfo]] = {}
        for job in self._jobs:
            jobs.setdefault(job.het_job_id or job.job_id, []).append(job)
        return jobs


def begin_sbatch(allocation: Allocation, now: float) -> bool:
    """Record that sbatch is called at `now` (Unix time). False: do not call it, the allocation is no longer queued."""
    if not allocation.is_queued:
        return False
    allocation.sent_by, allocation.looked_at, allocation.missing = now + SUBMIT_S, now, 0
    return True


def end_sbatch(allocation: Allocation, now: float) -> None:
    """Record that sbatch has ended, with or without an answer. Earlier polls without the job do not count."""
    allocation.sent_by, allocation.missing, allocation.unseen_at = now, 0, None


def forgo(allocation: Allocation) -> None:
    """End an allocation that waits in the head's queue. It never was a job, so nothing is booked or counted."""
    allocation.state = AllocationState.ENDED
    allocation.is_settled = allocation.is_counted = True


def horizon_s(poll_interval_s: float) -> float:
    """Return the time after sbatch's end in which a poll must show a submission; after that it is lost."""
    # MessageTimeout (10 s) + SAVE_MAX_WAIT (5 s) + margin, and never before two polls.
    return max(30.0, 2.5 * poll_interval_s)


def observe(allocation: Allocation, jobs: Sequence[JobInfo], now: float, horizon_s: float) -> str | None:
    """Bring one allocation up to date with a poll.

    Args:
        allocation: changed in place.
        jobs: its jobs in the poll.
        now: Unix time of the poll.
        horizon_s: a submission that no poll shows for this long after its sbatch ended is lost.

    Returns:
        Description of the change; None: no change.
    """
    if not jobs:
        if allocation.is_queued:
            return None
        allocation.missing += 1
        if allocation.unseen_at is None:
            allocation.unseen_at = now
        if allocation.state is AllocationState.UNKNOWN or _is_forgotten(allocation):
            since = allocation.requested_at if allocation.looked_at is None else allocation.looked_at
            allocation.blind_s, allocation.looked_at = max(allocation.blind_s, now - since), now
            # Slurm may have been down all the time, so one answer without the job is not enough.
            if now - allocation.waits_since > horizon_s and allocation.missing >= MISSING_POLLS:
                allocation.state = AllocationState.LOST
                return "never appeared in Slurm"
        elif allocation.missing >= MISSING_POLLS and not allocation.hosts:
            if allocation.state is AllocationState.PENDING:
                # The reason of its wait is not the reason of its end.
                allocation.reason = ""
            allocation.state = AllocationState.ENDED
            return "no longer in Slurm"
        return None
    allocation.missing, allocation.unseen_at = 0, None
    leader = min(jobs, key=lambda job: int(job.job_id) if job.job_id.isdigit() else 0)
    allocation.job_id = allocation.job_id or leader.het_job_id or leader.job_id
    was_resubmitted = any(_was_resubmitted(allocation, job) for job in jobs)
    allocation.submit_at = leader.submitted
    if leader.state not in ENDING:
        # Slurm counts the coming restart already while the job completes.
        allocation.requeues = leader.restarts
    over = all(job.state in ENDED_STATES for job in jobs)
    running = [job for job in jobs if job.state in ON_NODES and (job.state != BOOTING or allocation.agents)]
    if allocation.hosts and not (running or over or was_resubmitted):
        # The agents prove that it runs: slurmctld came back with an older state, or the poll is older than the agents.
        return None
    allocation.nodes = sorted({node for job in jobs for node in job.nodes})
    allocation.partition = allocation.partition or leader.partition
    ends = [job.end_at for job in jobs if job.end_at is not None and job.state == "RUNNING"]
    if ends:
        allocation.end_at, allocation.ends_because = min(ends), "walltime"
    before, was_booting = allocation.state, allocation.is_booting
    if over:
        allocation.state = AllocationState.ENDED
        allocation.reason = leader.state
    elif running:
        if was_booting:
            allocation.ready_at = now
        # Slurm's start time is before the boot of the nodes.
        allocation.start_at = allocation.ready_at or leader.start_at
        if allocation.state is not AllocationState.RELEASING:
            allocation.state = AllocationState.RUNNING
        allocation.reason = ""
    else:
        allocation.state = AllocationState.PENDING
        allocation.reason = BOOTS if any(job.state == BOOTING for job in jobs) else leader.reason
        if allocation.is_booting and not was_booting:
            return f"its nodes are booting: {','.join(allocation.nodes)}"
    if allocation.state is before:
        return None
    where = f" on {','.join(allocation.nodes)}" if allocation.nodes else ""
    why = f" ({allocation.reason})" if allocation.reason else ""
    return f"{before} -> {allocation.state}{where}{why}"


def _is_forgotten(allocation: Allocation) -> bool:
    """Return True for a base job that sbatch accepted and no poll has shown: it may have been cancelled unseen."""
    waits = allocation.kind is AllocationKind.BASE and allocation.state is AllocationState.PENDING
    return waits and allocation.submit_at is None and not allocation.agents


def preemption_end(jobs: Iterable[JobInfo]) -> float | None:
    """Unix time at which the preemption grace of jobs ends (`PreemptTime`, shortened `EndTime`); None: no grace."""
    ends = [job.end_at for job in jobs if job.preempt_at is not None and job.end_at is not None]
    return min(ends) if ends else None


def was_requeued(allocation: Allocation, jobs: Iterable[JobInfo]) -> bool:
    """Return True if Slurm has put a base job that had nodes back into the queue, under the same job id.

    Slurm counts the restarts, and gives the job a new submit time, so that it looks like a new job in the accounting
    (slurmctld's job_mgr.c). Id, name and comment stay. A pending job alone proves nothing: the poll may be older than
    the agents.
    """
    started = allocation.start_at is not None or bool(allocation.agents)
    if allocation.kind is not AllocationKind.BASE or not started or allocation.job_id is None:
        return False
    return any(_was_resubmitted(allocation, job) for job in jobs)


def _was_resubmitted(allocation: Allocation, job: JobInfo) -> bool:
    last_submit_at, submitted = allocation.submit_at, job.submitted
    is_later = last_submit_at is not None and submitted is not None and submitted > last_submit_at + SAME_S
    return (is_later or job.restarts > allocation.requeues) and job.state in REQUEUED | (ON_NODES - ENDING)


def begin_again(allocation: Allocation, at: float) -> None:
    """Make an allocation wait for the nodes of its requeued job.

    The time that the job held until `at` (Unix time) stays booked, under its job id and the number of the attempt.
    """
    for job_id in [job_id for job_id in allocation.spans if "." not in job_id]:
        attempt = sum(1 for key in allocation.spans if key.partition(".")[0] == job_id)
        span = allocation.spans[f"{job_id}.{attempt}"] = allocation.spans.pop(job_id)
        span.end_at = at if span.end_at is None else span.end_at
    allocation.state, allocation.reason = AllocationState.PENDING, ""
    allocation.submit_at = allocation.start_at = allocation.end_at = allocation.active_at = None
    allocation.nodes, allocation.agents = [], {}
    allocation.asked_at = allocation.wanted_at = allocation.kill_at = allocation.end_code = None
    allocation.left_at = None
    allocation.was_warned, allocation.told_to_end, allocation.missing, allocation.unseen_at = False, False, 0, None
