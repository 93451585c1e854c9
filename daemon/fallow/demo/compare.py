"""The same jobs of others on two clusters, Fallow on one of them: what came of the jobs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fallow.core.quantile import quantile
from fallow.model import Struct


@dataclass(frozen=True, slots=True)
class JobTimes:
    """As Slurm gives them: whole seconds."""

    submit_at: float
    start_at: float | None

    def wait_s(self, until: float) -> float:
        """Until it started; of one that did not, as long as it was watched: a lower bound."""
        return max(0.0, (until if self.start_at is None else min(self.start_at, until)) - self.submit_at)

    def started(self, until: float) -> bool:
        return self.start_at is not None and self.start_at <= until


class Comparison(Struct, frozen=True):
    """Waiting times of the same jobs, with Fallow minus without.

    A job that started without Fallow and was still waiting with it at the end counts with its wait up to then, which
    is a lower bound of how much later it is; the other way round its wait without Fallow is a lower bound, so that it
    counts as later than it is. One that started on neither cluster says nothing.
    """

    compared: int
    "jobs that started on at least one of the clusters"
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
    never_with: int = 0
    "jobs that started without Fallow only"
    never_without: int = 0
    "jobs that started with Fallow only"
    never: int = 0
    "jobs that started on neither cluster; not compared"
    unmatched: int = 0
    "jobs that were seen on one cluster only; not compared"


def compare(ours: Mapping[str, JobTimes], theirs: Mapping[str, JobTimes], rule_s: float, until: float) -> Comparison:
    """Args: ours: job name -> times with Fallow; theirs: without; rule_s: by how much a job may start later;
    until: Unix time at which the looking ended on both."""
    both = {name: (ours[name], theirs[name]) for name in ours if name in theirs}
    started = {name: (a.started(until), b.started(until)) for name, (a, b) in both.items()}
    pairs = {name: pair for name, pair in both.items() if any(started[name])}
    gaps = {name: a.wait_s(until) - b.wait_s(until) for name, (a, b) in pairs.items()}
    kinds = list(started.values())
    return Comparison(
        compared=len(pairs),
        waited_s=sum(a.wait_s(until) for a, _ in pairs.values()),
        waited_without_s=sum(b.wait_s(until) for _, b in pairs.values()),
        later=sum(1 for gap in gaps.values() if gap > 0),
        p50_s=quantile(gaps.values(), 0.5) or 0.0,
        p95_s=quantile(gaps.values(), 0.95) or 0.0,
        max_s=max(gaps.values(), default=0.0),
        beyond_rule=sum(1 for gap in gaps.values() if gap > rule_s),
        rule_s=rule_s,
        worst=tuple(_worst(gaps, started)),
        never_with=kinds.count((False, True)),
        never_without=kinds.count((True, False)),
        never=kinds.count((False, False)),
        unmatched=len(ours.keys() ^ theirs.keys()),
    )


def _worst(gaps: Mapping[str, float], started: Mapping[str, tuple[bool, bool]]) -> Iterator[str]:
    for gap, name in sorted(((gap, name) for name, gap in gaps.items()), reverse=True)[:5]:
        if gap > 0:
            yield f"{name} {gap:+.0f} s" + ("" if started[name][0] else " or more")
