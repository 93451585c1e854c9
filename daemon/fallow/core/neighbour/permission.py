"""May we harvest here at all? Our waiting requests must come after everybody else's, and others' must be seen. Pure.

Weights and order: slurm.conf(5), priority_multifactor and sched_config of Slurm's documentation. `--nice` lowers the
priority by its value; a multifactor priority is at most the sum of the site's weights, so a nice above that sum puts a
job behind all others. That holds for factors between 0 and 1: not where the site leaves some of them as they are
(PriorityFlags NO_NORMAL_*: a raw number times the weight) or has a plugin add to them (PrioritySiteFactorPlugin).
Slurm makes 1 of all that is less, so with somebody's job whose factors are all 0 (a new one, where age alone counts) a
request is on a par, and of equals the older goes first: at the next poll `core.neighbour` withdraws the request.
Priority tiers of partitions come before priorities, so no nice helps against them.
"""

from __future__ import annotations

from collections.abc import Collection

from fallow.core.states import ON_NODES
from fallow.model import ClusterConfig, ClusterState, JobInfo, NodeInfo, PartitionInfo

MAX_NICE = 2_147_483_645
"""The most that sbatch takes (NICE_OFFSET - 3)."""

BASIC_NICE = 1000
"""Under priority/basic every new job gets one less than the one before, so this many later jobs still come first."""

_RAW = {
    "NO_NORMAL_ASSOC": "Assoc",
    "NO_NORMAL_PART": "Partition",
    "NO_NORMAL_QOS": "QOS",
    "NO_NORMAL_TRES": "TRES",
}
"""Flag -> weight whose factor it leaves as the raw number."""

LOOKS = 3
"""Polls in a row that show a node in use by nobody before we believe it: queries and jobs may cross."""


def needed_nice(config: ClusterConfig) -> int | None:
    """The least `--nice` that puts a job behind everybody else's; None: none does."""
    if "multifactor" not in config.priority_type:
        return BASIC_NICE
    if _unbounded(config):
        return None
    total = sum(config.priority_weights.values())
    # Without weights all have the same priority, and the older job goes first.
    return total + 1 if 0 < total < MAX_NICE else None


def _unbounded(config: ClusterConfig) -> str:
    """What makes priorities larger than the sum of the weights, in words; empty: nothing."""
    if config.site_factor:
        return f"{config.site_factor} adds to priorities"
    weighted = {name.partition(" ")[0] for name in config.priority_weights}
    # Some versions of Slurm print NO_NORMAL_ALL for any one of them (src/api/config_info.c).
    raw = {_RAW[flag] for flag in config.priority_flags if flag in _RAW}
    if "NO_NORMAL_ALL" in config.priority_flags:
        raw.update(_RAW.values())
    if names := sorted(raw & weighted):
        return f"PriorityFlags leaves the factor of {', '.join(names)} without a bound"
    return ""


def nice_for(config: ClusterConfig | None, wanted: int) -> int:
    """What to submit with: what the configuration says, or more where the site's weights need it."""
    needed = None if config is None else needed_nice(config)
    return wanted if needed is None else min(MAX_NICE, max(wanted, needed))


def unfair(config: ClusterConfig, partition: PartitionInfo, others: Collection[PartitionInfo]) -> str:
    """Why our requests in a partition could come before others' jobs, in words; empty if they cannot."""
    if needed_nice(config) is None:
        total = sum(config.priority_weights.values())
        why = f"weights add up to {total}" if total else "no weights are set, so the older job goes first"
        why = _unbounded(config) or why
        return f"no --nice puts a request behind others' jobs ({config.priority_type}: {why})"
    nodes = set(partition.nodes)
    lower = [
        other.partition
        for other in others
        if other.up and other.priority_tier < partition.priority_tier and not nodes.isdisjoint(other.nodes)
    ]
    if lower:
        return f"its requests would come before all jobs of {', '.join(sorted(lower))}, whose priority tier is lower"
    return ""


def too_small_for(partition: PartitionInfo) -> str:
    """Why Slurm would take no request of ours there, each being for one node; empty if it would."""
    return f"its jobs have {partition.min_nodes} nodes at least, a request has one" if partition.min_nodes > 1 else ""


def refusals(
    cluster: ClusterState, config: ClusterConfig | None, *, unseen: bool, allow_unseen: bool, allow_unfair: bool
) -> dict[str, str]:
    """Partitions that must not be harvested, with the reason. Where Slurm preempts our jobs, only what it refuses; if
    it does so on some nodes only, what speaks against the others.

    Args:
        cluster: one poll.
        config: None: not known yet.
        unseen: others' jobs cannot be seen.
        allow_unseen, allow_unfair: what the site's administrators allow (`[site]`).
    """
    found: dict[str, str] = {}
    for partition in cluster.partitions:
        if why := too_small_for(partition):
            found[partition.partition] = why
        if why or (partition.preempts and not partition.unpreempted):
            continue
        why = "" if config is None or allow_unfair else unfair(config, partition, cluster.partitions)
        if unseen and not allow_unseen:
            why = "others' jobs cannot be seen, and nothing would take a node from us for them"
        if why:
            where = "on nodes where nobody preempts its jobs: " if partition.preempts else ""
            found[partition.partition] = f"{where}{why}"
    return found


def at_first_sight(
    cluster: ClusterState, config: ClusterConfig, *, allow_unseen: bool, allow_unfair: bool
) -> dict[str, str]:
    """`refusals` for who has seen one poll only: what the site says about hidden jobs must do."""
    unseen = Visibility().look(cluster, config)
    return refusals(cluster, config, unseen=unseen, allow_unseen=allow_unseen, allow_unfair=allow_unfair)


def in_use_by_nobody(cluster: ClusterState) -> frozenset[str]:
    """Nodes that are in use though no job is shown on them: somebody's jobs are hidden from us."""
    in_use = [n for n in cluster.nodes if n.state in ("ALLOCATED", "MIXED") and "COMPLETING" not in n.flags]
    shown = set[str]().union(*[job.nodes for job in cluster.jobs if job.state in ON_NODES])
    return frozenset([n.node for n in in_use if n.node not in shown])


class Visibility:
    """Whether others' jobs can be seen: what the site says (PrivateData), and what the polls show."""

    def __init__(self) -> None:
        self._streak: dict[str, int] = {}
        self._nodes: list[NodeInfo] = []
        self._jobs: list[JobInfo] = []
        "of the last poll"
        self._found = frozenset[str]()
        "what `in_use_by_nobody` made of them"

    def look(self, cluster: ClusterState, config: ClusterConfig | None) -> bool:
        """Take in a poll; True: others' jobs are hidden, some of them at least."""
        found = self._in_use_by_nobody(cluster)
        self._streak = {node: self._streak.get(node, 0) + 1 for node in found}
        hidden = config is not None and "jobs" in config.private_data
        return hidden or any(count >= LOOKS for count in self._streak.values())

    def _in_use_by_nobody(self, cluster: ClusterState) -> frozenset[str]:
        """The same lists of nodes and jobs have the same ones."""
        if cluster.nodes is not self._nodes or cluster.jobs is not self._jobs:
            self._nodes, self._jobs, self._found = cluster.nodes, cluster.jobs, in_use_by_nobody(cluster)
        return self._found
