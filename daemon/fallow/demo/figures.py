"""The figures of `fallow bench harvest`, from what two observers saw and what the head says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fallow.demo.compare import Comparison, JobTimes, compare
from fallow.demo.holes import (
    Lost,
    Memberships,
    Unfilled,
    Words,
    find_holes,
    harvested,
    hole_to_step,
    hole_to_step_or_never,
    start_ups,
    unfilled,
    where_lost,
)
from fallow.demo.measure import Sample, others_delayed
from fallow.demo.observer import Observer
from fallow.model import DelayReport, Quantiles, SampleReport, Struct

RELEASE_S = 6.0
"""What we may take from seeing that somebody waits until the node is idle."""

ROUNDING_S = 2.0
"""Slurm's times are whole seconds, two of them in every waiting time."""


class Plan(Struct, frozen=True):
    profile: str = "plain"
    seconds: float = 300.0
    seed: int = 0
    utilisation: float = 0.6
    mean_s: float = 60.0
    "of the others' jobs. A start-up is to it about what 30 s are to the holes of a large site (median 475 s, Summit)"
    bf_interval: int = 1


class Looks(Struct, frozen=True):
    """How well an observer saw its cluster."""

    samples: int
    missed: int
    "looks that came to nothing"
    longest_gap_s: float
    problem: str = ""
    "of the last look that came to nothing"


class Figures(Struct, frozen=True, kw_only=True):
    """Between the begin of the load and the end of the looking; `fallow.demo.holes` says what a hole is."""

    seconds: float
    idle_node_s: float
    "in all holes"
    usable_idle_node_s: float
    "in holes longer than a start-up"
    harvested_node_s: float
    "of these, the part in which the node trained"
    ratio: float | None
    "harvested of usable"
    planned_node_s: float
    "of the usable time, the part in which nobody had the node and Slurm had set it aside for a job that waited"
    ratio_unplanned: float | None
    "harvested of usable without that part"
    usable_without_node_s: float
    "in holes longer than a start-up on the cluster without Fallow"
    ratio_without: float | None
    "harvested of these"
    holes: int
    "that are usable"
    unfilled: list[Unfilled]
    "of them, those in which nothing was trained"
    lost: list[Lost]
    "where the rest of the usable time went"
    start_up_s: float | None
    "median, from our job's start to the node's membership"
    start_ups: int
    start_ups_cut_off: int
    "not in the median: the node was gone before it was a member"
    hole_to_step_s: Quantiles
    "of the holes that others left, and that were filled"
    hole_to_step_or_never_s: Quantiles
    "of all usable ones that others left; null where more than the rest were never filled"
    jobs: Comparison
    others_delayed_seen: DelayReport
    "as an observer saw it who counts nodes only"
    looks: Looks
    looks_without: Looks


class HarvestReport(Figures, frozen=True, kw_only=True):
    plan: Plan
    stopped: str
    "why it is shorter than planned; empty: it is not"
    slurm_version: str
    nodes: int
    others_delayed: DelayReport | None
    "as the head measured it; this and what follows is null where the head did not answer at the end"
    slurmctld_rpcs_per_min: float | None
    "all that the cluster with Fallow had more"
    polls: int | None
    steps: int | None
    samples: SampleReport | None
    changes: int
    "of the membership"


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is to go by."""

    ours: Observer
    theirs: Observer
    members: Memberships
    start_at: float
    end_at: float
    words: Words = ()


def figures(plan: Plan, seen: Seen) -> Figures:
    """Pure: of a measurement under way it gives what is known so far."""
    ours, theirs, start_at, end_at = seen.ours, seen.theirs, seen.start_at, seen.end_at
    starts = start_ups(ours.samples, seen.members)
    start_up_s = starts.typical_s or 0.0
    holes = find_holes(ours.samples, seen.members, start_at, end_at, seen.words)
    used = harvested(holes, start_up_s)
    spare = harvested(find_holes(theirs.samples, [], start_at, end_at), start_up_s).idle_node_s
    left = [hole for hole in holes if hole.left]
    # Without preemption: our poll, our leaving, one cycle. With it, Slurm sees to all but the grace and KillWait.
    rule_s = (5.0 if plan.profile == "plain" else 10.0) + RELEASE_S + plan.bf_interval + ROUNDING_S
    return Figures(
        seconds=end_at - start_at,
        idle_node_s=harvested(holes).idle_node_s,
        usable_idle_node_s=used.idle_node_s,
        harvested_node_s=used.harvested_node_s,
        ratio=_ratio(used.harvested_node_s, used.idle_node_s),
        planned_node_s=used.planned_node_s,
        ratio_unplanned=_ratio(used.harvested_node_s, used.idle_node_s - used.planned_node_s),
        usable_without_node_s=spare,
        ratio_without=_ratio(used.harvested_node_s, spare),
        holes=sum(1 for hole in holes if hole.length_s > start_up_s),
        unfilled=unfilled(holes, start_up_s),
        lost=where_lost(holes, start_up_s),
        start_up_s=starts.typical_s,
        start_ups=len(starts.seconds),
        start_ups_cut_off=starts.cut_off,
        hole_to_step_s=hole_to_step(left),
        hole_to_step_or_never_s=hole_to_step_or_never(left, start_up_s),
        jobs=compare(_users(ours.jobs), _users(theirs.jobs), rule_s, end_at),
        others_delayed_seen=others_delayed(_between(ours.samples, start_at, end_at)),
        looks=_looks(ours),
        looks_without=_looks(theirs),
    )


def in_short(found: Figures) -> str:
    """One line."""
    jobs, hole = found.jobs, found.hole_to_step_s
    return (
        f"{found.seconds:.0f} s: {_share(found)}, hole to step p50 {_seconds(hole.p50)}; {found.holes} usable holes, "
        f"{sum(each.holes for each in found.unfilled)} not filled; {jobs.compared} jobs, {jobs.beyond_rule} later "
        f"by more than {jobs.rule_s:.0f} s, max {jobs.max_s:+.0f} s; looks missed {found.looks.missed}"
    )


def _looks(observer: Observer) -> Looks:
    return Looks(len(observer.samples), observer.missed, observer.longest_gap_s, observer.problem)


def _between(samples: Sequence[Sample], start_at: float, end_at: float) -> list[Sample]:
    return [sample for sample in samples if start_at <= sample.at <= end_at]


def _users(jobs: Mapping[str, JobTimes]) -> dict[str, JobTimes]:
    return {name: times for name, times in jobs.items() if name.startswith("user-")}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _share(found: Figures) -> str:
    ratio = "-" if found.ratio is None else f"{found.ratio:.3f}"
    return f"{ratio} ({found.harvested_node_s:.0f} of {found.usable_idle_node_s:.0f} node-seconds)"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def show(report: HarvestReport) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    plan = report.plan
    jobs, hole, never = report.jobs, report.hole_to_step_s, report.hole_to_step_or_never_s
    title = f"{plan.profile}, {report.seconds:.0f} s, Slurm {report.slurm_version}, {report.nodes} nodes"
    table = Table(title=title, show_header=False)
    table.add_column(justify="right", style="bold")
    table.add_column()

    def row(name: str, value: str) -> None:
        table.add_row(Text(name), Text(value))

    def delay(of: DelayReport | None) -> str:
        return "-" if of is None else f"{of.jobs} jobs, p95 {of.p95_s:.1f} s, at most {of.max_s:.1f} s"

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    if report.stopped:
        row("stopped early", report.stopped)
    row("harvested / idle", _share(report))
    row("", f"in {report.holes} holes longer than a start-up; {report.idle_node_s:.0f} node-seconds in all holes")
    row("", f"{ratio(report.ratio_unplanned)} without the {report.planned_node_s:.0f} set aside for jobs that waited")
    row("", f"{ratio(report.ratio_without)} of what is idle without Fallow ({report.usable_without_node_s:.0f})")
    cut_off = f"of {report.start_ups}; {report.start_ups_cut_off} more were cut off"
    row("start-up", f"{_seconds(report.start_up_s)} ({cut_off})")
    row("hole to first useful step", f"p50 {_seconds(hole.p50)}, p95 {_seconds(hole.p95)}")
    row("never filled counted too", f"p50 {_seconds(never.p50)}, p95 {_seconds(never.p95)}")
    for each in report.unfilled:
        row("never filled", f"{each.holes} holes ({each.node_s:.0f} node-seconds): {each.why}")
    for cause in report.lost:
        row("lost", f"{cause.node_s:.0f} node-seconds: {cause.cause}")
    row(
        "others' jobs compared",
        f"{jobs.compared}; waited {jobs.waited_s:.0f} s (without {jobs.waited_without_s:.0f} s)",
    )
    row("never started", f"{jobs.never_with} with, {jobs.never_without} without, {jobs.never} on neither")
    row("later than without", f"{jobs.later}; p50 {jobs.p50_s:+.1f}, p95 {jobs.p95_s:+.1f}, max {jobs.max_s:+.1f} s")
    row(f"later by more than {jobs.rule_s:.0f} s", f"{jobs.beyond_rule} {', '.join(jobs.worst)}")
    row("others delayed, head", delay(report.others_delayed))
    row("others delayed, observer", delay(report.others_delayed_seen))
    calls = "-" if report.slurmctld_rpcs_per_min is None else f"{report.slurmctld_rpcs_per_min:.1f} per minute"
    row("slurmctld requests more", f"{calls} ({report.polls} polls)")
    lost = "" if report.samples is None else f", {report.samples.lost} samples lost"
    row("training", f"{report.steps} steps, {report.changes} generations{lost}")
    looks = report.looks
    row("looks", f"{looks.samples}, {looks.missed} missed, longest gap {looks.longest_gap_s:.1f} s")
    Console().print(table)
