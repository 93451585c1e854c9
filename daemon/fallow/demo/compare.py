"""The same jobs of others on two clusters, Fallow on one of them: what came of jobs and of idle nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fallow.core.quantile import quantile
from fallow.demo.measure import Harvested, Sample, members_at
from fallow.model import GenerationReport, Struct


@dataclass(frozen=True, slots=True)
class JobTimes:
    """As Slurm gives them: whole seconds."""

    submit_at: float
    start_at: float | None

    @property
    def wait_s(self) -> float | None:
        return None if self.start_at is None else max(0.0, self.start_at - self.submit_at)


class Comparison(Struct, frozen=True):
    """Waiting times of the same jobs, with Fallow minus without."""

    compared: int
    "jobs that started on both clusters"
    waited_s: float
    "all together, with Fallow"
    waited_without_s: float
    later: int
    "jobs that waited longer with Fallow"
    p50_s: float
    p95_s: float
    max_s: float
    beyond_rule: int
    "jobs that waited longer by more than is allowed"
    rule_s: float
    worst: tuple[str, ...] = ()
    "the jobs that waited longer by most, with by how much"


def compare(ours: Mapping[str, JobTimes], theirs: Mapping[str, JobTimes], rule_s: float) -> Comparison:
    """Args: ours: job name -> times with Fallow; theirs: without; rule_s: by how much a job may start later."""
    both = [
        (name, a, b)
        for name, times in ours.items()
        if name in theirs and (a := times.wait_s) is not None and (b := theirs[name].wait_s) is not None
    ]
    later = sorted(((a - b, name) for name, a, b in both), reverse=True)
    gaps = [gap for gap, _ in later]
    return Comparison(
        compared=len(both),
        waited_s=sum(a for _, a, _ in both),
        waited_without_s=sum(b for _, _, b in both),
        later=sum(1 for gap in gaps if gap > 0),
        p50_s=quantile(gaps, 0.5) or 0.0,
        p95_s=quantile(gaps, 0.95) or 0.0,
        max_s=max(gaps, default=0.0),
        beyond_rule=sum(1 for gap in gaps if gap > rule_s),
        rule_s=rule_s,
        worst=tuple(f"{name} {gap:+.0f} s" for gap, name in later[:5] if gap > 0),
    )


def usable(
    samples: Sequence[Sample],
    generations: list[GenerationReport],
    nodes: Mapping[str, str],
    start_up_s: float,
    start_at: float,
    end_at: float,
) -> Harvested:
    """Idle node time in holes that are longer than a start-up, and how much of it was used.

    A hole is a time without interruption in which a node was neither others' nor the base allocation's, between
    `start_at` and `end_at` (Unix times).
    """
    open_: dict[str, list[float]] = {}
    total = Harvested(0.0, 0.0)

    def close(node: str) -> None:
        nonlocal total
        length, used = open_.pop(node)
        if length > start_up_s:
            total = Harvested(total.idle_node_s + length, total.harvested_node_s + used)

    for now, later in pairwise(samples):
        span = min(later.at, end_at) - max(now.at, start_at)
        if span <= 0:
            continue
        spare = now.idle | now.ours
        for node in set(open_) - spare:
            close(node)
        members = members_at(generations, dict(nodes), now.at)
        for node in spare:
            hole = open_.setdefault(node, [0.0, 0.0])
            hole[0] += span
            hole[1] += span if node in members else 0.0
    for node in list(open_):
        close(node)
    return total


def start_ups(samples: Sequence[Sample], generations: list[GenerationReport], nodes: Mapping[str, str]) -> list[float]:
    """From a job of ours getting a node until the node's worker is a member, for every time that this came about."""
    found: list[float] = []
    since: dict[str, float] = {}
    for sample in samples:
        members = members_at(generations, dict(nodes), sample.at)
        for node in sample.ours - since.keys():
            since[node] = sample.at
        for node in list(since):
            if node not in sample.ours:
                del since[node]
            elif node in members and since[node] >= 0:
                found.append(sample.at - since[node])
                since[node] = -1.0
    return found
