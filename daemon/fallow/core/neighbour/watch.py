"""From poll to poll: when the next comes, for which jobs nodes are kept no more, and how long others waited. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from fallow.core.neighbour.needs import ExternalDemand
from fallow.core.quantile import quantile
from fallow.core.states import ENDED_STATES, ENDING, ON_NODES
from fallow.model import ClusterState, DelayReport, JobInfo

LEAVE_S = 3.5
"""From seeing that somebody waits until workers that have not left are killed; their node must be idle after 6 s."""

END_S = 1.5
"""From then until the job is cancelled, too."""

WATCHFUL_S, LONGEST_WATCHFUL_S = 5.0, 15.0
"""Polls are at most so far apart while we hold nodes that nobody but us would give back, and while they get no
answer."""

CYCLES = 3
"""Slurm has looked at a job so often without starting it before we believe that it will not."""

AGAIN = 10
"""A job is passed over for so many times as long as it took to find out."""


def poll_interval_s(
    usual: float, *, watchful: bool, alert: bool = False, least: float = 0.0, failures: int = 0
) -> float:
    """From the begin of one poll to that of the next.

    Args:
        usual: as configured.
        watchful: others' jobs may wait for what only we give back.
        alert: Slurm has just taken a node from us, or a run trains for the first time.
        least: what Slurm's load allows for; a tenth of the polls that are wanted come in any case.
        failures: polls in a row without an answer; each doubles the interval.
    """
    wanted = min(usual, WATCHFUL_S) if watchful or alert else usual
    longest = LONGEST_WATCHFUL_S if watchful else 10 * usual
    possible = min(max(wanted, least), 10 * wanted)
    return max(possible, min(possible * 2.0 ** min(failures, 4), longest))


@dataclass(frozen=True, slots=True)
class Memory:
    """Which jobs could have started in earlier polls, and did not."""

    at: float = 0.0
    "Unix time of the last poll"
    offered: Mapping[tuple[str, str], float] = field(default_factory=dict)
    "(job, node) -> Unix time since which the job could start there"
    passed_over: Mapping[str, float] = field(default_factory=dict)
    "job that does not start -> Unix time until which nothing is kept free or given back for it"


def remember(memory: Memory, at: float, demand: ExternalDemand, looks_again_s: float) -> Memory:
    """Add a poll to the memory.

    A poll does not show all that keeps a job from starting: licences, excluded nodes before 24.05, another head that is
    dead. So nodes are kept for a job until Slurm has looked at it `CYCLES` times, and then not for `AGAIN` times as
    long.
    """
    # While nobody saw anything, Slurm may have been away.
    away_s = max(0.0, at - memory.at - looks_again_s)
    before = {pair: since + away_s for pair, since in memory.offered.items()}
    pairs = ((job.job_id, node) for job, nodes in demand.offers for node in nodes)
    offered = {pair: before.get(pair, at) for pair in pairs}
    patience_s = CYCLES * looks_again_s
    passed_over = {job: until for job, until in memory.passed_over.items() if until > at}
    passed_over |= {job: at + AGAIN * patience_s for (job, _), since in offered.items() if at - since >= patience_s}
    return Memory(at, offered, passed_over)


# -- for how long others' jobs waited because a node was still ours (DESIGN section 6: `others_delayed`) -------------

KEPT = 1000
"""As many of the last delayed jobs are remembered one by one."""


class DelayedJob(msgspec.Struct, kw_only=True):
    """A job of somebody else that waited for a node of ours, once or several times."""

    job_id: str
    user: str
    since: float
    "Unix time from which it could have started"
    seen_at: float = 0.0
    "of the last poll in which it waited for us"
    waited_s: float = 0.0
    tokens: list[str] = []
    "of ours, whose nodes it needs; empty once it waits for us no more"


class Delays(msgspec.Struct, kw_only=True):
    """All of them, for as long as the head's store lives.

    A job is delayed from the moment in which it could have started without us until our last node that it needs is
    free. After that it waits for Slurm's next cycle, as it would have without us. Nobody knows what happened between
    two polls: the earlier poll counts, unless Slurm says that the job came later, or that our job ended before the
    later poll.
    """

    jobs: dict[str, DelayedJob] = {}
    forgotten: int = 0
    "delayed jobs that are no longer remembered one by one"
    longest_s: float = 0.0
    "the longest wait of those"
    polled_at: float | None = None
    "Unix time of the last poll; not known to a head that has just come back"

    def note(self, cluster: ClusterState, delayed: Mapping[str, frozenset[str]]) -> list[DelayedJob]:
        """Take in a poll; return the jobs whose waiting for us is over.

        Args:
            cluster: the poll.
            delayed: `ExternalDemand.delayed_jobs`.
        """
        before, self.polled_at = self.polled_at, cluster.at
        over = [job for job in self.jobs.values() if job.tokens and job.job_id not in delayed]
        if not delayed and not over:
            return []
        shown = {job.job_id: job for job in cluster.jobs}
        for job_id, tokens in delayed.items():
            job = self.jobs.get(job_id)
            if job is None or not job.tokens:
                job = self._begin(shown.get(job_id), job_id, cluster.at, before)
            job.tokens, job.seen_at = sorted(tokens.union(job.tokens)), cluster.at
        ends = {job.name: job.end_at for job in cluster.jobs if job.state in ENDED_STATES | ENDING}
        for job in over:
            # Slurm's times are whole seconds, cut off.
            end = max(job.seen_at, _end(job, shown.get(job.job_id), ends, cluster.at))
            job.waited_s += max(0.0, end - job.since)
            job.tokens = []
        done = [job for job in self.jobs.values() if not job.tokens]
        for job in done[: max(0, len(self.jobs) - KEPT)]:
            del self.jobs[job.job_id]
            self.forgotten += job.waited_s > 0
            self.longest_s = max(self.longest_s, job.waited_s)
        return over

    def _begin(self, job: JobInfo | None, job_id: str, at: float, before: float | None) -> DelayedJob:
        times = [at if before is None else before]
        times += [] if job is None else [t for t in (job.submit_at, job.eligible_at) if t]
        found = self.jobs.pop(job_id, None) or DelayedJob(job_id=job_id, user="" if job is None else job.user, since=at)
        found.since = min(at, max(times))
        self.jobs[job_id] = found
        return found

    def report(self, at: float) -> DelayReport:
        """Count the delayed jobs; the 95th percentile is of those that are remembered one by one.

        Args:
            at: Unix time; jobs that still wait count with what they have waited until then.
        """
        all_s = (job.waited_s + (max(0.0, at - job.since) if job.tokens else 0.0) for job in self.jobs.values())
        waits_s = [wait_s for wait_s in all_s if wait_s > 0]
        p95_s, max_s = quantile(waits_s, 0.95) or 0.0, max([self.longest_s, *waits_s])
        return DelayReport(jobs=self.forgotten + len(waits_s), p95_s=p95_s, max_s=max_s)


def _end(delayed: DelayedJob, job: JobInfo | None, ends: Mapping[str, float | None], at: float) -> float:
    """When its waiting for us was over: it started, or the last of our nodes was free."""
    if job is not None and job.state in ON_NODES | ENDED_STATES and job.start_at is not None:
        return min(at, job.start_at)
    ours = [ends.get(token) for token in delayed.tokens]
    known = [end for end in ours if end is not None]
    return min(at, max(known)) if known and len(known) == len(ours) else at
