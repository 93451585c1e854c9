"""Commands with which an operator changes a run."""

from collections.abc import Callable
from typing import Any

import click

from fallow.cli.common import Finite, ask, json_option, moment, show_items, tell
from fallow.control.protocol import Pruned
from fallow.model import Exit, FallowError
from fallow.text import clean, counted, quote

DAY_S = 86_400.0


def _run_command(short_help: str) -> Callable[[Callable[..., None]], click.Command]:
    """Decorator for a command whose first argument is RUN, with the option --json."""

    def make(function: Callable[..., None]) -> click.Command:
        return click.command(short_help=short_help)(click.argument("run")(json_option(function)))

    return make


def _print_result(as_json: bool, text: str, **result: Any) -> None:
    tell(result, as_json, lambda _: click.echo(clean(text)))


@_run_command("Let a run have more members.")
@click.option("--by", type=click.IntRange(min=1), default=1, show_default=True, help="How many nodes more.")
def grow(run: str, by: int, as_json: bool) -> None:
    """Raise the number of nodes that RUN may have, up to its maximum."""
    limit = ask("grow", run=run, by=by)
    _print_result(as_json, f"run {run}: up to {counted(limit, 'node')}", run=run, limit=limit)


@_run_command("Let a run have fewer members.")
@click.option("--by", type=click.IntRange(min=1), help="How many nodes fewer.  [default: 1]")
@click.option(
    "--member", "members", multiple=True, help="Release this member, e.g. n3; may be repeated. Instead of --by."
)
def shrink(run: str, by: int | None, members: tuple[str, ...], as_json: bool) -> None:
    """Release members of RUN at the next step boundary: the youngest, or those given with --member."""
    if members and by is not None:
        raise FallowError(
            f"run {quote(run)}: --by counts the youngest members, --member names them; give one of the two",
            Exit.USAGE,
        )
    if members:
        ask("release", run=run, members=list(members))
        _print_result(as_json, f"run {run}: releasing {', '.join(members)}", run=run, members=list(members))
    else:
        limit = ask("shrink", run=run, by=by or 1)
        _print_result(as_json, f"run {run}: up to {counted(limit, 'node')}", run=run, limit=limit)


@_run_command("Give nodes back.")
@click.argument("nodes", nargs=-1, required=True)
def drain(run: str, nodes: tuple[str, ...], as_json: bool) -> None:
    """Give NODES of RUN back, and do not use them again until `fallow resume RUN`.

    Node lists may be folded, e.g. n[01-04].
    """
    names = unfold(nodes)
    if not names:
        raise FallowError(
            f"run {quote(run)}: no node is given; `fallow status {quote(run)}` lists the nodes of the run", Exit.USAGE
        )
    ask("drain", run=run, nodes=names)
    _print_result(
        as_json,
        f"run {run}: giving back {', '.join(names)}; not asked for again until: fallow resume {run}",
        run=run,
        nodes=names,
    )


@_run_command("Harvest nothing for a run until it is resumed.")
def pause(run: str, as_json: bool) -> None:
    """Give all harvested nodes of RUN back, and request no nodes until `fallow resume`.

    The base job keeps its nodes and trains on. If it ends, it is not submitted again while the run is paused. A run
    without a base job writes a checkpoint and waits. A run stays paused when the head is started again.
    """
    ask("pause", run=run)
    _print_result(
        as_json, f"run {run}: paused; harvested nodes are given back, the base job goes on", run=run, paused=True
    )


@_run_command("Harvest again for a paused run.")
def resume(run: str, as_json: bool) -> None:
    """Request nodes for RUN again: after `fallow pause` or `drain`, or after refusals or failed jobs stopped that."""
    ask("resume", run=run)
    _print_result(as_json, f"run {run}: resumed; nodes are requested from the next poll on", run=run, paused=False)


@_run_command("Write a durable checkpoint now.")
def checkpoint(run: str, as_json: bool) -> None:
    """Write a durable checkpoint of RUN at its next step boundary. It is kept until somebody deletes it."""
    ask("checkpoint", run=run)
    _print_result(as_json, f"run {run}: a checkpoint will be written at the next step boundary", run=run)


@_run_command("Go back to a checkpoint.")
@click.option("--to", "step", type=click.IntRange(min=0), required=True, help="Step of the checkpoint.")
def rollback(run: str, step: int, as_json: bool) -> None:
    """Take RUN back to one of its checkpoints. `fallow status RUN` lists them.

    Training repeats the steps after the checkpoint. Newer checkpoints are not loaded any more, and stay on disk until
    new checkpoints replace them.
    """
    ask("rollback", run=run, step=step)
    _print_result(as_json, f"run {run}: going back to step {step}", run=run, step=step)


@_run_command("End a run for good.")
def cancel(run: str, as_json: bool) -> None:
    """End RUN: its workers stop and all its jobs are cancelled."""
    ask("cancel", run=run)
    _print_result(as_json, f"run {run}: cancelled", run=run)


@click.command(short_help="Remove the files of old runs.")
@click.argument("runs", nargs=-1)
@click.option("--keep", type=click.IntRange(min=0), help="Keep the newest N ended runs.  [default: [prune] keep, 20]")
@click.option(
    "--older-than", metavar="DAYS", type=Finite(0), help="Only runs that ended at least DAYS days ago.  [default: 30]"
)
@click.option("--checkpoints", is_flag=True, help="Remove their checkpoints and records, too.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; show what would be removed.")
@json_option
def prune(
    runs: tuple[str, ...], keep: int | None, older_than: float | None, checkpoints: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove the files of ended RUNS (full names), or of all runs that are old enough.

    A run with checkpoints keeps them, its record, its script and its report, unless --checkpoints is given. A run
    without checkpoints is removed as a whole: `fallow status` does not show it any more, and `fallow usage` counts it
    under pruned runs. The head also prunes by itself, but never removes checkpoints.
    """
    if runs and (keep is not None or older_than is not None):
        raise FallowError("--keep and --older-than choose runs by age; give names of runs without them", Exit.USAGE)
    pruned = ask(
        "prune",
        list[Pruned],
        runs=list(runs) or None,
        keep=keep,
        older_than_s=None if older_than is None else older_than * DAY_S,
        checkpoints=checkpoints,
        dry_run=dry_run,
    )
    tell(pruned, as_json, lambda runs: _show_pruned(runs, dry_run))


def _show_pruned(pruned: list[Pruned], dry_run: bool) -> None:
    if not pruned:
        click.echo("nothing to prune")
        return
    columns: dict[str, Callable[[Pruned], str]] = {
        "RUN": lambda one: one.run,
        "NAME": lambda one: one.name,
        "ENDED": lambda one: moment(one.ended_at),
        "WOULD GO" if dry_run else "REMOVED": lambda one: "logs, ledgers" if one.checkpoints_kept else "everything",
        "CHECKPOINTS KEPT": lambda one: str(one.checkpoints_kept),
    }
    show_items(columns, pruned)


def unfold(nodes: tuple[str, ...]) -> list[str]:
    """Node names of folded lists such as n[01-04], in order, each once."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    from fallow.slurm.parse.values import MOST_NODES, most_names

    names: dict[str, None] = {}
    for word in nodes:
        if most_names(word) > MOST_NODES:
            raise FallowError(f"{word[:64]!r}: names more than {MOST_NODES} nodes", Exit.USAGE)
        try:
            names |= dict.fromkeys(NodeSet(word, resolver=RESOLVER_NOGROUP))
        except NodeSetException as error:
            raise FallowError(f"{word[:64]!r} is no node list ({error}); e.g. n[01-04],n7", Exit.USAGE) from error
    return list(names)
