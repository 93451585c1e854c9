"""Would Slurm itself take a node from a job of ours for somebody else? Pure.

`scontrol show partition` tells how a partition's jobs would be preempted, not whether anybody may: one without a
PreemptMode of its own shows the cluster's (Slurm's src/api/partition_info.c). So a poll is put right when it comes in,
and `PartitionInfo.preempts` is true for every reader. Nodes of such a partition that are in none whose jobs may are
its `unpreempted` ones. Who may: slurm.conf(5), PreemptType and PreemptMode. Where jobs
are safe at first (PreemptExemptTime there and in sacctmgr(1)), others would have to wait for us: that is no preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fallow.model import ClusterConfig, ClusterState, PartitionInfo

ENDS = ("CANCEL", "REQUEUE")
"""Modes that free a node; a suspended job keeps its memory and its GPUs."""


def as_for_us(cluster: ClusterState, site: ClusterConfig | None, qos: str | None) -> ClusterState:
    """The poll, with `preempt_mode` OFF in every partition where nobody could preempt a harvest job, and `unpreempted`
    where somebody could on some nodes only.

    Where QOS decide, with their mode and grace: a partition's own count for nothing then, not even PreemptMode=OFF
    (slurm.conf(5); tried on 22.05).

    Doing it twice changes nothing.

    Args:
        cluster: as the client read it.
        site: None: not known yet, so nothing is believed to preempt; nor while its accounting has not answered.
        qos: of every harvest job (`[harvest] qos`); None: whatever the user's own jobs have.
    """
    partitions = [_put_right(p, cluster.partitions, site, qos) for p in cluster.partitions]
    return msgspec.structs.replace(cluster, partitions=partitions)


def _put_right(
    partition: PartitionInfo, partitions: Sequence[PartitionInfo], site: ClusterConfig | None, qos: str | None
) -> PartitionInfo:
    taken = frozenset[str]() if site is None else _preempted(partition, partitions, site, qos)
    if site is None or not taken:
        off = {"preempt_mode": "OFF"} if partition.preempts else {}
        return msgspec.structs.replace(partition, unpreempted=frozenset(), **off)
    partition = msgspec.structs.replace(partition, unpreempted=frozenset(partition.nodes) - taken)
    if qos is None or site.preempt_type != "preempt/qos":
        return partition
    name = qos.lower()
    return msgspec.structs.replace(
        partition,
        preempt_mode=site.qos_preempt_modes[name],
        grace_s=site.qos_grace_s.get(name, 0.0),
        preempted_by=site.qos_preempted_by.get(name, []),
    )


def preemptable_qos(site: ClusterConfig, qos: str | None) -> bool:
    """May jobs of another QOS end those of this one?"""
    # Slurm's accounting keeps names in lower case.
    return qos is not None and site.qos_preempt_modes.get(qos.lower()) in ENDS


def exempt_s(site: ClusterConfig, qos: str | None, partition_qos: str = "") -> float:
    """For how long at most harvest jobs are safe after their start. A QOS's own value goes before the cluster's.

    Args:
        site: where it all stands.
        qos: of every harvest job; None: whatever the user's own jobs have, so the longest of all counts.
        partition_qos: of the partition that they are in.
    """
    if qos is None:
        return max(site.preempt_exempt_s, *site.qos_exempt_s.values(), 0.0)
    own = [site.qos_exempt_s[name] for name in (qos.lower(), partition_qos.lower()) if name in site.qos_exempt_s]
    return max(own, default=site.preempt_exempt_s)


def _preempted(
    partition: PartitionInfo, partitions: Sequence[PartitionInfo], site: ClusterConfig, qos: str | None
) -> frozenset[str]:
    """Nodes of the partition on which somebody may preempt a harvest job of it."""
    if site.qos_unknown or exempt_s(site, qos, partition.qos) > 0.0:
        return frozenset()
    those = [p for p in partitions if p.up and not p.root_only]
    if site.preempt_type == "preempt/qos":
        if qos is None or not preemptable_qos(site, qos):
            return frozenset()
        by = site.qos_preempted_by.get(qos.lower(), [])
        those = [p for p in those if any(_admits(p, name) for name in by)]
    elif site.preempt_type == "preempt/partition_prio" and partition.preempts:
        those = [p for p in those if p.priority_tier > partition.priority_tier]
    else:
        return frozenset()
    return frozenset(partition.nodes).intersection(node for p in those for node in p.nodes)


def _admits(partition: PartitionInfo, qos: str) -> bool:
    """May jobs of this QOS run in the partition? Who is named by AllowQos need not fear DenyQos (slurm.conf(5))."""
    if partition.allow_qos:
        return qos in (name.lower() for name in partition.allow_qos)
    return qos not in (name.lower() for name in partition.deny_qos)
