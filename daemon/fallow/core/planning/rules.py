"""What may be asked for, and for whom: what the owner of the head allows, and what Slurm and time allow of it. Pure."""

from collections.abc import Mapping
from math import ceil

import msgspec
from msgspec.structs import replace

from fallow.core.accounting.backoff import Asker
from fallow.core.kinds import Kind, open_to
from fallow.core.neighbour.permission import too_small_for
from fallow.core.neighbour.waiting import LOOKED_AT, UNKNOWN, numbers, site_rules
from fallow.core.planning.known import Experience, RunClass
from fallow.core.planning.share import Worth
from fallow.model import ClusterConfig, ClusterState, PartitionInfo

NOT_TAKEN_BACK = "Slurm would not take it back for others, and [harvest] allow_without_preemption is off"


class HarvestRules(msgspec.Struct, frozen=True):
    """What the owner of the head (or the site) allows."""

    partitions: tuple[str, ...] = ()
    "may be harvested; empty: every partition whose jobs can be preempted"
    allow_without_preemption: bool = False
    refused: Mapping[str, str] = {}
    """partition -> why it must not be harvested whatever the configuration says; where its jobs are preempted on some
    nodes only, why the others must not"""
    stopped: str = ""
    "why nothing may be harvested anywhere; empty: it may be"
    groups: frozenset[str] | None = None
    "of the owner, for partitions that are open to some groups only; None: not known"
    max_pending: int = 4
    "requests for idle nodes that may wait at once; those that have for long do not count"
    max_waiting: int = 1 << 30
    "requests that may wait in all"
    max_nodes: int | None = None
    partition_nodes: Mapping[str, int] = {}
    "at most so many nodes held or asked for in a partition"
    max_minutes: int = 120
    min_minutes: int = 2
    pending_patience_s: float = 600.0
    "a request that Slurm did not start for this long is withdrawn"
    start_patience_s: float = 90.0
    "a request that has not started after so long, with idle nodes for it, asks for too much time"
    margin_s: float = 20.0
    "nodes are left so long before their walltime"
    slack_s: float = 0.0
    "a request is so much shorter than its hole: it waits for a cycle of backfill, whose plan rounds times"
    lead_s: float = 0.0
    "nodes are replaced by idle ones so long before their end; 0: not before"
    whole_nodes: bool = True
    "the site does not share nodes between jobs"
    ahead: int = 0
    """So many requests may wait for nodes that others still have: Slurm starts them in the moment a node is idle.
    Never where nothing preempts: we might have the node a moment before somebody else comes."""


class Demand(msgspec.Struct, frozen=True):
    """What one run could use."""

    run: str
    nodes: int
    "more nodes than it holds or has asked for"
    partitions: tuple[str, ...] = ()
    min_minutes: int = 2
    barred: frozenset[str] = frozenset()
    "nodes that it does without"
    budget_node_s: float | None = None
    "what may still be reserved; None: no budget"
    kind: Kind = Kind()
    asker: Asker = Asker()
    renew: bool = True
    "replace nodes whose time is nearly over by idle ones"
    worth: Worth | None = None
    "of nodes to it; None: twice as many are worth twice as much"

    @property
    def run_class(self) -> RunClass:
        return RunClass(self.kind, self.partitions, self.asker, self.barred)


def harvestable(cluster: ClusterState, rules: HarvestRules) -> list[PartitionInfo]:
    """Partitions that may be harvested, without nodes that may not: lowest priority tier first, since those are the
    kindest to others."""
    allowed = [_open(partition, rules) for partition in cluster.partitions if not not_harvested(partition, rules)]
    return sorted(allowed, key=lambda p: (not p.preempts, p.priority_tier, p.partition))


def not_harvested(partition: PartitionInfo, rules: HarvestRules) -> str:
    """Why nothing may be asked for in a partition, in words; empty: it may be harvested."""
    if rules.stopped:
        return rules.stopped
    if not partition.up:
        return "the partition is down"
    if not open_to(partition, rules.groups):
        return "the partition is open to other groups only"
    if rules.partitions and partition.partition not in rules.partitions:
        return "the configuration does not name the partition"
    if why := too_small_for(partition):
        return why
    if partition.preempts:
        return ""
    return rules.refused.get(partition.partition) or ("" if rules.allow_without_preemption else NOT_TAKEN_BACK)


def off_limits(partition: PartitionInfo, rules: HarvestRules) -> frozenset[str]:
    """Nodes of a partition that may be harvested for which that is not so: nobody would take them back for others."""
    open_too = rules.allow_without_preemption and partition.partition not in rules.refused
    return frozenset() if open_too or not partition.preempts else partition.unpreempted


def _open(partition: PartitionInfo, rules: HarvestRules) -> PartitionInfo:
    closed = off_limits(partition, rules)
    return replace(partition, nodes=[n for n in partition.nodes if n not in closed]) if closed else partition


def most_minutes(partition: PartitionInfo, rules: HarvestRules) -> int:
    """Return for how long a node may be asked for in a partition."""
    limit_s = partition.max_time_s
    return rules.max_minutes if limit_s is None else min(rules.max_minutes, int(limit_s // 60))


# -- how much may be asked for now ----------------------------------------------------------------------------------

AHEAD = 2
"""So many requests at least wait for nodes which others still have, and as many as nodes came at once of late: what a
large job leaves is lost until the next poll but for these. No more than half of those that may wait at all: what is
idle comes first. And no more than half of all jobs that backfill looks at: they come last, but take their time."""

RESOLUTION_S = 60.0
"""Of the times in backfill's plan, unless bf_resolution says otherwise (slurm.conf(5))."""

FEW = 4
"""As many requests may wait at once however often is polled, and no more of normal priority for one run."""

LIMITS_UNKNOWN = 8
"""As many requests wait at most where jobs are accounted for and Slurm has not told the limits: sites seldom let a user
submit fewer jobs than twice as many (MaxSubmitJobs)."""


def allowed_now(
    configured: HarvestRules,
    site: ClusterConfig | None,
    experience: Experience,
    now: float,
    interval_s: float,
    *,
    max_pending: int | None = None,
    poll_interval_s: float = 30.0,
    submits_per_min: float = 120.0,
    limits_known: bool = True,
) -> HarvestRules:
    """What may be asked for now.

    Args:
        configured: what the configuration says, and what others' jobs forbid; all else is worked out here.
        site: None: Slurm has not told its configuration yet.
        experience: says how long starts take.
        now: Unix time.
        interval_s: from one poll to the next, as things are.
        max_pending, poll_interval_s, submits_per_min: as configured.
        limits_known: Slurm has told the limits of the owner's accounts and QOS.
    """
    site, usual = site or UNKNOWN, 1 << 30 if max_pending is None else max_pending
    backfill_s, parameters = site.backfill_interval_s, site.scheduler_parameters
    # In a partition, and in all: half of the jobs that backfill looks at for one user, whose own ones need the others.
    most = at_once = min(usual, _half(r"bf_max_job_(?:user|assoc|user_part)=(\d+)", parameters))
    waiting = min(usual, _half(r"bf_max_job_(?:user|assoc)=(\d+)", parameters))
    if max_pending is None:
        waiting = min(waiting, LIMITS_UNKNOWN) if site.accounting and not limits_known else waiting
        # However many fall idle, they are asked for as fast as may be. One waits until Slurm has looked, and then until
        # a poll shows that it started; what counted polls alone let a sixth through where polls come every 5 s.
        at_once = min(most, max(FEW, round(submits_per_min * (interval_s + backfill_s) / 60.0)))
    # Jobs of all users together that backfill looks at in a cycle, in a partition or in all.
    looked_at = _least(r"bf_max_job_(?:test|part)=(\d+)", parameters, LOOKED_AT)
    resolution_s = next(iter(numbers(r"(?:^|,)bf_resolution=(\d+)", parameters)), RESOLUTION_S)
    start_s = experience.start_s(now)
    return replace(
        configured,
        max_pending=at_once,
        max_waiting=waiting,
        # A job that trains for less than it takes to begin is a burden to the site. Where nodes take longer to begin
        # than any job may last, the longest are asked for: were there none, nobody would see that it is over.
        min_minutes=max(configured.min_minutes, min(configured.max_minutes, ceil(2.0 * start_s / 60.0))),
        start_patience_s=3 * poll_interval_s + 2 * backfill_s,
        slack_s=resolution_s + backfill_s,
        # Two polls may pass before a wish is a job, and then it has to start.
        lead_s=configured.margin_s + 2 * poll_interval_s + experience.wait_s(now) + start_s,
        whole_nodes=site_rules(site).whole_nodes,
        ahead=min(max(AHEAD, round(experience.at_once(now))), looked_at // 2, most // 2),
    )


def _half(pattern: str, parameters: str) -> int:
    return max(1, _least(pattern, parameters, 2 << 30) // 2)


def _least(pattern: str, parameters: str, otherwise: int) -> int:
    """The lowest of them that is not 0, which means no limit."""
    return min(filter(None, numbers(pattern, parameters)), default=otherwise)
