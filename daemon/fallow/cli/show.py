"""Commands that show what the head knows: status and report."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import click

from fallow.cli.common import ask, duration, json_option, moment, new_file, number, show_items, show_table, tell
from fallow.model import (
    AllocationView,
    CheckpointView,
    EventRecord,
    Exit,
    FallowError,
    GenerationReport,
    HeadView,
    InternalError,
    MemberView,
    RunReport,
    RunView,
    Snapshot,
    SpeedView,
    UsageReport,
)
from fallow.text import clean, counted, tail

T = TypeVar("T")

MOST_REASONS = 10
"""Most rows of the table that says why idle nodes are not used."""

RUNS: dict[str, Callable[[RunView], str]] = {
    "RUN": lambda run: run.run,
    "NAME": lambda run: run.name,
    "STATUS": lambda run: run.status.value,
    "NODES": lambda run: f"{run.min_nodes}:{run.max_nodes}",
    "MEMBERS": lambda run: f"{len(run.training)}/{run.limit}",
    "GEN": lambda run: str(run.generation),
    "STEP": lambda run: str(run.step) if run.total_steps is None else f"{run.step}/{run.total_steps}",
    "LOSS": lambda run: number(run.loss),
    "SAMPLES/S": lambda run: number(run.samples_per_s or None),
    "NOTE": lambda run: run.change or run.message or "",
}
MEMBERS: dict[str, Callable[[MemberView], str]] = {
    "MEMBER": lambda member: member.member,
    "NODE": lambda member: member.node,
    "KIND": lambda member: member.allocation.value,
    "PHASE": lambda member: member.phase.value,
    "RANK": lambda member: member.ranks,
    "STEP": lambda member: str(member.step),
    "SHARDS": lambda member: str(member.shards or "-"),
    "S/SHARD": lambda member: number(member.pace_s or None),
    "LEFT": lambda member: duration(member.ends_in_s),
    "SEEN": lambda member: f"{member.last_seen_s:.1f}s",
}
ALLOCATIONS: dict[str, Callable[[AllocationView], str]] = {
    "TOKEN": lambda job: job.token,
    "KIND": lambda job: job.kind.value,
    "STATE": lambda job: job.state.value,
    "JOBID": lambda job: job.job_id or "-",
    "PARTITION": lambda job: job.partition or "-",
    "NODELIST": lambda job: ",".join(job.nodes) or "-",
    "LEFT": lambda job: duration(job.ends_in_s),
    "REASON": lambda job: job.reason,
}
SPEEDS: dict[str, Callable[[SpeedView], str]] = {
    "NODES": lambda speed: str(speed.nodes),
    "STEPS/S": lambda speed: number(speed.steps_per_s),
    "KNOWN": lambda speed: "measured" if speed.measured else "predicted",
}
GENERATIONS: dict[str, Callable[[GenerationReport], str]] = {
    "GEN": lambda one: str(one.generation),
    "KIND": lambda one: one.kind.value,
    "MEMBERS": lambda one: str(len(one.members)),
    "FIRST STEP": lambda one: "-" if one.first_step is None else str(one.first_step),
    "PAUSE": lambda one: number(one.pause_s),
    "DRAIN": lambda one: number(one.parts.drain),
    "GROUP": lambda one: number(one.parts.group),
    "STATE": lambda one: number(one.parts.state),
    "DATA": lambda one: number(one.parts.data),
    "REASON": lambda one: one.reason,
}


@click.command(short_help="Runs, or one run in detail.")
@click.argument("run", required=False)
@json_option
def status(run: str | None, as_json: bool) -> None:
    """Show all runs, or one RUN with its members, jobs and checkpoints."""
    show = show_runs if run is None else lambda snapshot: show_run(snapshot.runs[0], snapshot.at)
    tell(ask("status", Snapshot, run=run), as_json, show)


@click.command(short_help="The report of a run.")
@click.argument("run")
@click.option("--html", "page", metavar="FILE", help="Write a page for a browser to a new FILE; -: standard output.")
@json_option
def report(run: str, page: str | None, as_json: bool) -> None:
    """Show the report of RUN: steps, samples, generations and pauses."""
    if page is None:
        tell(ask("report", RunReport, run=run), as_json, show_report)
        return
    if as_json:
        raise FallowError("--html writes a page and --json prints a value; give one of them", Exit.USAGE)
    from fallow.control.client import MOST_EVENTS
    from fallow.core.page.page import page_of

    result = ask("report", RunReport, run=run)
    snapshot, usage = ask("status", Snapshot, run=result.run), ask("usage", UsageReport, run=result.run)
    html = page_of(result, snapshot, usage, ask("events", list[EventRecord], run=result.run, limit=MOST_EVENTS))
    if page == "-":
        sys.stdout.write(html)
        return
    with new_file(Path(page), "--html") as file:
        file.write(html.encode())


def show_runs(snapshot: Snapshot) -> None:
    """Print the head in a line, then a row per run, then why idle nodes are not used."""
    head = snapshot.head
    slurm = f"Slurm {head.slurm_version} ({head.cluster})" if head.slurm_version else "no Slurm seen yet"
    poll = "never" if head.poll_age_s is None else f"{head.poll_age_s:.0f} s ago"
    head_line = f"head {head.version} on {head.host}, pid {head.pid}, up {duration(head.uptime_s)}"
    for line in (f"{head_line}; {slurm}; polled {poll}", *_problems(head)):
        click.echo(clean(line))
    if not snapshot.runs:
        click.echo("no runs; start one with: fallow submit --nodes=MIN:MAX SCRIPT")
        return
    show_items(RUNS, snapshot.runs)
    rows = unused(snapshot)
    if rows:
        click.echo()
        cells = [[str(nodes), reason, names] for reason, nodes, names in rows[:MOST_REASONS]]
        show_table(["IDLE", "WHY NOT USED", "NODELIST"], cells)
    if nodes_below := sum(nodes for _, nodes, _ in rows[MOST_REASONS:]):
        click.echo(f"{counted(nodes_below, 'node')} more for other reasons; see: fallow status --json")


def _problems(head: HeadView) -> list[str]:
    """Problems that keep the head from its work, a line each."""
    problems = []
    if head.slurm_error:
        problems.append(f"Slurm does not answer: {head.slurm_error}")
    if head.store_problem:
        problems.append(f"the head cannot write to its store and waits: {head.store_problem}")
    if head.stand_in:
        problems.append(f"a stand-in head on {head.host}, in a base job, serves; `fallow daemon` takes its place")
    if head.internal_errors:
        problems.append(internal_errors(head.internal_errors))
    return problems + not_harvested(head)


def internal_errors(errors: Sequence[InternalError]) -> str:
    """Number of unexpected errors of the head, and the newest of them, in one line."""
    newest = max(errors, key=lambda error: error.last_at)
    run_note = f", run {newest.run}" if newest.run else ""
    return (
        f"{counted(sum(error.count for error in errors), 'internal error')} of the head, the newest in {newest.source} "
        f"({newest.line}{run_note}): {newest.error}; the head's log has the traceback, please report it"
    )


def not_harvested(head: HeadView) -> list[str]:
    """Partitions that the head may not harvest, and why, a line each."""
    reasons = [f"nothing is harvested: {head.stopped}"] if head.stopped else []
    return reasons + [f"partition {name} is not harvested: {reason}" for name, reason in head.not_harvested.items()]


def newest_first(runs: Sequence[RunView]) -> list[RunView]:
    """Sort runs: active ones come before ended ones, newer ones before older ones."""
    return sorted(runs, key=lambda run: (run.status.ended, -run.created_at))


def unused(snapshot: Snapshot) -> list[tuple[str, int, str]]:
    """Why idle nodes are not used: (reason, number of nodes, folded names), most nodes first."""
    from fallow.slurm.parse import folded

    reasons: dict[str, list[str]] = {}
    for node in snapshot.nodes:
        if node.unused:
            reasons.setdefault(node.unused, []).append(node.node)
    rows = sorted(reasons.items(), key=lambda item: -len(item[1]))
    return [(reason, len(nodes), folded(nodes)) for reason, nodes in rows]


def show_run(run: RunView, now: float) -> None:
    """Print one run: its row, members, jobs and checkpoints. `now` is by the head's clock, like all times in a view."""
    show_items(RUNS, [run])
    if run.scalars:
        # values that the script logs
        click.echo(clean("  ".join(f"{name} {number(value)}" for name, value in run.scalars.items())))
    for node, reason in sorted(run.barred.items()):
        click.echo(clean(f"node {node} is barred: {reason}"))
    if run.drained:
        click.echo(clean(f"drained: {', '.join(run.drained)}; to use them again: fallow resume {run.run}"))
    _section(MEMBERS, run.members)
    _section(ALLOCATIONS, run.allocations)
    if run.deadline_at is not None:
        click.echo(f"\ndeadline {moment(run.deadline_at)}: {_schedule_state(run.ahead_s)}")
    _section(SPEEDS, run.speeds)
    if run.speeds and run.target is not None:
        click.echo(f"harvested nodes, requested ones included: {run.target}")
    _section(_checkpoint_columns(now), run.checkpoints)


def _section(columns: Mapping[str, Callable[[T], str]], items: Sequence[T]) -> None:
    if items:
        click.echo()
        show_items(columns, items)


def _schedule_state(ahead_s: float | None) -> str:
    if ahead_s is None:
        return "the pace is not known yet"
    return f"{duration(abs(ahead_s))} {'behind' if ahead_s < 0 else 'ahead of'} schedule"


def _checkpoint_columns(now: float) -> dict[str, Callable[[CheckpointView], str]]:
    from rich.filesize import decimal

    return {
        "CHECKPOINT": lambda one: f"step {one.step}",
        "STATE": lambda one: one.state.value,
        "AGE": lambda one: duration(now - one.written_at),
        "SIZE": lambda one: decimal(one.nbytes),
        "KEPT": lambda one: "by hand" if one.asked else "",
        "PATH": lambda one: one.path + (f" ({one.problem})" if one.problem else ""),
    }


def end_of_traceback(report: RunReport) -> str:
    """The end of the report's traceback. Its last line says what went wrong."""
    return tail(report.traceback.rstrip().split("\n"), 1000, 20_000)


def show_report(report: RunReport) -> None:
    """Print a report: a few lines, then a row per generation."""
    if report.traceback:
        click.echo(end_of_traceback(report))
    samples, planned, unplanned = report.samples, report.pause_s.planned, report.pause_s.unplanned
    message = f": {report.message}" * bool(report.message)
    click.echo(clean(f"run {report.run}: {report.status.value} after {report.steps} steps{message}"))
    click.echo(f"samples: {samples.consumed} consumed, {samples.lost} lost, {samples.duplicated} duplicated")
    if samples.unknown:
        click.echo(f"the audit is incomplete: {samples.unknown} samples are unknown, the disk was full")
    click.echo(clean(f"final loss {number(report.final_loss)}, digest {report.final_digest or '-'}"))
    click.echo(
        f"pauses: planned p50 {number(planned.p50)} s, p95 {number(planned.p95)} s; "
        f"unplanned p50 {number(unplanned.p50)} s, p95 {number(unplanned.p95)} s; "
        f"{counted(report.steps_discarded, 'step')} discarded"
    )
    for rollback in report.rolled_back:
        steps = f"from step {rollback.from_step} to {rollback.to_step}"
        click.echo(f"rolled back by hand {steps} before generation {rollback.generation}")
    show_items(GENERATIONS, report.generations)
