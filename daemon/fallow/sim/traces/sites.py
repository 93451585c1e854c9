"""The clusters of traces: made up from a trace's own words, or read from what a site's `scontrol` prints."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path

from msgspec.structs import replace

from fallow.model import Exit, FallowError, PartitionInfo, slurm_release
from fallow.sim.traces.recorded import DAY_S, Window
from fallow.sim.types import Scheduler, SimJob, SimNode, Site
from fallow.slurm import parse

SCAVENGE = "scavenge"
"""Partition of all nodes whose jobs give way, where the profile preempts."""
GRACE_S = 10.0

SITE_FILES = {"nodes": "show node", "partitions": "show partition", "config": "show config"}
"""Files of a site's folder (NAME.txt), and the `scontrol -o` command that prints each."""


def made_up(name: str, groups: Mapping[str, Sequence[str]], gpus: int, window: Window, days: int = 1) -> Site:
    """A site of closed partitions, and one below them all where ours are preempted (if the profile preempts).

    Args:
        name: the cluster's.
        groups: partition -> its nodes; a node may be in several.
        gpus: on each node.
        window: says the profile and the scheduler.
        days: MaxTime of all partitions.
    """
    nodes = list(dict.fromkeys(node for names in groups.values() for node in names))
    preempts, max_time_s = window.profile != "plain", days * DAY_S
    partitions = [
        PartitionInfo(partition=group, nodes=list(names), max_time_s=max_time_s, priority_tier=10)
        for group, names in groups.items()
    ]
    if preempts:
        grace_s = GRACE_S if window.profile == "preempt" else 0.0
        partitions.append(
            PartitionInfo(
                partition=SCAVENGE, nodes=nodes, max_time_s=max_time_s, preempt_mode="CANCEL", grace_s=grace_s
            )
        )
    return Site(
        name=name,
        nodes=tuple(SimNode(node=node, gpus=gpus) for node in nodes),
        partitions=tuple(partitions),
        scheduler=window.scheduler,
        preempt_type="preempt/partition_prio" if preempts else "",
    )


def max_days(jobs: Iterable[SimJob]) -> int:
    """MaxTime where nobody says: the days of the longest job."""
    return max(1, ceil(max((job.runs_s for job in jobs if isfinite(job.runs_s)), default=0.0) / DAY_S))


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
    for name, content in (("nodes", nodes), ("partitions", partitions), ("config", config.slurm_version)):
        if not content:
            raise FallowError(
                f"{folder / name}.txt: nothing in it can be used; it must be the output of "
                f"`scontrol -o {SITE_FILES[name]}`",
                Exit.DATA,
            )
    node_names = {node.node for node in nodes}
    kept_partitions = [replace(p, nodes=[node for node in p.nodes if node in node_names]) for p in partitions]
    nodes_in_partitions = {node for partition in kept_partitions for node in partition.nodes}
    version = slurm_release(config.slurm_version)
    return Site(
        name=config.cluster or folder.name,
        nodes=tuple(
            SimNode(node=node.node, gpus=node.gpus, cpus=max(1, node.cpus))
            for node in nodes
            if node.node in nodes_in_partitions
        ),
        partitions=tuple(p for p in kept_partitions if p.nodes),
        scheduler=Scheduler.of(
            config.scheduler_parameters,
            kill_wait_s=config.kill_wait_s,
            message_timeout_s=config.message_timeout_s,
            **({"version": version} if version else {}),
        ),
        preempt_type=config.preempt_type,
    )
