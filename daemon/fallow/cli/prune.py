"""`fallow prune`: what ended runs have left."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from fallow.cli.common import ask, json_option, tell
from fallow.cli.tables import moment, show_items
from fallow.control.protocol import Pruned
from fallow.model import Exit, FallowError

UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


@click.command(short_help="Remove what old runs have left.")
@click.argument("runs", nargs=-1)
@click.option("--keep", type=click.IntRange(min=0), help="Leave the newest N ended runs.  [default: [prune] keep, 20]")
@click.option("--older-than", metavar="AGE", help="Only runs that ended so long ago: 36h, 14d, 4w.  [default: 30d]")
@click.option("--checkpoints", is_flag=True, help="Their checkpoints, too, and what is known of them.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; show what would be.")
@json_option
def prune(
    runs: tuple[str, ...], keep: int | None, older_than: str | None, checkpoints: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove what ended RUNS have left, or all runs that are old enough.

    A run that has checkpoints keeps them, its record, its script and its report, unless --checkpoints is given. A run
    without checkpoints goes as a whole: `fallow status` does not show it any more, and `fallow usage` has it in the
    sums of pruned runs. The head does the same by itself, and never removes checkpoints.
    """
    if runs and (keep is not None or older_than is not None):
        raise FallowError("--keep and --older-than choose runs, and so do names; give one of the two", Exit.USAGE)
    params: dict[str, Any] = {"checkpoints": checkpoints, "dry_run": dry_run}
    params |= {"runs": list(runs)} if runs else {}
    params |= {} if keep is None else {"keep": keep}
    params |= {} if older_than is None else {"older_than_s": seconds(older_than)}
    tell(ask("prune", list[Pruned], **params), as_json, lambda found: _show(found, dry_run))


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


def seconds(text: str) -> float:
    """`14d`, `36h`, `90m` or `4w` in seconds.

    Raises:
        FallowError: it is none.
    """
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    if match is None:
        raise FallowError(f"--older-than {text[:32]!r}: give an age as 36h, 14d or 4w", Exit.USAGE)
    return int(match[1]) * UNITS_S[match[2]]
