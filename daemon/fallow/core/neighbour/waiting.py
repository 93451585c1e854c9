"""Pending jobs of others that would start on a free node, in Slurm's order, and how Slurm treats them. Pure."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from fallow.core.states import ON_NODES
from fallow.core.tokens import PREFIX, names_harvest
from fallow.model import ClusterConfig, ClusterState, JobInfo

_WANTING = re.compile(
    r"(Resources|Priority)(,.*)?"
    r"|Nodes required for job are DOWN, DRAINED(, REBOOTING)? or reserved for jobs in higher priority partitions"
    r"|ReqNodeNotAvail(, May be reserved for other job|, UnavailableNodes:.*)?"
    r"|.*[Tt]opology.*|Weight-based selection could not satisfy.*"
)
"""Reasons of pending jobs that would start on a free node (`schedule` and `select_nodes` in Slurm's src/slurmctld). The
second and third line also mean nodes for which a job of a higher tier waits. Backfill may still give these nodes to
the lower job; `needs` works out whether they are ours. From 26.05 on, topology plugins (tree, block ...)
show sentences of their own instead of Resources."""

_OF_ONE_PARTITION = frozenset(("PartitionTimeLimit", "PartitionNodeLimit", "PartitionDown", "PartitionInactive"))
"""Reasons that concern one of a job's partitions. Slurm shows only the last one; the job may start in the others."""

PICKS_UP = "harvest"
"""Word in the comment of a harvest job, beside its token. The job's name shows it, too, since a job_submit plugin may
replace comments."""


class Waiting(msgspec.Struct, frozen=True):
    """A job of another user, or all components of a heterogeneous job, which start together."""

    jobs: tuple[JobInfo, ...]
    startable_elements: int = 1
    "elements of a job array that its own limit lets start now"

    @property
    def job_id(self) -> str:
        return self.jobs[0].het_job_id or self.jobs[0].job_id

    @property
    def user(self) -> str:
        return self.jobs[0].user

    @property
    def partitions(self) -> set[str]:
        return partitions_of(self.jobs)


def partitions_of(jobs: Iterable[JobInfo]) -> set[str]:
    """Return the names of the partitions in which these jobs wait."""
    return {name for job in jobs for name in job.partition.split(",")}


def nodes_for(cluster: ClusterState, jobs: Iterable[JobInfo]) -> frozenset[str]:
    """Return the nodes of the partitions in which these jobs wait."""
    names = partitions_of(jobs)
    return frozenset(node for p in cluster.partitions if p.partition in names for node in p.nodes)


@lru_cache(maxsize=1024)
def wants_nodes(reason: str) -> bool:
    """Return True if a pending job with this reason waits for nodes only. Cached: thousands of jobs share a reason."""
    return _WANTING.fullmatch(reason.strip("()").replace("_", " ")) is not None


def waits_for_nodes(job: JobInfo) -> bool:
    """Return True if a pending job waits for nodes only, in at least one of its partitions."""
    return wants_nodes(job.reason) or ("," in job.partition and job.reason.strip("()") in _OF_ONE_PARTITION)


def is_ours(job: JobInfo, tokens: Collection[str]) -> bool:
    """Return True if the job carries one of our tokens, as its name or in its comment (base jobs keep their names)."""
    return job.name in tokens or (job.comment != "" and any(word in tokens for word in job.comment.split()))


def picks_up(job: JobInfo) -> bool:
    """Return True for a harvest job, of any user's head.

    A harvest job comes after all other jobs and is given up for any of them. So no head gives a node back for another
    head's harvest job: the two would take turns. Slurm decides which head gets an idle node.
    """
    if not job.name.startswith(PREFIX):
        return False
    words = job.comment.split()
    return names_harvest(job.name) or (job.name in words and PICKS_UP in words)


def others_waiting(cluster: ClusterState, tokens: Collection[str]) -> list[Waiting]:
    """Return others' pending jobs that would start on a free node, in Slurm's order, without harvest jobs.

    Args:
        cluster: one poll.
        tokens: of our allocations.
    """
    groups: dict[str, list[JobInfo]] = {}
    for job in [job for job in cluster.jobs if job.state == "PENDING"]:
        if not is_ours(job, tokens) and not picks_up(job):
            groups.setdefault(job.het_job_id or job.job_id, []).append(job)
    if not groups:
        return []
    tiers = {p.partition: p.priority_tier for p in cluster.partitions}
    running = running_elements(cluster.jobs)
    queue = [
        Waiting(tuple(sorted(jobs, key=lambda job: _number(job.job_id))), elements)
        for jobs in groups.values()
        if _wanting(jobs, cluster.at) and (elements := startable_elements(jobs[0], running)) > 0
    ]

    def order(waiting: Waiting) -> tuple[float, ...]:
        tier = max(tiers.get(name, 0) for name in waiting.partitions)
        return (-tier, *min(map(turn, waiting.jobs)))

    return sorted(queue, key=order)


def _wanting(jobs: list[JobInfo], now: float) -> bool:
    """Return True if a job waits for nodes only. Slurm shows no reason for some components of a job."""
    early = any(job.eligible_at is not None and job.eligible_at > now for job in jobs)
    other = [job.reason for job in jobs if not waits_for_nodes(job)]
    return len(other) < len(jobs) and not {reason.strip("()") for reason in other} - {"None", ""} and not early


def startable_elements(job: JobInfo, running: Mapping[str, int]) -> int:
    """Return how many elements of a job array its own limit lets start now; 1 for any other job.

    Args:
        job: pending.
        running: `running_elements`.
    """
    if not job.array_tasks:
        return 1
    waiting, at_once = array_elements(job.array_tasks)
    return waiting if at_once is None else min(waiting, at_once - running.get(job.array_job_id, 0))


def running_elements(jobs: Iterable[JobInfo]) -> dict[str, int]:
    """Job array -> number of its elements that are on nodes."""
    counts: dict[str, int] = {}
    for job in jobs:
        if job.array_job_id and job.state in ON_NODES:
            counts[job.array_job_id] = counts.get(job.array_job_id, 0) + 1
    return counts


def array_elements(text: str) -> tuple[int, int | None]:
    """Parse `1-9:2,12%3`: the number of elements, and how many may run at once (None: all). Lists may be cut off."""
    listed, _, limit = text.strip("[]").partition("%")
    count = 0
    for item in listed.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?(?::(\d+))?", item.strip())
        if match is not None:
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            count += max(0, (last - first) // max(step, 1) + 1)
    return max(count, 1), int(limit) if limit.isdigit() and int(limit) > 0 else None


def turn(job: JobInfo) -> tuple[float, ...]:
    """Sort key of a job within a partition: Slurm looks at the least key first."""
    return (-job.priority, job.submit_at or 0.0, _number(job.job_id))


def _number(job_id: str) -> float:
    match = re.match(r"\d+", job_id)
    return float(match[0]) if match else 0.0


# -- slurm.conf of the site -------------------------------------------------------------------------------

UNKNOWN = ClusterConfig(cluster="", slurm_version="")
"""Stands for a configuration that is not known yet: Slurm's defaults, without shared nodes."""

LOOKED_AT = 500
"""Slurm's default of bf_max_job_test."""

LOOKS_AGAIN_S = 60.0
"""Longest time between two looks of Slurm at the whole queue, whatever backfill does (sched_interval)."""


@lru_cache(maxsize=64)
def numbers(pattern: str, parameters: str) -> tuple[int, ...]:
    """Return the numbers of some options in SchedulerParameters, in order. Cached: every plan asks for them.

    Args:
        pattern: regular expression with one group, the number.
        parameters: as Slurm shows them (https://slurm.schedmd.com/slurm.conf.html#OPT_SchedulerParameters).
    """
    return tuple(int(number) for number in re.findall(pattern, parameters))


@dataclass(frozen=True, slots=True)
class SiteRules:
    """How this Slurm treats waiting jobs. The defaults are Slurm's, with shared nodes."""

    whole_nodes: bool = False
    "every job gets whole nodes"
    looked_at: int = LOOKED_AT
    "number of waiting jobs that Slurm looks at in each partition"
    looks_again_s: float = LOOKS_AGAIN_S
    "longest time between two looks of Slurm at a job"
    preempts_again_s: float = 30.0 + 10.0 + LOOKS_AGAIN_S
    "time after which Slurm preempts again for the same job, whatever became of the nodes"


def site_rules(config: ClusterConfig) -> SiteRules:
    """Read the site's configuration.

    Only cons_tres and cons_res share nodes between jobs. Backfill sleeps for bf_interval after a cycle, which lasts up
    to bf_max_time (as long as bf_interval, if that is not set: https://slurm.schedmd.com/slurm.conf.html). For
    `preempts_again_s` see `select_nodes` in Slurm's src/slurmctld/node_scheduler.c; tried on 22.05.
    """
    most_jobs = numbers(r"(?:^|,)bf_max_job_test=(\d+)", config.scheduler_parameters)
    max_time_s = numbers(r"(?:^|,)bf_max_time=(\d+)", config.scheduler_parameters)
    cycle_s = config.backfill_interval_s + (max_time_s[0] if max_time_s else config.backfill_interval_s)
    return SiteRules(
        whole_nodes="cons_" not in config.select_type,
        looked_at=max((LOOKED_AT, *most_jobs[:1])),
        looks_again_s=max(LOOKS_AGAIN_S, cycle_s),
        preempts_again_s=config.kill_wait_s + config.message_timeout_s + LOOKS_AGAIN_S,
    )
