"""State between polls: the poll interval, jobs that do not start anyway, and delays of others' jobs. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from fallow.core.neighbour.needs import ExternalDemand
from fallow.core.quantile import quantile
from fallow.core.states import ENDED_STATES, ENDING, ON_NODES
from fallow.model import ClusterState, DelayReport, JobInfo

LEAVE_S = 3.5
"""Time from seeing that somebody waits until remaining workers are killed; the node must be idle after 6 s."""

END_S = 1.5
"""Time from that kill until the job is cancelled."""

WATCHFUL_S, LONGEST_WATCHFUL_S = 5.0, 15.0
"""Longest poll interval while we hold nodes that only we give back: while polls succeed, and while they fail."""

CYCLES = 3
"""Number of looks of Slurm at a job without a start after which we believe that it will not start."""

PASS_OVER_FACTOR = 10
"""A job is passed over for this many times the time that it took to find out."""


def poll_interval_s(
    usual: float, *, watchful: bool, alert: bool = False, least: float = 0.0, failures: int = 0
) -> float:
    """Return the time from the start of one poll to the start of the next.

    Args:
        usual: configured interval.
        watchful: others' jobs may wait for nodes that only we give back.
        alert: Slurm has just taken a node from us, or a run trains for the first time.
        least: shortest interval that Slurm's load allows; at most ten times the wanted interval is used.
        failures: polls in a row without an answer; each doubles the interval.
    """
    target_s = min(usual, WATCHFUL_S) if watchful or alert else usual
    longest = LONGEST_WATCHFUL_S if watchful else 10 * usual
    possible = min(max(target_s, least), 10 * target_s)
    return max(possible, min(possible * 2.0 ** min(failures, 4), longest))


@dataclass(frozen=True, slots=True)
class Memory:
    """Jobs that could have started in earlier polls and did not."""

    at: float = 0.0
    "Unix time of the last poll"
    offered: Mapping[tuple[str, str], float] = field(default_factory=dict)
    "(job, node) -> Unix time since which the job could start on the node"
    passed_over: Mapping[str, float] = field(default_factory=dict)
    "job that does not start -> Unix time until which no node is kept free or given back for it"


def remember(memory: Memory, at: float, demand: ExternalDemand, looks_again_s: float) -> Memory:
    """Add a poll to the memory.

    A poll does not show everything that keeps a job from starting: licences, excluded nodes before 24.05, another head
    that is dead. So nodes are kept for a job until Slurm has looked at it `CYCLES` times. Then the job is passed over
    for `PASS_OVER_FACTOR` times as long.
    """
    # Slurm may have been down while no poll came.
    away_s = max(0.0, at - memory.at - looks_again_s)
    before = {pair: since + away_s for pair, since in memory.offered.items()}
    pairs = ((job.job_id, node) for job, nodes in demand.offers for node in nodes)
    offered = {pair: before.get(pair, at) for pair in pairs}
    patience_s = CYCLES * looks_again_s
    passed_over = {job: until for job, until in memory.passed_over.items() if until > at}
    passed_over |= {
        job: at + PASS_OVER_FACTOR * patience_s for (job, _), since in offered.items() if at - since >= patience_s
    }
    return Memory(at, offered, passed_over)


# -- delays of others' jobs by nodes of ours (DESIGN section 6: `others_delayed`) -------------------------------------

MAX_JOBS = 1000
"""Number of last delayed jobs that are remembered one by one."""


class DelayedJob(msgspec.Struct, kw_only=True):
    """A job of another user that waited for a node of ours, once or several times."""

    job_id: str
    user: str
    since: float
    "Unix time from which it could have started"
    seen_at: float = 0.0
    "of the last poll in which it waited for us"
    waited_s: float = 0.0
    tokens: list[str] = []
    "our tokens whose nodes it needs; empty once it no longer waits for us"


class Delays(msgspec.Struct, kw_only=True):
    """All delays of others' jobs, for as long as the head's store lives.

    A job is delayed from the moment in which it could have started without us until our last node that it needs is
    free. Then it waits for Slurm's next cycle, as it would without us. Between two polls the earlier one counts, unless
    Slurm shows that the job came later, or that our job ended before the later poll.
    """

    jobs: dict[str, DelayedJob] = {}
    forgotten: int = 0
    "number of delayed jobs that are no longer in `jobs`"
    longest_s: float = 0.0
    "longest wait of the forgotten jobs"
    polled_at: float | None = None
    "Unix time of the last poll; None: the head has just started"

    def note(self, cluster: ClusterState, delayed: Mapping[str, frozenset[str]]) -> list[DelayedJob]:
        """Take in a poll; return the jobs whose waiting for us is over.

        Args:
            cluster: the poll.
            delayed: `ExternalDemand.delayed_jobs`.
        """
        last_poll_at, self.polled_at = self.polled_at, cluster.at
        freed_jobs = [job for job in self.jobs.values() if job.tokens and job.job_id not in delayed]
        if not delayed and not freed_jobs:
            return []
        jobs_by_id = {job.job_id: job for job in cluster.jobs}
        for job_id, tokens in delayed.items():
            job = self.jobs.get(job_id)
            if job is None or not job.tokens:
                job = self._begin(jobs_by_id.get(job_id), job_id, cluster.at, last_poll_at)
            job.tokens, job.seen_at = sorted(tokens.union(job.tokens)), cluster.at
        ends = {job.name: job.end_at for job in cluster.jobs if job.state in ENDED_STATES | ENDING}
        for job in freed_jobs:
            # Slurm cuts off parts of seconds.
            end = max(job.seen_at, _end(job, jobs_by_id.get(job.job_id), ends, cluster.at))
            job.waited_s += max(0.0, end - job.since)
            job.tokens = []
        finished_jobs = [job for job in self.jobs.values() if not job.tokens]
        for job in finished_jobs[: max(0, len(self.jobs) - MAX_JOBS)]:
            del self.jobs[job.job_id]
            self.forgotten += job.waited_s > 0
            self.longest_s = max(self.longest_s, job.waited_s)
        return freed_jobs

    def _begin(self, job: JobInfo | None, job_id: str, at: float, last_poll_at: float | None) -> DelayedJob:
        times = [at if last_poll_at is None else last_poll_at]
        times += [] if job is None else [t for t in (job.submit_at, job.eligible_at) if t]
        delayed = self.jobs.pop(job_id, None) or DelayedJob(
            job_id=job_id, user="" if job is None else job.user, since=at
        )
        delayed.since = min(at, max(times))
        self.jobs[job_id] = delayed
        return delayed

    def report(self, at: float) -> DelayReport:
        """Count the delayed jobs. The 95th percentile is that of the jobs in `jobs`.

        Args:
            at: Unix time until which the wait of jobs that still wait counts.
        """
        all_s = (job.waited_s + (max(0.0, at - job.since) if job.tokens else 0.0) for job in self.jobs.values())
        waits_s = [wait_s for wait_s in all_s if wait_s > 0]
        p95_s, max_s = quantile(waits_s, 0.95) or 0.0, max([self.longest_s, *waits_s])
        return DelayReport(jobs=self.forgotten + len(waits_s), p95_s=p95_s, max_s=max_s)


def _end(delayed: DelayedJob, job: JobInfo | None, ends: Mapping[str, float | None], at: float) -> float:
    """Unix time at which the delay ended: the job started, or our last node was free."""
    if job is not None and job.state in ON_NODES | ENDED_STATES and job.start_at is not None:
        return min(at, job.start_at)
    end_times = [ends.get(token) for token in delayed.tokens]
    known_ends = [end for end in end_times if end is not None]
    return min(at, max(known_ends)) if known_ends and len(known_ends) == len(end_times) else at
