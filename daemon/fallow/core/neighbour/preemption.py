"""Whether Slurm itself would take a node from a job of ours for somebody else. Pure.

`scontrol show partition` shows how a partition's jobs would be preempted, not whether any job may preempt them: a
partition without a PreemptMode shows the cluster's (Slurm's src/api/partition_info.c). So `as_for_us` corrects each
poll, and every reader can rely on `PartitionInfo.preempts`. Which jobs may preempt: slurm.conf(5), PreemptType and
PreemptMode. Jobs with a PreemptExemptTime (slurm.conf(5), sacctmgr(1)) count as not preempted: others would wait.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from fallow.core.neighbour.waiting import Waiting
from fallow.model import ClusterConfig, ClusterState, JobInfo, PartitionInfo

ENDS = ("CANCEL", "REQUEUE")
"""Modes that free a node. A suspended job keeps its memory and its GPUs."""


class Preemption:
    """The jobs for which Slurm preempts ours. Args: partitions: of a poll that `as_for_us` has corrected."""

    def __init__(self, partitions: Sequence[PartitionInfo]) -> None:
        self.partitions = {p.partition: p for p in partitions}
        self.nodes = {p.partition: frozenset(p.nodes) for p in partitions}

    def takes(self, partition: str, job: Waiting, node: str | None = None) -> bool:
        """Return True if Slurm takes `node`, or any node, from a job of ours in this partition for this job.

        The job needs a higher tier or, under preempt/qos, a QOS that may preempt ours.
        """
        our_partition = self.partitions.get(partition)
        if our_partition is None or not our_partition.preempts or node in our_partition.unpreempted:
            return False
        if our_partition.preempted_by is not None:
            return all(each.qos.lower() in our_partition.preempted_by for each in job.jobs)
        job_partitions = [(each, self.partitions.get(name)) for each in job.jobs for name in each.partition.split(",")]
        higher = [
            p
            for each, p in job_partitions
            if p is not None and p.priority_tier > our_partition.priority_tier and admits(p, each)
        ]
        return any(node is None or node in self.nodes[p.partition] for p in higher)


def admits(partition: PartitionInfo, job: JobInfo) -> bool:
    """Return True if the job is within the partition's limits. Slurm considers no other partitions of the job."""
    too_long = partition.max_time_s is not None and (job.time_limit_s or 0.0) > partition.max_time_s
    too_wide = partition.max_nodes is not None and job.num_nodes > partition.max_nodes
    needs_reservation = partition.requires_reservation and not job.reservation
    return partition.up and not too_long and not too_wide and not needs_reservation


def as_for_us(cluster: ClusterState, site: ClusterConfig | None, qos: str | None) -> ClusterState:
    """Return the poll with `preempt_mode` OFF in partitions where nobody could preempt a harvest job, and with the
    nodes in `unpreempted` where somebody could on some nodes only. Doing it twice changes nothing.

    Under preempt/qos, mode and grace of the QOS replace the partition's, even PreemptMode=OFF (slurm.conf(5); tried on
    22.05).

    Args:
        cluster: as the client read it.
        site: of the cluster; None: not known yet. Without it or its QOS, nothing counts as preempting.
        qos: of every harvest job (`[harvest] qos`); None: the default of the user's jobs.
    """
    partitions = [_correct_partition(p, cluster.partitions, site, qos) for p in cluster.partitions]
    return replace(cluster, partitions=partitions)


def _correct_partition(
    partition: PartitionInfo, partitions: Sequence[PartitionInfo], site: ClusterConfig | None, qos: str | None
) -> PartitionInfo:
    preemptable_nodes = frozenset[str]() if site is None else _preempted_nodes(partition, partitions, site, qos)
    if site is None or not preemptable_nodes:
        mode = "OFF" if partition.preempts else partition.preempt_mode
        return replace(partition, unpreempted=frozenset(), preempt_mode=mode)
    partition = replace(partition, unpreempted=frozenset(partition.nodes) - preemptable_nodes)
    if qos is None or site.preempt_type != "preempt/qos":
        return partition
    name = qos.lower()
    mode, by = site.qos_preempt_modes[name], site.qos_preempted_by.get(name, [])
    return replace(partition, preempt_mode=mode, grace_s=site.qos_grace_s.get(name, 0.0), preempted_by=by)


def preemptable_qos(site: ClusterConfig, qos: str | None) -> bool:
    """Return True if jobs of another QOS may end those of this one."""
    # Slurm's accounting keeps names in lower case.
    return qos is not None and site.qos_preempt_modes.get(qos.lower()) in ENDS


def exempt_s(site: ClusterConfig, qos: str | None, partition_qos: str = "") -> float:
    """Return the longest time after a start in which a harvest job is safe. A QOS's value precedes the cluster's.

    Args:
        site: the configuration.
        qos: of every harvest job; None: the default of the user's jobs, so the longest time of all QOS counts.
        partition_qos: QOS of the jobs' partition.
    """
    if qos is None:
        return max(site.preempt_exempt_s, *site.qos_exempt_s.values(), 0.0)
    own = [site.qos_exempt_s[name] for name in (qos.lower(), partition_qos.lower()) if name in site.qos_exempt_s]
    return max(own, default=site.preempt_exempt_s)


def _preempted_nodes(
    partition: PartitionInfo, partitions: Sequence[PartitionInfo], site: ClusterConfig, qos: str | None
) -> frozenset[str]:
    """Nodes of the partition on which somebody may preempt a harvest job of it."""
    if site.qos_unknown or exempt_s(site, qos, partition.qos) > 0.0:
        return frozenset()
    open_to_users = [p for p in partitions if p.up and not p.root_only]
    if site.preempt_type == "preempt/qos" and qos is not None and preemptable_qos(site, qos):
        by = site.qos_preempted_by.get(qos.lower(), [])
        preempting = [p for p in open_to_users if any(_admits(p, name) for name in by)]
    elif site.preempt_type == "preempt/partition_prio" and partition.preempts:
        preempting = [p for p in open_to_users if p.priority_tier > partition.priority_tier]
    else:
        return frozenset()
    return frozenset(partition.nodes).intersection(node for p in preempting for node in p.nodes)


def _admits(partition: PartitionInfo, qos: str) -> bool:
    """Return True if jobs of this QOS may run in the partition. AllowQos precedes DenyQos (slurm.conf(5))."""
    if partition.allow_qos:
        return qos in (name.lower() for name in partition.allow_qos)
    return qos not in (name.lower() for name in partition.deny_qos)
