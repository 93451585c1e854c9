"""Allocations: the Slurm jobs that are held for a run, and what a poll says about them.

An allocation's identity is (cluster, job id, submit time) and our token; a job id alone is none, because a slurmctld
that crashed gives ids away again (Slurm `state_save.c`: up to 5 s of acknowledged submissions are not yet on disk).
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
"""Most of them run, so that is compared first."""

WAITING = (AllocationState.PENDING, AllocationState.UNKNOWN)
"""Requests that have no node yet."""

SUBMIT_S = 90.0
"""sbatch has ended so long after it was called: it gives up by itself after some tries of MessageTimeout (10 s; sites
raise it), and whoever called it does then."""

CANCEL_AGAIN_S = 30.0
"""A job that a poll still shows this long after it was cancelled is cancelled again."""

SAME_S = 3.0
"""Times of submission by two clocks that differ by less are the same: Slurm cuts off parts of seconds, and clocks that
are less than 2 s apart are taken for one."""

MISSING_POLLS = 2
"""A job that no poll shows is taken for ended only after this many: one answer may be from before its submission."""


class Agent(msgspec.Struct, kw_only=True):
    """The agent on one node of an allocation. There is one at a time."""

    process: str = ""
    "which process it is; another one has begun anew, and the workers of the one before have ended with that"
    node: int = 0
    "number of its workers in the run's membership; 0: the ones that are wanted have not come yet"
    boot: int = 1
    "which start of its workers is wanted"
    gone: bool = False
    again_at: float | None = None
    "Unix time at which workers that crashed are started again"
    restarts: int = 0
    "how often they were"


class Allocation(msgspec.Struct, kw_only=True):
    """One job (all components of a heterogeneous one) held for a run."""

    token: str
    run: str
    kind: AllocationKind
    public_key: str
    "of its agents"
    number: int = 0
    "in the order in which the run asked for its allocations, from 0"
    state: AllocationState = AllocationState.UNKNOWN
    job_id: str | None = None
    partition: str = ""
    minutes: int | None = None
    "asked for; what was granted is in end_at"
    part: Part | None = None
    "what it takes of a shared node; None: whole nodes"
    exclude: str = ""
    "nodes that are of no use to the run, folded"
    replaces: str = ""
    "token of the allocation whose place it takes"
    ahead: bool = False
    "when it was asked for, others had all nodes: how long it waits says nothing of Slurm"
    active_at: float | None = None
    "Unix time of its first step in the training"
    hurried: bool = False
    "asked for with normal priority, because the run was behind the schedule of its deadline"
    nodes_wanted: int = 1
    requested_at: float = 0.0
    sent_by: float | None = None
    "Unix time by which its sbatch has ended; None: it waits in the head's own queue, and Slurm has never heard of it"
    submit_at: float | None = None
    "Unix time by slurmctld's clock"
    requeues: int = 0
    "how often Slurm had requeued its job by the last poll that showed it"
    start_at: float | None = None
    ready_at: float | None = None
    "Unix time of the poll that first showed it running, where an earlier one had shown that its nodes were booting"
    end_at: float | None = None
    ends_because: str = "walltime"
    "what sets `end_at`"
    limit_s: float | None = None
    "time limit that Slurm shows; None: not seen yet, or without end"
    renewed: bool = False
    "a base job that the head submitted again by itself"
    nodes: list[str] = []
    spans: dict[str, Span] = {}
    "job id -> what it held"
    unseen_at: float | None = None
    "first poll that did not show its job any more; None: the last one did"
    settled: bool = False
    "its jobs are over, and `spans` is all they held"
    end_guessed: bool = False
    "Slurm forgot the jobs before it had shown their end"
    slurm_state: str = ""
    "how Slurm says it ended"
    counted: bool = False
    "it is in the sums of its run"
    uses: dict[str, Use] = {}
    "node -> what it was used for; nodes that never had a member are not there"
    agents: dict[str, Agent] = {}
    "by the names of their nodes"
    missing: int = 0
    looked_at: float | None = None
    "last time that it was not there, while nobody knows whether Slurm took it: before sbatch, then each poll"
    blind_s: float = 0.0
    "longest time between two such looks: Slurm may have run and forgotten it within"
    reason: str = ""
    asked_at: float | None = None
    "Unix time at which its release began"
    warned: bool = False
    "Slurm warned its steps before their time, and nobody had asked for its release"
    wanted_at: float | None = None
    "Unix time at which somebody was first seen to wait for its node"
    gone_by: float | None = None
    "Unix time at which its workers are killed if they have not left; somebody waits for the node"
    end_code: int | None = None
    "what its agents were told to end with; said again until they are gone"
    left_at: float | None = None
    "Unix time at which an agent said that it ends; `fallow run` ends the job then"
    told_to_end: bool = False
    "the head refused an agent of it, or has given it up and told an agent so: `fallow run` ends the job"
    reserved: int = 0
    "the number that its node gets (`fallow local`); 0: the next that is free"

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def elected(self) -> bool:
        """True if the lines after `fallow run` run in this allocation, because the run has ended."""
        return self.end_code in (Exit.OK, Exit.SOFTWARE)

    @property
    def queued(self) -> bool:
        """Waits for its turn at sbatch; a user's own base job never does."""
        by_head = self.kind is AllocationKind.HARVEST or self.renewed
        return by_head and self.state is AllocationState.UNKNOWN and self.sent_by is None

    @property
    def is_booting(self) -> bool:
        """Return True if Slurm has given it nodes, which are not up yet: nothing of it runs there."""
        return self.state is AllocationState.PENDING and self.reason == BOOTS

    @property
    def waits_since(self) -> float:
        """Unix time since which Slurm has had it, or, while it has not, since which it is wanted."""
        return self.requested_at if self.sent_by is None else self.sent_by

    @property
    def harvested(self) -> bool:
        """Its node was lying idle, and goes back whenever somebody else wants it."""
        return self.kind is AllocationKind.HARVEST and not self.hurried

    @property
    def hosts(self) -> list[str]:
        """Nodes on which an agent of it is."""
        return [host for host, agent in self.agents.items() if not agent.gone]

    @property
    def members(self) -> list[int]:
        """Numbers that its nodes have in the run's membership, whether they are alive or not."""
        return [agent.node for agent in self.agents.values() if agent.node]


def _unmarked(allocation: Allocation, job: JobInfo) -> bool:
    """Is it a base job whose comment is another one by now? Its name is the user's own, so number and time must do."""
    if allocation.kind is not AllocationKind.BASE or job.submit_at is None or token_in(job):
        return False
    if allocation.submit_at is not None:
        return job.submitted is not None and abs(job.submitted - allocation.submit_at) <= SAME_S
    # Until sbatch has ended, `sent_by` says when it has at the latest.
    last = allocation.sent_by
    return last is not None and allocation.requested_at - SAME_S <= job.submit_at <= last + SAME_S


class Shown:
    """The jobs of a poll, by whose allocation they are."""

    def __init__(self, jobs: Sequence[JobInfo]) -> None:
        self._jobs = jobs
        self._marked: dict[str, list[JobInfo]] = {}
        "by the words in their name and comment, of which a token is one"
        for job in jobs:
            if PREFIX in job.name or PREFIX in job.comment:
                for word in {job.name, *job.comment.split()}:
                    self._marked.setdefault(word, []).append(job)

    def of(self, allocation: Allocation) -> list[JobInfo]:
        """Those of one allocation: by its token, and by their id once it is known.

        An id with a different token is somebody else's job that was given the same number.
        """
        job_id, marked = allocation.job_id, self._marked.get(allocation.token, [])
        if job_id is None:
            return marked
        if marked or allocation.kind is not AllocationKind.BASE or allocation.settled:
            return [job for job in marked if job_id in (job.job_id, job.het_job_id)]
        return [job for job in self._by_id.get(job_id, ()) if _unmarked(allocation, job)]

    @cached_property
    def _by_id(self) -> dict[str, list[JobInfo]]:
        found: dict[str, list[JobInfo]] = {}
        for job in self._jobs:
            found.setdefault(job.het_job_id or job.job_id, []).append(job)
        return found


def send(allocation: Allocation, now: float) -> bool:
    """Its turn at sbatch has come. False: nobody wants it any more; else it may exist from now, Unix time, on."""
    if not allocation.queued:
        return False
    allocation.sent_by, allocation.looked_at, allocation.missing = now + SUBMIT_S, now, 0
    return True


def sent(allocation: Allocation, now: float) -> None:
    """Its sbatch has ended, with or without an answer; polls from before that say nothing."""
    allocation.sent_by, allocation.missing, allocation.unseen_at = now, 0, None


def forgo(allocation: Allocation) -> None:
    """End what waits in the head's own queue: it never was a job, so nothing of it is booked or counted."""
    allocation.state = AllocationState.ENDED
    allocation.settled = allocation.counted = True


def horizon_s(poll_interval_s: float) -> float:
    """A submission that no poll has shown for so long after its sbatch ended is lost."""
    # MessageTimeout (10 s) + SAVE_MAX_WAIT (5 s) + margin, and never before two polls.
    return max(30.0, 2.5 * poll_interval_s)


def observe(allocation: Allocation, mine: Sequence[JobInfo], now: float, horizon_s: float) -> str | None:
    """Bring one allocation up to date with a poll.

    Args:
        allocation: changed in place.
        mine: its jobs of the poll.
        now: Unix time of the poll.
        horizon_s: a submission that no poll has shown for this long after its sbatch ended is lost.

    Returns:
        What changed, in words; None when nothing did.
    """
    if not mine:
        if allocation.queued:
            return None
        allocation.missing += 1
        if allocation.unseen_at is None:
            allocation.unseen_at = now
        if allocation.state is AllocationState.UNKNOWN or _forgotten(allocation):
            since = allocation.requested_at if allocation.looked_at is None else allocation.looked_at
            allocation.blind_s, allocation.looked_at = max(allocation.blind_s, now - since), now
            # Slurm may have been away all the time, so the first answer that does not show it is not enough.
            if now - allocation.waits_since > horizon_s and allocation.missing >= MISSING_POLLS:
                allocation.state = AllocationState.LOST
                return "never appeared in Slurm"
        elif allocation.missing >= MISSING_POLLS and not allocation.hosts:
            if allocation.state is AllocationState.PENDING:
                # Why it waited says nothing about how it ended.
                allocation.reason = ""
            allocation.state = AllocationState.ENDED
            return "no longer in Slurm"
        return None
    allocation.missing, allocation.unseen_at = 0, None
    leader = min(mine, key=lambda job: int(job.job_id) if job.job_id.isdigit() else 0)
    allocation.job_id = allocation.job_id or leader.het_job_id or leader.job_id
    is_again = any(_submitted_again(allocation, job) for job in mine)
    allocation.submit_at = leader.submitted
    if leader.state not in ENDING:
        # While it completes Slurm already counts the restart that is to come.
        allocation.requeues = leader.restarts
    over = all(job.state in ENDED_STATES for job in mine)
    running = [job for job in mine if job.state in ON_NODES and (job.state != BOOTING or allocation.agents)]
    if allocation.hosts and not (running or over or is_again):
        # The agents prove that it runs: slurmctld came back with an older state, or the poll is older than they are.
        return None
    allocation.nodes = sorted({node for job in mine for node in job.nodes})
    allocation.partition = allocation.partition or leader.partition
    ends = [job.end_at for job in mine if job.end_at is not None and job.state == "RUNNING"]
    if ends:
        allocation.end_at, allocation.ends_because = min(ends), "walltime"
    before, was_booting = allocation.state, allocation.is_booting
    if over:
        allocation.state = AllocationState.ENDED
        allocation.reason = leader.state
    elif running:
        if was_booting:
            allocation.ready_at = now
        # Slurm counts from when it gave the nodes, which had to boot first.
        allocation.start_at = allocation.ready_at or leader.start_at
        if allocation.state is not AllocationState.RELEASING:
            allocation.state = AllocationState.RUNNING
        allocation.reason = ""
    else:
        allocation.state = AllocationState.PENDING
        allocation.reason = BOOTS if any(job.state == BOOTING for job in mine) else leader.reason
        if allocation.is_booting and not was_booting:
            return f"its nodes are booting: {','.join(allocation.nodes)}"
    if allocation.state is before:
        return None
    where = f" on {','.join(allocation.nodes)}" if allocation.nodes else ""
    why = f" ({allocation.reason})" if allocation.reason else ""
    return f"{before} -> {allocation.state}{where}{why}"


def _forgotten(allocation: Allocation) -> bool:
    """A base job that Slurm said yes to, and that no poll has shown: nothing tells that anybody has cancelled it."""
    waits = allocation.kind is AllocationKind.BASE and allocation.state is AllocationState.PENDING
    return waits and allocation.submit_at is None and not allocation.agents


def preempted_until(jobs: Iterable[JobInfo]) -> float | None:
    """End of a job's preemption grace in Unix time, where Slurm has begun one (`PreemptTime`, shortened `EndTime`)."""
    ends = [job.end_at for job in jobs if job.preempt_at is not None and job.end_at is not None]
    return min(ends) if ends else None


def requeued(allocation: Allocation, jobs: Iterable[JobInfo]) -> bool:
    """Return True if Slurm has put a base job that had nodes back into the queue, under the same job id.

    Slurm counts its restarts, and gives it a new submit time, so that it looks like a new job in the accounting
    (slurmctld's job_mgr.c); id, name and comment stay. A job that waits is not enough: the poll may be older than its
    agents.
    """
    started = allocation.start_at is not None or bool(allocation.agents)
    if allocation.kind is not AllocationKind.BASE or not started or allocation.job_id is None:
        return False
    return any(_submitted_again(allocation, job) for job in jobs)


def _submitted_again(allocation: Allocation, job: JobInfo) -> bool:
    seen, submitted = allocation.submit_at, job.submitted
    is_later = seen is not None and submitted is not None and submitted > seen + SAME_S
    return (is_later or job.restarts > allocation.requeues) and job.state in REQUEUED | (ON_NODES - ENDING)


def begin_again(allocation: Allocation, at: float) -> None:
    """Make an allocation wait for the nodes of its requeued job.

    What the job held until `at` (Unix time) stays booked, under its job id and the number of the attempt.
    """
    for job_id in [job_id for job_id in allocation.spans if "." not in job_id]:
        attempt = sum(1 for key in allocation.spans if key.partition(".")[0] == job_id)
        span = allocation.spans[f"{job_id}.{attempt}"] = allocation.spans.pop(job_id)
        span.end_at = at if span.end_at is None else span.end_at
    allocation.state, allocation.reason = AllocationState.PENDING, ""
    allocation.submit_at = allocation.start_at = allocation.end_at = allocation.active_at = None
    allocation.nodes, allocation.agents = [], {}
    allocation.asked_at = allocation.wanted_at = allocation.gone_by = allocation.end_code = None
    allocation.left_at = None
    allocation.warned, allocation.told_to_end, allocation.missing, allocation.unseen_at = False, False, 0, None
