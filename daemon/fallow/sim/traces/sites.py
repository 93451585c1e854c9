"""The clusters of traces: synthetic sites inferred from a trace, or sites read from the output of `scontrol`."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path

from msgspec.structs import replace

from fallow.model import Exit, FallowError, PartitionInfo, slurm_release
from fallow.sim.traces.recorded import DAY_S, Window
from fallow.sim.types import Scheduler, SimJob, SimNode, Site
from fallow.slurm import parse

SCAVENGE = "scavenge"
"""Partition of all nodes whose jobs are preempted, if the profile preempts."""
GRACE_S = 10.0

SITE_FILES = {"nodes": "show node", "partitions": "show partition", "config": "show config"}
"""Name of a file of a site's folder (NAME.txt) -> arguments of `scontrol -o` that print it."""


def synthetic_site(name: str, groups: Mapping[str, Sequence[str]], gpus: int, window: Window, days: int = 1) -> Site:
    """A site with the given partitions. If the profile preempts, a partition of all nodes and the lowest tier is added.

    Args:
        name: name of the cluster.
        groups: partition -> its nodes; a node may be in several.
        gpus: GPUs of each node.
        window: gives the profile and the scheduler.
        days: MaxTime of all partitions, in days.
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
    """MaxTime in days if the trace has none: the days of the longest job."""
    return max(1, ceil(max((job.runs_s for job in jobs if isfinite(job.runs_s)), default=0.0) / DAY_S))


def harvested_partitions(site: Site) -> tuple[str, ...]:
    """Partitions in which a user would harvest: the ones whose jobs may be preempted; all if there is none."""
    tiers = {p.partition: p.priority_tier for p in site.partitions}
    lower = [
        p.partition
        for p in site.partitions
        if site.preempt_type and p.preempts and p.priority_tier < max(tiers.values(), default=0)
    ]
    return tuple(lower or tiers)


def site_from_folder(folder: Path) -> Site:
    """Read a site from the output of `scontrol -o show node`, `show partition` and `show config` (`SITE_FILES`).

    Args:
        folder: folder with nodes.txt, partitions.txt and config.txt.

    Raises:
        FallowError: a file is missing, or has nothing usable.
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
                f"{folder / name}.txt: not the output of `scontrol -o {SITE_FILES[name]}`; run this command again",
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
        scheduler=Scheduler.from_parameters(
            config.scheduler_parameters,
            kill_wait_s=config.kill_wait_s,
            message_timeout_s=config.message_timeout_s,
            **({"version": version} if version else {}),
        ),
        preempt_type=config.preempt_type,
    )
