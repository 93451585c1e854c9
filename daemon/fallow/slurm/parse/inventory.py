"""Nodes, partitions, reservations: `scontrol -o -d show`."""

import re
from collections.abc import Mapping

from fallow.model import NodeInfo, PartitionInfo, ReservationInfo
from fallow.slurm.parse.values import (
    count,
    duration,
    gpu_types,
    names,
    node_state,
    nodes,
    other_gres,
    preempt_mode,
    unix_time,
    word,
)


def cluster(text: str) -> tuple[list[NodeInfo], list[PartitionInfo], list[ReservationInfo]]:
    """Output of `scontrol -o -d` for `show node`, `show partition` and `show reservation`, in any order.

    Other lines ("No reservations in the system") are ignored.
    """
    node_infos, partitions, reservations = [], [], []
    for line in text.splitlines():
        # Built without readline, scontrol prints its prompt and the answer in one line.
        line = line.strip().removeprefix("scontrol: ")
        if line.startswith("NodeName="):
            node_infos.append(node(_values(line)))
        elif line.startswith("PartitionName="):
            partitions.append(partition(_values(line)))
        elif line.startswith("ReservationName="):
            reservations += reservation(_values(line))
    return node_infos, partitions, reservations


def _values(line: str) -> dict[str, str]:
    """Words `Key=value` of a line, the first of each key. The keys used here stand before any free text."""
    values: dict[str, str] = {}
    for item in line.split():
        key, mark, value = item.partition("=")
        if mark:
            values.setdefault(key, value)
    return values


def node(row: Mapping[str, str]) -> NodeInfo:
    """A node from the words of `scontrol -o -d show node`. Any word may be missing."""
    state, flags = node_state(row.get("State", ""))
    gres_used = row.get("GresUsed", "")
    return NodeInfo(
        node=row.get("NodeName", ""),
        state=state,
        flags=flags,
        partitions=names(row.get("Partitions", "")),
        arch=word(row.get("Arch", "")),
        # No job gets what the system reserves (CoreSpecCount, MemSpecLimit). CPUEfctv exists since 22.05.
        cpus=count(row.get("CPUEfctv", "")) or count(row.get("CPUTot", "")),
        cpus_used=count(row.get("CPUAlloc", "")),
        memory_mb=max(0, count(row.get("RealMemory", "")) - count(row.get("MemSpecLimit", ""))),
        memory_used_mb=count(row.get("AllocMem", "")),
        gpus=sum(gpu_types(row.get("Gres", "")).values()),
        # sites that count GPUs as a TRES show it without -d too
        gpus_used=sum(gpu_types(gres_used).values()) if gres_used else _tres_gpus(row.get("AllocTRES", "")),
        gpu_types=gpu_types(row.get("Gres", "")),
        gpu_types_used={kind: number for kind, number in gpu_types(gres_used).items() if number},
        gres=other_gres(row.get("Gres", "")),
        features=names(row.get("ActiveFeatures", "")),
        owner=word(row.get("Owner", "")).partition("(")[0],
    )


def _tres_gpus(text: str) -> int:
    match = re.search(r"(?:^|,)gres/gpu=(\d+)", text)
    return int(match[1]) if match else 0


def partition(row: Mapping[str, str]) -> PartitionInfo:
    exclusive = row.get("Exclusive", "").upper()  # from 26.05 on, in place of the two older words
    return PartitionInfo(
        partition=row.get("PartitionName", ""),
        nodes=nodes(row.get("Nodes", "")),
        max_time_s=duration(row.get("MaxTime", "")),
        up=row.get("State", "").upper() == "UP",
        default=row.get("Default", "").upper() == "YES",
        priority_tier=count(row.get("PriorityTier", "")),
        preempt_mode=preempt_mode(row.get("PreemptMode", "")),
        grace_s=float(count(row.get("GraceTime", ""))),
        qos=word(row.get("QoS", "")),
        exclusive=exclusive in ("NODE", "TOPO") or row.get("OverSubscribe", "").upper().startswith("EXCLUSIVE"),
        exclusive_user=exclusive == "USER" or row.get("ExclusiveUser", "").upper() == "YES",
        min_nodes=max(1, count(row.get("MinNodes", ""))),
        max_nodes=count(most) if (most := word(row.get("MaxNodes", ""))) else None,
        root_only=row.get("RootOnly", "").upper() == "YES",
        allow_accounts=names(row.get("AllowAccounts", "").lower()),
        deny_accounts=names(row.get("DenyAccounts", "").lower()),
        allow_qos=names(row.get("AllowQos", "").lower()),
        deny_qos=names(row.get("DenyQos", "").lower()),
        allow_groups=names(row.get("AllowGroups", "")),
        requires_reservation=row.get("ReqResv", "").upper() == "YES",
    )


def reservation(row: Mapping[str, str]) -> list[ReservationInfo]:
    """A list of one reservation; empty if its begin or end is missing."""
    start, end = unix_time(row.get("StartTime", "")), unix_time(row.get("EndTime", ""))
    if start is None or end is None:
        return []
    info = ReservationInfo(
        reservation=row.get("ReservationName", ""),
        nodes=nodes(row.get("Nodes", "")),
        start_at=start,
        end_at=end,
        flags=names(row.get("Flags", "")),
    )
    return [info]
