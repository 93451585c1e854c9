"""Pending jobs of others that a free node could start, in Slurm's order, and how a site's Slurm treats them. Pure."""

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
"""Reasons of pending jobs that a free node could start (`schedule` and `select_nodes` in Slurm's src/slurmctld). Those
in the second and third line name nodes that a job in a partition of a higher tier waits for, too. Backfill may give
these nodes to the lower job all the same; `needs` works out whether they are ours. From 26.05 on the plugins of
topologies (tree, block ...) have sentences of their own in the place of Resources."""

_OF_ONE_PARTITION = frozenset(("PartitionTimeLimit", "PartitionNodeLimit", "PartitionDown", "PartitionInactive"))
"""Of a job in several partitions the last one to say such a thing is shown; it may start in the others all the same."""

PICKS_UP = "harvest"
"""Word in the comment of a job that was made to pick up an idle node, beside its token. Its name says so, too: a site's
job_submit plugin may write comments of its own."""


class Waiting(msgspec.Struct, frozen=True):
    """A job of somebody else, or all components of a heterogeneous one, which start together."""

    jobs: tuple[JobInfo, ...]
    startable: int = 1
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
    """Return the names of the partitions that these jobs wait for."""
    return {name for job in jobs for name in job.partition.split(",")}


def nodes_for(cluster: ClusterState, jobs: Iterable[JobInfo]) -> frozenset[str]:
    """Return the nodes of the partitions that these jobs wait for."""
    names = partitions_of(jobs)
    return frozenset(node for p in cluster.partitions if p.partition in names for node in p.nodes)


@lru_cache(maxsize=1024)
def wants_nodes(reason: str) -> bool:
    """Return True if a pending job with this reason waits for nothing but nodes. Cached: thousands have the same."""
    return _WANTING.fullmatch(reason.strip("()").replace("_", " ")) is not None


def waits_for_nodes(job: JobInfo) -> bool:
    """Return True if a pending job waits for nothing but nodes, in one of its partitions at least."""
    return wants_nodes(job.reason) or ("," in job.partition and job.reason.strip("()") in _OF_ONE_PARTITION)


def is_ours(job: JobInfo, tokens: Collection[str]) -> bool:
    """Return True if the job carries one of our tokens, as its name or in its comment (base jobs keep their names)."""
    return job.name in tokens or (job.comment != "" and any(word in tokens for word in job.comment.split()))


def picks_up(job: JobInfo) -> bool:
    """Return True if a head, anybody's, made this job to pick up an idle node.

    Such a job comes after everybody else's and is given up for any of them. So nobody gives a node back for it: two
    heads would take turns. Slurm decides which head gets an idle node.
    """
    if not job.name.startswith(PREFIX):
        return False
    words = job.comment.split()
    return names_harvest(job.name) or (job.name in words and PICKS_UP in words)


def others_waiting(cluster: ClusterState, tokens: Collection[str]) -> list[Waiting]:
    """Return the pending jobs that a free node could start, in Slurm's order, without ours and other heads' requests.

    Args:
        cluster: one poll.
        tokens: of our own allocations.
    """
    groups: dict[str, list[JobInfo]] = {}
    for job in [job for job in cluster.jobs if job.state == "PENDING"]:
        if not is_ours(job, tokens) and not picks_up(job):
            groups.setdefault(job.het_job_id or job.job_id, []).append(job)
    if not groups:
        return []
    tiers = {p.partition: p.priority_tier for p in cluster.partitions}
    running = running_elements(cluster.jobs)
    found = [
        Waiting(tuple(sorted(jobs, key=lambda job: _number(job.job_id))), elements)
        for jobs in groups.values()
        if _wanting(jobs, cluster.at) and (elements := startable(jobs[0], running)) > 0
    ]

    def order(waiting: Waiting) -> tuple[float, ...]:
        tier = max(tiers.get(name, 0) for name in waiting.partitions)
        return (-tier, *min(map(turn, waiting.jobs)))

    return sorted(found, key=order)


def _wanting(jobs: list[JobInfo], now: float) -> bool:
    """Return True if it waits for nodes alone. Slurm gives only some components of a heterogeneous job a reason."""
    early = any(job.eligible_at is not None and job.eligible_at > now for job in jobs)
    other = [job.reason for job in jobs if not waits_for_nodes(job)]
    return len(other) < len(jobs) and not {reason.strip("()") for reason in other} - {"None", ""} and not early


def startable(job: JobInfo, running: Mapping[str, int]) -> int:
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
    """Return how many elements of each job array have their nodes."""
    found: dict[str, int] = {}
    for job in jobs:
        if job.array_job_id and job.state in ON_NODES:
            found[job.array_job_id] = found.get(job.array_job_id, 0) + 1
    return found


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
    """What decides within a partition: Slurm looks first at the job whose turn is the least."""
    return (-job.priority, job.submit_at or 0.0, _number(job.job_id))


def _number(job_id: str) -> float:
    match = re.match(r"\d+", job_id)
    return float(match[0]) if match else 0.0


# -- what the site's slurm.conf says -------------------------------------------------------------------------------

UNKNOWN = ClusterConfig(cluster="", slurm_version="")
"""Stands for a configuration that Slurm has not told yet: its own defaults, without shared nodes."""

LOOKED_AT = 500
"""Slurm's own default of bf_max_job_test."""

LOOKS_AGAIN_S = 60.0
"""Slurm looks at the whole queue this often at the least, whatever backfill does (sched_interval)."""


@lru_cache(maxsize=64)
def numbers(pattern: str, parameters: str) -> tuple[int, ...]:
    """Those behind some words of SchedulerParameters, in their order; kept, for every plan asks for the same.

    Args:
        pattern: regular expression with one group, the number.
        parameters: as Slurm shows them (https://slurm.schedmd.com/slurm.conf.html#OPT_SchedulerParameters).
    """
    return tuple(int(number) for number in re.findall(pattern, parameters))


@dataclass(frozen=True, slots=True)
class SiteRules:
    """How this Slurm treats jobs that wait. The defaults are Slurm's own, with shared nodes."""

    whole_nodes: bool = False
    "every job gets whole nodes"
    looked_at: int = LOOKED_AT
    "so many waiting jobs are looked at in each partition"
    looks_again_s: float = LOOKS_AGAIN_S
    "from one look of Slurm at a job to the next, at the most"
    preempts_again_s: float = 30.0 + 10.0 + LOOKS_AGAIN_S
    "a job for which Slurm has preempted others has it do so again only after this time, whatever became of the nodes"


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
