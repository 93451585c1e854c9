"""`fallow prune`: what ended runs have left."""

from __future__ import annotations

from collections.abc import Callable

import click

from fallow.cli.common import Finite, ask, json_option, tell
from fallow.cli.tables import moment, show_items
from fallow.control.protocol import Pruned
from fallow.model import Exit, FallowError

DAY_S = 86_400.0


@click.command(short_help="Remove what old runs have left.")
@click.argument("runs", nargs=-1)
@click.option("--keep", type=click.IntRange(min=0), help="Leave the newest N ended runs.  [default: [prune] keep, 20]")
@click.option("--older-than", metavar="DAYS", type=Finite(0), help="Only runs that ended so long ago.  [default: 30]")
@click.option("--checkpoints", is_flag=True, help="Their checkpoints, too, and what is known of them.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; show what would be.")
@json_option
def prune(
    runs: tuple[str, ...], keep: int | None, older_than: float | None, checkpoints: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove what ended RUNS have left, or all runs that are old enough.

    A run that has checkpoints keeps them, its record, its script and its report, unless --checkpoints is given. A run
    without checkpoints goes as a whole: `fallow status` does not show it any more, and `fallow usage` has it in the
    sums of pruned runs. The head does the same by itself, and never removes checkpoints.
    """
    if runs and (keep is not None or older_than is not None):
        raise FallowError("--keep and --older-than choose runs, and so do names; give one of the two", Exit.USAGE)
    found = ask(
        "prune",
        list[Pruned],
        runs=list(runs) or None,
        keep=keep,
        older_than_s=None if older_than is None else older_than * DAY_S,
        checkpoints=checkpoints,
        dry_run=dry_run,
    )
    tell(found, as_json, lambda found: _show(found, dry_run))


def _show(found: list[Pruned], dry_run: bool) -> None:
    if not found:
        click.echo("nothing to prune")
        return
    columns: dict[str, Callable[[Pruned], str]] = {
        "RUN": lambda one: one.run,
        "NAME": lambda one: one.name,
        "ENDED": lambda one: moment(one.ended_at),
        "WOULD GO" if dry_run else "REMOVED": lambda one: "logs, ledgers" if one.checkpoints_kept else "everything",
        "CHECKPOINTS KEPT": lambda one: str(one.checkpoints_kept),
    }
    show_items(columns, found)
