"""For how long others' jobs waited because a node was still ours (DESIGN section 6: `others_delayed`). Pure.

A job is delayed from the moment in which it could have started without us until our last node that it needed is free;
after that it waits for Slurm's next cycle, as it would have without us. Between two polls nobody knows the moment: the
earlier poll counts, unless Slurm says that it came later or that our job ended before the later poll.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import islice
from math import ceil, log

import msgspec

from fallow.core.states import ENDED_STATES, ENDING, ON_NODES
from fallow.model import ClusterState, DelayReport, JobInfo

KEPT = 1000
"""As many of the last delayed jobs are remembered one by one; of those before, how many waited about how long."""

CLASS = 1.1
"""Longest wait of a class of waits, in terms of the class below it."""


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


class Past(msgspec.Struct, kw_only=True):
    """Waits of jobs that are no longer remembered one by one."""

    max_s: float = 0.0
    classes: dict[int, int] = {}
    "n -> jobs that waited for `CLASS` ** (n-1) to `CLASS` ** n seconds"

    def add(self, waited_s: float) -> None:
        if waited_s > 0:
            self.max_s = max(self.max_s, waited_s)
            number = ceil(log(waited_s) / log(CLASS))
            self.classes[number] = self.classes.get(number, 0) + 1

    def waits(self) -> list[tuple[float, int]]:
        """(seconds that they waited at most, jobs)"""
        return [(min(self.max_s, CLASS**number), jobs) for number, jobs in self.classes.items()]


class Delays(msgspec.Struct, kw_only=True, dict=True):
    """All of them, for as long as the head's store lives."""

    jobs: dict[str, DelayedJob] = {}
    past: Past = msgspec.field(default_factory=Past)
    polled_at: float | None = None
    "Unix time of the last poll; not known to a head that has just come back"

    @cached_property
    def _waiting(self) -> dict[str, DelayedJob]:
        """Those that wait still: few of all that are remembered."""
        return {job_id: job for job_id, job in self.jobs.items() if job.tokens}

    def note(self, cluster: ClusterState, delayed: Mapping[str, frozenset[str]]) -> list[DelayedJob]:
        """Take in a poll; returns the jobs whose waiting for us is over.

        Args:
            cluster: the poll.
            delayed: job -> tokens of ours whose nodes it needs to start (`Standing.delayed`).
        """
        before, self.polled_at = self.polled_at, cluster.at
        over = [job for job_id, job in self._waiting.items() if job_id not in delayed]
        if not delayed and not over:
            return []
        known = {job.job_id: job for job in cluster.jobs}
        for job_id, tokens in delayed.items():
            known_job = self.jobs.get(job_id)
            if known_job is None or not known_job.tokens:
                known_job = self._begin(known.get(job_id), job_id, cluster.at, before)
            known_job.tokens = sorted(tokens.union(known_job.tokens))
            known_job.seen_at = cluster.at
        over_states = ENDED_STATES | ENDING
        ends = {job.name: job.end_at for job in cluster.jobs if job.state in over_states} if over else {}
        for job in over:
            # Slurm's times are whole seconds, cut off.
            end = max(job.seen_at, _end(job, known.get(job.job_id), ends, cluster.at))
            job.waited_s += max(0.0, end - job.since)
            job.tokens = []
            del self._waiting[job.job_id]
        too_many = max(0, len(self.jobs) - KEPT)
        for job_id in list(islice((job_id for job_id, job in self.jobs.items() if not job.tokens), too_many)):
            self.past.add(self.jobs.pop(job_id).waited_s)
        return over

    def _begin(self, job: JobInfo | None, job_id: str, at: float, before: float | None) -> DelayedJob:
        times = [t for t in (None if job is None else job.submit_at, None if job is None else job.eligible_at) if t]
        since = min(at, max([at if before is None else before, *times]))
        found = self.jobs.pop(job_id, None) or DelayedJob(job_id=job_id, user="" if job is None else job.user, since=at)
        found.since = since
        self.jobs[job_id] = self._waiting[job_id] = found
        return found

    def report(self, at: float) -> DelayReport:
        """Args: at: Unix time; those that wait still count with what they have waited until then."""
        waits = [job.waited_s + (max(0.0, at - job.since) if job.tokens else 0.0) for job in self.jobs.values()]
        groups = sorted([(wait, 1) for wait in waits if wait > 0] + self.past.waits())
        total = sum(jobs for _, jobs in groups)
        p95_s, rank = 0.0, 0
        for wait, jobs in groups:
            if rank < ceil(0.95 * total):
                p95_s = wait
            rank += jobs
        return DelayReport(jobs=total, p95_s=p95_s, max_s=max([self.past.max_s, *waits]))


def _end(delayed: DelayedJob, job: JobInfo | None, ends: Mapping[str, float | None], at: float) -> float:
    """When its waiting for us was over: it started, or the last of our nodes was free."""
    if job is not None and job.state in ON_NODES | ENDED_STATES and job.start_at is not None:
        return min(at, job.start_at)
    ours = [ends.get(token) for token in delayed.tokens]
    known = [end for end in ours if end is not None]
    return min(at, max(known)) if known and len(known) == len(ours) else at
