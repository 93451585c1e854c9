"""Limits of harvesting: what the head's owner and the site allow, and what a run can use. Pure."""

from collections.abc import Mapping
from math import ceil

import msgspec
from msgspec.structs import replace

from fallow.core.accounting.backoff import Asker
from fallow.core.kinds import Kind, is_open_to
from fallow.core.neighbour.permission import too_small_for
from fallow.core.neighbour.waiting import LOOKED_AT, UNKNOWN, numbers, site_rules
from fallow.core.planning.knowledge import Experience, RunClass
from fallow.core.planning.share import Worth
from fallow.model import ClusterConfig, ClusterState, PartitionInfo

NOT_TAKEN_BACK = "Slurm would not preempt our jobs for others, and [harvest] allow_without_preemption is off"


class HarvestRules(msgspec.Struct, frozen=True):
    """What the owner of the head and the site allow."""

    partitions: tuple[str, ...] = ()
    "that may be harvested; empty: every partition whose jobs can be preempted"
    allow_without_preemption: bool = False
    refusals: Mapping[str, str] = {}
    """partition -> why it must not be harvested, whatever the configuration says. If Slurm preempts its jobs on some
    nodes only, the reason concerns the other nodes."""
    stop_reason: str = ""
    "why nothing may be harvested at all; empty: harvesting is on"
    groups: frozenset[str] | None = None
    "Unix groups of the owner, for partitions with AllowGroups; None: unknown"
    max_pending: int = 4
    "number of requests for idle nodes that may wait at once; requests older than `start_patience_s` do not count"
    max_waiting: int = 1 << 30
    "number of all requests that may wait at once"
    max_nodes: int | None = None
    partition_nodes: Mapping[str, int] = {}
    "partition -> most nodes held or requested"
    max_minutes: int = 120
    min_minutes: int = 2
    pending_patience_s: float = 600.0
    "a request that Slurm has not started after this time is withdrawn"
    start_patience_s: float = 90.0
    "a request that waits longer beside an idle node asks for too much time"
    margin_s: float = 20.0
    "time between leaving a node and its walltime"
    slack_s: float = 0.0
    "a request is shorter than its hole by this: it waits for a cycle of backfill, which rounds times"
    lead_s: float = 0.0
    "time before a node's end at which an idle node is requested in its place; 0: never"
    whole_nodes: bool = True
    "the site does not share nodes between jobs"
    max_ahead: int = 0
    """number of requests that may wait for nodes in use: Slurm starts them in the moment a node is idle. Only in
    partitions where Slurm preempts us: somebody else may come a moment later"""


class Demand(msgspec.Struct, frozen=True):
    """What one run could use."""

    run: str
    nodes: int
    "number of nodes that it wants besides those it holds or has requested; below 0: it has too many"
    partitions: tuple[str, ...] = ()
    min_minutes: int = 2
    excluded_nodes: frozenset[str] = frozenset()
    "nodes that the run excludes"
    budget_node_s: float | None = None
    "node-seconds that may still be reserved; None: no budget"
    kind: Kind = Kind()
    asker: Asker = Asker()
    can_renew: bool = True
    "replace nodes that are near the end of their time limit by idle ones"
    worth: Worth | None = None
    "worth of nodes to the run; None: speed grows in proportion to nodes"

    @property
    def run_class(self) -> RunClass:
        return RunClass(self.kind, self.partitions, self.asker, self.excluded_nodes)


def harvestable_partitions(cluster: ClusterState, rules: HarvestRules) -> list[PartitionInfo]:
    """Partitions that may be harvested, without the nodes that may not. Lowest priority tier first, since all others'
    jobs precede ours there."""
    partitions = [
        _open(partition, rules) for partition in cluster.partitions if not why_not_harvested(partition, rules)
    ]
    return sorted(partitions, key=lambda p: (not p.preempts, p.priority_tier, p.partition))


def why_not_harvested(partition: PartitionInfo, rules: HarvestRules) -> str:
    """Why a partition must not be harvested; empty: it may be."""
    if rules.stop_reason:
        return rules.stop_reason
    if not partition.up:
        return "the partition is down"
    if not is_open_to(partition, rules.groups):
        return "the partition is open to other groups only"
    if rules.partitions and partition.partition not in rules.partitions:
        return "the configuration does not name the partition"
    if why := too_small_for(partition):
        return why
    if partition.preempts:
        return ""
    return rules.refusals.get(partition.partition) or ("" if rules.allow_without_preemption else NOT_TAKEN_BACK)


def unharvestable_nodes(partition: PartitionInfo, rules: HarvestRules) -> frozenset[str]:
    """Nodes of a harvestable partition that must not be harvested, since Slurm would not preempt us there."""
    open_too = rules.allow_without_preemption and partition.partition not in rules.refusals
    return frozenset() if open_too or not partition.preempts else partition.unpreempted


def _open(partition: PartitionInfo, rules: HarvestRules) -> PartitionInfo:
    closed = unharvestable_nodes(partition, rules)
    return replace(partition, nodes=[n for n in partition.nodes if n not in closed]) if closed else partition


def most_minutes(partition: PartitionInfo, rules: HarvestRules) -> int:
    """Return the longest time limit, in minutes, of a request in a partition."""
    limit_s = partition.max_time_s
    return rules.max_minutes if limit_s is None else min(rules.max_minutes, int(limit_s // 60))


# -- limits at this moment ----------------------------------------------------------------------------------

MIN_AHEAD = 2
"""Fewest requests that may wait for nodes in use. More may wait if more nodes fell idle together lately: the nodes of a
large job would stay idle until the next poll. At most half of all requests, since idle nodes come first. At most half
of the jobs that backfill looks at, since each takes its time."""

RESOLUTION_S = 60.0
"""Slurm's default of bf_resolution, the resolution of times in backfill's plan (slurm.conf(5))."""

MIN_PENDING = 4
"""Fewest requests that may wait at once, however short the poll interval; most of normal priority for one run."""

LIMITS_UNKNOWN = 8
"""Most requests that wait while the limits of an accounting site are unknown. Few sites have a MaxSubmitJobs below
twice this number."""


def current_rules(
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
    """Return the rules with everything that depends on the site and on recent polls.

    Args:
        configured: the configuration, with `refusals` and `stopped`.
        site: Slurm's configuration; None: not known yet.
        experience: for the duration of starts.
        now: Unix time.
        interval_s: present time from one poll to the next.
        max_pending, poll_interval_s, submits_per_min: as configured.
        limits_known: True once the limits of the owner's accounts and QOS are known.
    """
    site, usual = site or UNKNOWN, 1 << 30 if max_pending is None else max_pending
    backfill_s, parameters = site.backfill_interval_s, site.scheduler_parameters
    # Half of the jobs that backfill looks at for one user, in a partition and in all; the user's jobs need the rest.
    most = at_once = min(usual, _half(r"bf_max_job_(?:user|assoc|user_part)=(\d+)", parameters))
    waiting = min(usual, _half(r"bf_max_job_(?:user|assoc)=(\d+)", parameters))
    if max_pending is None:
        waiting = min(waiting, LIMITS_UNKNOWN) if site.accounting and not limits_known else waiting
        # Ask for idle nodes as fast as submissions are allowed. A request waits for a cycle of backfill, and then for
        # the poll that shows its start.
        at_once = min(most, max(MIN_PENDING, round(submits_per_min * (interval_s + backfill_s) / 60.0)))
    # Jobs of all users together that backfill looks at in a cycle, in a partition or in all.
    looked_at = _least(r"bf_max_job_(?:test|part)=(\d+)", parameters, LOOKED_AT)
    resolution_s = next(iter(numbers(r"(?:^|,)bf_resolution=(\d+)", parameters)), RESOLUTION_S)
    start_s = experience.start_s(now)
    return replace(
        configured,
        max_pending=at_once,
        max_waiting=waiting,
        # A job that trains for less time than it takes to start is a burden to the site. If starts take longer than any
        # job may last, the longest jobs are still requested: their starts show when starts become fast again.
        min_minutes=max(configured.min_minutes, min(configured.max_minutes, ceil(2.0 * start_s / 60.0))),
        start_patience_s=3 * poll_interval_s + 2 * backfill_s,
        slack_s=resolution_s + backfill_s,
        # Two polls may pass before a request is a job, which then has to start.
        lead_s=configured.margin_s + 2 * poll_interval_s + experience.wait_s(now) + start_s,
        whole_nodes=site_rules(site).whole_nodes,
        max_ahead=min(max(MIN_AHEAD, round(experience.arrivals_per_poll(now))), looked_at // 2, most // 2),
    )


def _half(pattern: str, parameters: str) -> int:
    return max(1, _least(pattern, parameters, 2 << 30) // 2)


def _least(pattern: str, parameters: str, otherwise: int) -> int:
    """The lowest number that is not 0 (0 means no limit)."""
    return min(filter(None, numbers(pattern, parameters)), default=otherwise)
