"""Commands that show what the head knows: status, events, report."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import click

from fallow.cli.common import ask, json_option, json_text, print_json
from fallow.cli.tables import duration, moment, number, show_table, size
from fallow.model import (
    CheckpointState,
    EventRecord,
    Exit,
    FallowError,
    HeadView,
    InternalError,
    MemberView,
    RunReport,
    RunView,
    Snapshot,
)
from fallow.text import clean, clean_output, counted

LAST_EVENT = 2**63 - 1
"""Events are numbered by the store, which counts no further."""
MISSED = 100_000
"""Most events between two looks of `events --follow`."""

MOST_REASONS = 10
"""Why idle nodes are not used: as many rows at most."""

_NO_RUNS = "no runs; start one with: fallow submit --nodes=MIN:MAX SCRIPT"


@click.command(short_help="Runs, or one run in detail.")
@click.argument("run", required=False)
@json_option
def status(run: str | None, as_json: bool) -> None:
    """Show all runs, or one RUN with its members and jobs."""
    snapshot = ask("status", Snapshot, **({} if run is None else {"run": run}))
    if as_json:
        print_json(snapshot)
    elif run:
        for view in snapshot.runs:
            show_run(view, snapshot.at)
    else:
        show_runs(snapshot)


def internal_errors(errors: Sequence[InternalError]) -> str:
    """How often the head met an error that nobody expected, and the newest, in one line."""
    newest = max(errors, key=lambda error: error.last_at)
    of = f", run {newest.run}" if newest.run else ""
    return (
        f"{counted(sum(error.count for error in errors), 'internal error')} of the head, the newest in {newest.source} "
        f"({newest.line}{of}): {newest.error}; the head's log has the traceback, please report it"
    )


@click.command(short_help="All runs with their checkpoints.")
@json_option
def runs(as_json: bool) -> None:
    """List all runs, ended ones too, each with its newest usable checkpoint."""
    snapshot = ask("status", Snapshot)
    found = sorted(snapshot.runs, key=lambda run: run.created_at)
    if as_json:
        print_json(found)
        return
    if not found:
        click.echo(_NO_RUNS)
        return
    show_table(
        ["RUN", "NAME", "BEGUN", "STATUS", "STEP", "CHECKPOINTS", "NEWEST", "AGE", "NOTE"],
        [_saved_row(run, snapshot.at) for run in found],
    )


def _saved_row(run: RunView, now: float) -> list[str]:
    newest = next((one for one in run.checkpoints if one.state is CheckpointState.USABLE), None)
    return [
        run.run,
        run.name,
        moment(run.created_at),
        run.status.value,
        str(run.step),
        str(len(run.checkpoints)),
        "-" if newest is None else f"step {newest.step}",
        "-" if newest is None else duration(now - newest.written_at),
        run.message,
    ]


@click.command(short_help="What happened.")
@click.argument("run", required=False)
@click.option("--since", type=click.IntRange(0, LAST_EVENT - 1), default=0, help="Only events with a higher number.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="The last so many.")
@click.option("--follow", "-f", "following", is_flag=True, help="Go on with new events until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array; with --follow one JSON value per line.")
def events(run: str | None, since: int, limit: int, following: bool, as_json: bool) -> None:
    """Show the event log, of everything or of one RUN."""
    if following and run != "":
        asyncio.run(follow(run, since, limit, as_json))
        return
    found = ask("events", list[EventRecord], since=since, limit=limit, **({} if run is None else {"run": run}))
    if as_json:
        print_json(found)
    else:
        for event in found:
            _print_event(event, as_json=False)


@click.command(short_help="The report of a run.")
@click.argument("run")
@json_option
def report(run: str, as_json: bool) -> None:
    """Show the report of RUN: steps, samples, generations and pauses."""
    found = ask("report", RunReport, run=run)
    if as_json:
        print_json(found)
    else:
        show_report(found)


async def follow(run: str | None, since: int, limit: int, as_json: bool) -> None:
    """Prints events until the head goes away: each once, none left out."""
    from fallow.config import load_config
    from fallow.control.client import ControlClient
    from fallow.files import Paths

    load_config()

    head_file = Paths.default().head_file
    last = since
    async with await ControlClient.connect(head_file) as asking, await ControlClient.connect(head_file) as listening:

        async def catch_up(last: int, limit: int) -> int:
            wanted: dict[str, Any] = {"run": run} if run else {}
            for event in await asking.call("events", list[EventRecord], since=last, limit=limit, **wanted):
                _print_event(event, as_json)
                last = max(last, event.seq)
            return last

        last = await catch_up(last, limit)
        subscribed = False
        async for item in listening.subscribe():
            if not subscribed:
                # What happened between the first look and the subscription would be missed otherwise.
                last = await catch_up(last, MISSED)
                subscribed = True
            if isinstance(item, EventRecord) and item.seq > last and run in (None, item.run):
                _print_event(item, as_json)
                last = item.seq
    raise FallowError("the head went away; follow again when it is back", Exit.UNAVAILABLE)


def _print_event(event: EventRecord, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json_text(event, indent=-1) + "\n")
    else:
        where = event.run or "-"
        sys.stdout.write(
            f"{event.seq:>6}  {moment(event.at)}  {clean(where):<20}  {clean(event.kind):<10}  {clean(event.text)}\n"
        )
    sys.stdout.flush()


def show_runs(snapshot: Snapshot) -> None:
    """The head in a line, then a row per run."""
    head = snapshot.head
    slurm = f"Slurm {head.slurm_version} ({head.cluster})" if head.slurm_version else "no Slurm seen yet"
    poll = "never" if head.poll_age_s is None else f"{head.poll_age_s:.0f} s ago"
    click.echo(
        clean(
            f"head {head.version} on {head.host}, pid {head.pid}, up {duration(head.uptime_s)}; {slurm}; polled {poll}"
        )
    )
    if head.slurm_error:
        click.echo(clean(f"Slurm does not answer: {head.slurm_error}"))
    if head.store_problem:
        click.echo(clean(f"the head can write nothing down and waits: {head.store_problem}"))
    if head.stand_in:
        click.echo(clean(f"a stand-in head on {head.host}, in a base job, serves; `fallow daemon` takes its place"))
    if head.internal_errors:
        click.echo(clean(internal_errors(head.internal_errors)))
    for line in not_harvested(head):
        click.echo(clean(line))
    if not snapshot.runs:
        click.echo(_NO_RUNS)
        return
    show_table(
        ["RUN", "NAME", "STATUS", "NODES", "MEMBERS", "GEN", "STEP", "LOSS", "SAMPLES/S", "NOTE"],
        [_run_row(run) for run in snapshot.runs],
    )
    _show_unused(snapshot)


def not_harvested(head: HeadView) -> list[str]:
    """What the head may not harvest, and why, a line for each."""
    stopped = [f"nothing is harvested: {head.stopped}"] if head.stopped else []
    return stopped + [f"partition {name} is not harvested: {reason}" for name, reason in head.not_harvested.items()]


def unused(snapshot: Snapshot) -> list[tuple[str, int, str]]:
    """Why idle nodes are not used: reason, how many nodes, and their names, those of most nodes first."""
    reasons: dict[str, list[str]] = {}
    for node in snapshot.nodes:
        if node.unused:
            reasons.setdefault(node.unused, []).append(node.node)
    if not reasons:
        return []
    from fallow.slurm.parse import folded

    rows = sorted(reasons.items(), key=lambda item: -len(item[1]))
    return [(reason, len(nodes), folded(nodes)) for reason, nodes in rows]


def _show_unused(snapshot: Snapshot) -> None:
    rows = unused(snapshot)
    if not rows:
        return
    click.echo()
    show_table(
        ["IDLE", "WHY NOT USED", "NODELIST"],
        [[str(nodes), reason, names] for reason, nodes, names in rows[:MOST_REASONS]],
    )
    if left := sum(nodes for _, nodes, _ in rows[MOST_REASONS:]):
        click.echo(f"{counted(left, 'node')} more for other reasons; see: fallow status --json")


def _run_row(run: RunView) -> list[str]:
    members = sum(member.rank is not None for member in run.members)
    total = "" if run.total_steps is None else f"/{run.total_steps}"
    return [
        run.run,
        run.name,
        run.status.value,
        f"{run.min_nodes}:{run.max_nodes}",
        f"{members}/{run.limit}",
        str(run.generation),
        f"{run.step}{total}",
        number(run.loss),
        number(run.samples_per_s) if run.samples_per_s else "-",
        run.change or run.message or "",
    ]


def show_run(run: RunView, now: float) -> None:
    """One run: its row, its members and its jobs. Args: now: by the head's clock, as all times in a view."""
    show_table(
        ["RUN", "NAME", "STATUS", "NODES", "MEMBERS", "GEN", "STEP", "LOSS", "SAMPLES/S", "NOTE"], [_run_row(run)]
    )
    if run.scalars:
        # As the script logs them.
        click.echo(clean("  ".join(f"{name} {number(value)}" for name, value in run.scalars.items())))
    for node, reason in sorted(run.barred.items()):
        click.echo(clean(f"node {node} is barred: {reason}"))
    if run.drained:
        click.echo(clean(f"drained: {', '.join(run.drained)}; to use them again: fallow resume {run.run}"))
    if run.members:
        click.echo()
        show_table(
            ["MEMBER", "NODE", "KIND", "PHASE", "RANK", "STEP", "SHARDS", "S/SHARD", "LEFT", "SEEN"],
            [_member_row(member) for member in run.members],
        )
    if run.allocations:
        click.echo()
        show_table(
            ["TOKEN", "KIND", "STATE", "JOBID", "PARTITION", "NODELIST", "LEFT", "REASON"],
            [
                [
                    one.token,
                    one.kind.value,
                    one.state.value,
                    one.job_id or "-",
                    one.partition or "-",
                    ",".join(one.nodes) or "-",
                    duration(one.ends_in_s),
                    one.reason,
                ]
                for one in run.allocations
            ],
        )

    if run.deadline_at is not None:
        click.echo()
        click.echo(_deadline_line(run))
    if run.speeds:
        click.echo()
        show_table(
            ["NODES", "STEPS/S", "KNOWN"],
            [
                [str(one.nodes), number(one.steps_per_s), "measured" if one.measured else "foretold"]
                for one in run.speeds
            ],
        )
        if run.target is not None:
            click.echo(f"harvested nodes it should have now: {run.target}")

    if run.checkpoints:
        click.echo()
        show_table(
            ["CHECKPOINT", "STATE", "AGE", "SIZE", "KEPT", "PATH"],
            [
                [
                    f"step {one.step}",
                    one.state.value,
                    duration(now - one.written_at),
                    size(one.nbytes),
                    "by hand" if one.asked else "",
                    one.path + (f" ({one.problem})" if one.problem else ""),
                ]
                for one in run.checkpoints
            ],
        )


def _deadline_line(run: RunView) -> str:
    if run.ahead_s is None:
        stands = "its pace is not known yet"
    elif run.ahead_s < 0:
        stands = f"behind its schedule by {duration(-run.ahead_s)}"
    else:
        stands = f"ahead of its schedule by {duration(run.ahead_s)}"
    return f"deadline {moment(run.deadline_at or 0.0)}: {stands}"


def ranks(member: MemberView) -> str:
    """Of all its workers."""
    if member.rank is None:
        return "-"
    return str(member.rank) if member.workers == 1 else f"{member.rank}-{member.rank + member.workers - 1}"


def _member_row(member: MemberView) -> list[str]:
    return [
        member.member,
        member.node,
        member.allocation.value,
        member.phase.value,
        ranks(member),
        str(member.step),
        str(member.shards) if member.shards else "-",
        number(member.pace_s) if member.pace_s else "-",
        duration(member.ends_in_s),
        f"{member.last_seen_s:.1f}s",
    ]


def show_report(found: RunReport) -> None:
    """A finished (or running) run in a few lines and a row per generation."""
    if found.traceback:
        click.echo(clean_output(found.traceback, 20_000).rstrip())
    samples, planned, unplanned = found.samples, found.pause_s.planned, found.pause_s.unplanned
    click.echo(clean(f"run {found.run}: {found.status.value} after {found.steps} steps {found.message}".rstrip()))
    click.echo(f"samples: {samples.consumed} consumed, {samples.lost} lost, {samples.duplicated} duplicated")
    if samples.unknown:
        click.echo(f"the audit is incomplete: {samples.unknown} samples are unknown, the disk was full")
    click.echo(clean(f"final loss {number(found.final_loss)}, digest {found.final_digest or '-'}"))
    click.echo(
        f"pauses: planned p50 {number(planned.p50)} s, p95 {number(planned.p95)} s; "
        f"unplanned p50 {number(unplanned.p50)} s, p95 {number(unplanned.p95)} s; "
        f"{found.steps_discarded} steps discarded"
    )
    for back in found.rolled_back:
        click.echo(
            f"rolled back by hand from step {back.from_step} to {back.to_step} before generation {back.generation}"
        )
    show_table(
        ["GEN", "KIND", "MEMBERS", "FIRST STEP", "PAUSE", "DRAIN", "GROUP", "STATE", "DATA", "REASON"],
        [
            [
                str(one.generation),
                one.kind.value,
                str(len(one.members)),
                "-" if one.first_step is None else str(one.first_step),
                number(one.pause_s),
                *(number(part) for part in (one.parts.drain, one.parts.group, one.parts.state, one.parts.data)),
                one.reason,
            ]
            for one in found.generations
        ],
    )
