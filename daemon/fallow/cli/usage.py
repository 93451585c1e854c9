"""`fallow usage`: node-hours that runs used, what was wasted and why, and the effect on other users and the owner."""

import re
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta

import click

from fallow.cli.common import ask, json_option, show_items, tell
from fallow.model import PRUNED, Amount, Exit, FallowError, LimitView, OwnerView, Source, UsageReport, UsageRow
from fallow.text import clean

WHAT = {
    Source.START_UP: "from the start of a job until its node was a member",
    Source.HAND_OVER: "pauses for changes of the membership",
    Source.DISCARDED: "steps that were repeated after a kill",
    Source.STANDBY: "ready, but not needed",
    Source.DRAINED: "from the last step until Slurm had the node back",
    Source.CUT_SHORT: "ended by Slurm (preemption, walltime, node failure) before the first step",
    Source.NOTHING: "jobs that ended, or that Fallow cancelled, before the first step",
}

LIMITS: dict[str, Callable[[LimitView], str]] = {
    "LIMIT OF": lambda limit: limit.of,
    "LIMIT": lambda limit: limit.name,
    "AT MOST": lambda limit: f"{limit.limit:g}",
    "USED": lambda limit: "per job" if limit.used is None else f"{limit.used:g}",
}


@click.command(short_help="What runs used, and what was wasted.")
@click.argument("run", required=False)
@click.option("--since", metavar="DAY", help="Only from this day on (UTC): 2026-01-31, or 7d for the last seven days.")
@click.option("--by", type=click.Choice(["run", "project", "day"]), default="run", show_default=True)
@json_option
def usage(run: str | None, since: str | None, by: str, as_json: bool) -> None:
    """Show where the time went that Slurm allocated to all runs, or to one RUN.

    Every node-second is counted once: trained in a base job, trained in a harvested one, or wasted, by cause. A project
    is the Slurm account that the run was submitted with. Prices are set under [usage] in the configuration.
    """
    day = None if since is None else first_day(since, time.time())
    tell(ask("usage", UsageReport, by=by, run=run, since=day), as_json, show_usage)


def first_day(text: str, now: float) -> str:
    """First day, as `YYYY-MM-DD`, of a period that is given as a date or as `Nd`: the last N days, with today.

    Raises:
        FallowError: the text is neither.
    """
    try:
        if match := re.fullmatch(r"(\d{1,5})d", text):
            today = datetime.fromtimestamp(now, UTC).date()
            return (today - timedelta(days=max(0, int(match[1]) - 1))).isoformat()
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise FallowError(f"--since {text[:32]!r}: give a day as 2026-01-31, or 7d", Exit.USAGE) from None


def show_usage(report: UsageReport) -> None:
    """Print the table, the causes of waste, the delays of other users and the owner's limits."""
    if not report.rows:
        click.echo(clean("nothing used" + (f" since {report.since}" if report.since else " yet")))
    else:
        _show_rows(report)
    delays = report.others_delayed
    if delays is not None:
        click.echo(
            f"\nother users' jobs that waited for a node to be returned: {delays.jobs}"
            + (f", p95 {delays.p95_s:.1f} s, longest {delays.max_s:.1f} s" if delays.jobs else "")
        )
    if report.owner is not None:
        _show_owner(report.owner)


def _show_rows(report: UsageReport) -> None:
    """Print a row for each run, project or day, and the causes of waste."""
    total = report.total
    has_cost = total.allocated.cost is not None
    columns: dict[str, Callable[[UsageRow], str]] = {
        report.by.upper(): lambda row: "pruned runs" if row.key == PRUNED else row.key,
        "ALLOCATED": lambda row: _hours(row.allocated.node_s),
        "BASE": lambda row: _hours(row.base.node_s),
        "HARVESTED": lambda row: _hours(row.harvested.node_s),
        "WASTED": _wasted,
        "GPU-HOURS": lambda row: _hours(row.allocated.gpu_s),
        "JOBS": lambda row: str(row.jobs),
        "USELESS": lambda row: str(row.useless_jobs),
    }
    if has_cost:
        columns[f"COST {report.currency}".strip()] = lambda row: _cost(row.allocated)
    if any(row.budget_node_s is not None for row in report.rows):
        columns["BUDGET"] = lambda row: _hours(row.budget_node_s)
        columns["LEFT"] = lambda row: _hours(row.budget_left_s)
    click.echo(clean(f"node-hours by {report.by}" + (f", since {report.since} (UTC)" if report.since else "")))
    show_items(columns, report.rows if len(report.rows) == 1 else [*report.rows, total])
    if total.causes:
        causes: dict[str, Callable[[tuple[Source, Amount]], str]] = {
            "CAUSE": lambda item: item[0].value.replace("_", "-"),
            "NODE-HOURS": lambda item: _hours(item[1].node_s),
            "GPU-HOURS": lambda item: _hours(item[1].gpu_s),
            **({"COST": lambda item: _cost(item[1])} if has_cost else {}),
            "WHAT": lambda item: WHAT[item[0]],
        }
        click.echo("\nwasted, by cause")
        show_items(causes, sorted(total.causes.items(), key=lambda item: -item[1].node_s))


def _wasted(row: UsageRow) -> str:
    share = f" ({row.wasted.node_s / row.allocated.node_s:.0%})" if row.allocated.node_s else ""
    return _hours(row.wasted.node_s) + share


def _hours(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    hours = max(0.0, seconds) / 3600.0
    return f"{hours:.1f}" if hours >= 100 else f"{hours:.3f}"


def _cost(amount: Amount) -> str:
    return "-" if amount.cost is None else f"{amount.cost:.2f}"


def _show_owner(owner: OwnerView) -> None:
    click.echo(
        "\n" + clean(f"limits and shares of {owner.user} in Slurm's accounting" if owner.user else "limits and shares")
    )
    if owner.limits:
        show_items(LIMITS, owner.limits)
    for share in owner.shares:
        where = f" in {share.partition}" if share.partition else ""
        click.echo(
            clean(
                f"fair share of account {share.account}{where}: {share.shares:.3g} of the machine, used "
                f"{share.usage:.3g}; factor {share.factor:.2f} of 1"
            )
        )
    for job in owner.priorities:
        parts = ", ".join(f"{name} {value:g}" for name, value in job.factors.items())
        click.echo(clean(f"job {job.job_id} waits with priority {job.priority:g}" + (f" ({parts})" if parts else "")))
    for note in owner.notes:
        click.echo(clean(note))
