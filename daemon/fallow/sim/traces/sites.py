"""The clusters of traces: made up from a trace's own words, or read from what a site's `scontrol` prints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from fallow.model import Exit, FallowError, PartitionInfo
from fallow.sim.types import Scheduler, SimNode, Site
from fallow.slurm import parse

Profile = Literal["preempt", "nograce", "plain"]
"""May Slurm take our nodes: with 10 s of grace, at once, or never? As of the testbed."""
SCAVENGE = "scavenge"
"""Partition of all nodes whose jobs give way, where the profile preempts."""
GRACE_S = 10.0
LONGEST_S = 86400.0
"""MaxTime of partitions of which nobody says."""

SITE_FILES = {"nodes": "show node", "partitions": "show partition", "config": "show config"}
"""Files of a site's folder (NAME.txt), and the `scontrol -o` command that prints each."""


def made_up(
    name: str,
    groups: Mapping[str, Sequence[str]],
    *,
    gpus: int,
    profile: Profile,
    scheduler: Scheduler,
    max_time_s: float = LONGEST_S,
) -> Site:
    """A site of closed partitions (`groups`: partition -> its nodes), and one below them all where ours are preempted.

    Args:
        name: the cluster's.
        groups: partition -> its nodes; a node may be in several.
        gpus: on each node.
        profile: whether there is a partition `scavenge`, and its grace.
        scheduler: as configured.
        max_time_s: of all partitions.
    """
    below = [SCAVENGE] if profile != "plain" else []
    within: dict[str, list[str]] = {}
    for group, names in groups.items():
        for node in names:
            within.setdefault(node, []).append(group)
    partitions = [
        PartitionInfo(partition=group, nodes=list(names), max_time_s=max_time_s, priority_tier=10)
        for group, names in groups.items()
    ]
    partitions += [
        PartitionInfo(
            partition=each,
            nodes=list(within),
            max_time_s=max_time_s,
            preempt_mode="CANCEL",
            grace_s=GRACE_S if profile == "preempt" else 0.0,
        )
        for each in below
    ]
    return Site(
        name=name,
        nodes=tuple(SimNode(node=node, partitions=(*own, *below), gpus=gpus) for node, own in within.items()),
        partitions=tuple(partitions),
        scheduler=scheduler,
        preempt_type="preempt/partition_prio" if below else "",
        preempt_mode="CANCEL" if below else "OFF",
    )


def harvested(site: Site) -> tuple[str, ...]:
    """Partitions in which a user would harvest: those whose jobs give way to others', else all."""
    tiers = {p.partition: p.priority_tier for p in site.partitions}
    lower = [
        p.partition
        for p in site.partitions
        if site.preempt_type and p.preempts and p.priority_tier < max(tiers.values(), default=0)
    ]
    return tuple(lower or tiers)


def from_folder(folder: Path) -> Site:
    """A site from `scontrol -o show node`, `show partition` and `show config`, each in a file (`SITE_FILES`).

    Args:
        folder: with nodes.txt, partitions.txt and config.txt.

    Raises:
        FallowError: a file is missing, or says nothing that can be used.
    """
    texts = {}
    for name, command in SITE_FILES.items():
        path = folder / f"{name}.txt"
        try:
            texts[name] = path.read_text(errors="replace")
        except OSError as error:
            raise FallowError(
                f"{path}: {error.strerror or error}; put the output of `scontrol -o {command}` there", Exit.NOINPUT
            ) from error
    nodes, _, _ = parse.cluster(texts["nodes"])
    _, partitions, _ = parse.cluster(texts["partitions"])
    config, _ = parse.config(texts["config"])
    for name, found in (("nodes", nodes), ("partitions", partitions), ("config", config.slurm_version)):
        if not found:
            raise FallowError(
                f"{folder / name}.txt: nothing in it can be used; it must be the output of "
                f"`scontrol -o {SITE_FILES[name]}`",
                Exit.DATA,
            )
    there = {node.node for node in nodes}
    kept = [
        msgspec.structs.replace(p, nodes=[node for node in p.nodes if node in there]) for p in partitions if p.nodes
    ]
    of: dict[str, list[str]] = {}
    for partition in kept:
        for node_name in partition.nodes:
            of.setdefault(node_name, []).append(partition.partition)
    return Site(
        name=config.cluster or folder.name,
        nodes=tuple(
            SimNode(
                node=node.node,
                partitions=tuple(of[node.node]),
                gpus=node.gpus,
                cpus=max(1, node.cpus),
            )
            for node in nodes
            if node.node in of
        ),
        partitions=tuple(p for p in kept if p.nodes),
        scheduler=Scheduler.of(
            config.scheduler_parameters,
            kill_wait_s=config.kill_wait_s,
            message_timeout_s=config.message_timeout_s,
            **_version(config.slurm_version),
        ),
        preempt_type=config.preempt_type,
        preempt_mode=config.preempt_mode,
    )


def _version(text: str) -> dict[str, tuple[int, int]]:
    """`22.05.8`; {} where it cannot be read."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return {"version": (int(found[1]), int(found[2]))} if found else {}
