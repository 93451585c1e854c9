"""Which partitions we may harvest: our requests must come after all others' jobs, and we must see these. Pure.

`--nice` lowers a job's priority by its value. A multifactor priority is at most the sum of the site's weights, so a
nice above that sum puts a job behind all others (slurm.conf(5); priority_multifactor of Slurm's documentation). This
holds for factors between 0 and 1. It fails where a site leaves factors unscaled (PriorityFlags NO_NORMAL_*) or adds a
factor by a plugin (PrioritySiteFactorPlugin). Slurm raises lower priorities to 1. So a request may equal a new job
whose factors are all 0, and precede it because it is older: the next poll withdraws the request (`needs`).
Priority tiers of partitions precede priorities, so no nice helps against a tier.
"""

from collections.abc import Collection

from fallow.core.states import ON_NODES
from fallow.model import ClusterConfig, ClusterState, PartitionInfo

MAX_NICE = 2_147_483_645
"""Largest nice that sbatch takes (NICE_OFFSET - 3)."""

BASIC_NICE = 1000
"""Under priority/basic every new job gets one less than the one before, so this many later jobs still come first."""

LOOKS = 3
"""Number of polls in a row that must show a node in use without a job: a job may start between two queries."""

_UNBOUNDED_FLAGS = {
    "NO_NORMAL_ASSOC": "Assoc",
    "NO_NORMAL_PART": "Partition",
    "NO_NORMAL_QOS": "QOS",
    "NO_NORMAL_TRES": "TRES",
}
"""Flag -> weight whose factor it leaves as the raw number."""


def needed_nice(config: ClusterConfig) -> int | None:
    """Return the least `--nice` that puts a job behind all others' jobs; None: no nice does."""
    if "multifactor" not in config.priority_type:
        return BASIC_NICE
    if _why_unbounded(config):
        return None
    total = sum(config.priority_weights.values())
    # Without weights all have the same priority, and the older job goes first.
    return total + 1 if 0 < total < MAX_NICE else None


def _why_unbounded(config: ClusterConfig) -> str:
    """What makes priorities larger than the sum of the weights; empty: nothing."""
    if config.site_factor:
        return f"{config.site_factor} adds to priorities"
    weighted = {name.partition(" ")[0] for name in config.priority_weights}
    # Some versions of Slurm print NO_NORMAL_ALL for any one of them (src/api/config_info.c).
    flags = _UNBOUNDED_FLAGS if "NO_NORMAL_ALL" in config.priority_flags else config.priority_flags
    raw = {_UNBOUNDED_FLAGS[flag] for flag in flags if flag in _UNBOUNDED_FLAGS}
    names = ", ".join(sorted(raw & weighted))
    return f"PriorityFlags leaves the factor of {names} without a bound" if names else ""


def nice_for(config: ClusterConfig | None, configured: int) -> int:
    """Return the nice to submit with: as configured, or more where the site's weights need it."""
    least = None if config is None else needed_nice(config)
    return configured if least is None else min(MAX_NICE, max(configured, least))


def too_small_for(partition: PartitionInfo) -> str:
    """Why the partition takes no one-node jobs, as our requests are; empty: it takes them."""
    return (
        f"its jobs need at least {partition.min_nodes} nodes, and a request has one" if partition.min_nodes > 1 else ""
    )


def refusals(
    cluster: ClusterState, config: ClusterConfig | None, *, are_jobs_hidden: bool, allow_unfair: bool
) -> dict[str, str]:
    """Return the partitions that must not be harvested, with the reason.

    Where Slurm preempts our jobs, the only reason is that it would refuse our requests. If Slurm preempts on some nodes
    only, the reason concerns the other nodes.

    Args:
        cluster: one poll.
        config: of the site; None: not known yet.
        are_jobs_hidden: others' jobs are hidden (`Visibility`), and the site's administrators do not allow that.
        allow_unfair: the administrators allow that our requests come before others' jobs (`[site]`).
    """
    reasons: dict[str, str] = {}
    for partition in cluster.partitions:
        why = too_small_for(partition)
        if not why and (not partition.preempts or partition.unpreempted):
            if are_jobs_hidden:
                why = "others' jobs cannot be seen, and Slurm would not preempt ours for them"
            elif config is not None and not allow_unfair:
                why = _why_unfair(config, partition, cluster.partitions)
            if why and partition.preempts:
                why = f"on nodes where nobody preempts its jobs: {why}"
        if why:
            reasons[partition.partition] = why
    return reasons


def _why_unfair(config: ClusterConfig, partition: PartitionInfo, partitions: Collection[PartitionInfo]) -> str:
    """Why our requests in a partition could come before others' jobs; empty: they cannot."""
    if needed_nice(config) is None:
        total = sum(config.priority_weights.values())
        weights = f"weights add up to {total}" if total else "no weights are set, so the older job goes first"
        why = _why_unbounded(config) or weights
        return f"no --nice puts a request behind others' jobs ({config.priority_type}: {why})"
    nodes = set(partition.nodes)
    below = (p for p in partitions if p.up and p.priority_tier < partition.priority_tier)
    names = ", ".join(sorted(p.partition for p in below if not nodes.isdisjoint(p.nodes)))
    return f"its requests would come before all jobs of {names}, whose priority tier is lower" if names else ""


class Visibility:
    """Finds out whether others' jobs are hidden, from the configuration (PrivateData) and from polls."""

    def __init__(self) -> None:
        self._polls: dict[str, int] = {}
        "node in use on which no job is shown -> polls in a row"

    def look(self, cluster: ClusterState, config: ClusterConfig | None) -> bool:
        """Take in a poll; return True if some of others' jobs are hidden."""
        nodes_with_jobs = {node for job in cluster.jobs if job.state in ON_NODES for node in job.nodes}
        in_use = (n.node for n in cluster.nodes if n.state in ("ALLOCATED", "MIXED") and "COMPLETING" not in n.flags)
        self._polls = {node: self._polls.get(node, 0) + 1 for node in in_use if node not in nodes_with_jobs}
        hidden = config is not None and "jobs" in config.private_data
        return hidden or any(polls >= LOOKS for polls in self._polls.values())
