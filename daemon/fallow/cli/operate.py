"""Commands that change something at the head."""

from collections.abc import Callable
from typing import Any

import click

from fallow.cli.common import Finite, ask, json_option, moment, show_items, tell
from fallow.control.protocol import Pruned
from fallow.model import Exit, FallowError
from fallow.text import clean, counted, quote

DAY_S = 86_400.0


def _of_run(short_help: str) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a command whose first argument is RUN, and which has --json."""

    def make(function: Callable[..., None]) -> click.Command:
        return click.command(short_help=short_help)(click.argument("run")(json_option(function)))

    return make


def _done(as_json: bool, text: str, **result: Any) -> None:
    tell(result, as_json, lambda _: click.echo(clean(text)))


@_of_run("Let a run have more members.")
@click.option("--by", type=click.IntRange(min=1), default=1, show_default=True, help="How many nodes more.")
def grow(run: str, by: int, as_json: bool) -> None:
    """Raise the number of nodes that RUN may have, up to its maximum."""
    limit = ask("grow", run=run, by=by)
    _done(as_json, f"run {run}: up to {counted(limit, 'node')}", run=run, limit=limit)


@_of_run("Let a run have fewer members.")
@click.option("--by", type=click.IntRange(min=1), help="How many nodes fewer.  [default: 1]")
@click.option(
    "--member", "members", multiple=True, help="Release this member, e.g. n3; may be repeated. Instead of --by."
)
def shrink(run: str, by: int | None, members: tuple[str, ...], as_json: bool) -> None:
    """Release members of RUN at the next step boundary: the youngest, or those that are named."""
    if members and by is not None:
        raise FallowError(
            f"run {quote(run)}: --by counts the youngest members, --member names them; give one of the two",
            Exit.USAGE,
        )
    if members:
        ask("release", run=run, members=list(members))
        _done(as_json, f"run {run}: releasing {', '.join(members)}", run=run, members=list(members))
    else:
        limit = ask("shrink", run=run, by=by or 1)
        _done(as_json, f"run {run}: up to {counted(limit, 'node')}", run=run, limit=limit)


@_of_run("Give nodes back.")
@click.argument("nodes", nargs=-1, required=True)
def drain(run: str, nodes: tuple[str, ...], as_json: bool) -> None:
    """Give NODES of RUN back, and do without them until `fallow resume RUN`.

    Node lists may be folded, e.g. n[01-04].
    """
    names = unfold(nodes)
    if not names:
        raise FallowError(
            f"run {quote(run)}: no node is named; `fallow status {quote(run)}` lists those it holds",
            Exit.USAGE,
        )
    ask("drain", run=run, nodes=names)
    _done(
        as_json,
        f"run {run}: giving back {', '.join(names)}; not asked for again until: fallow resume {run}",
        run=run,
        nodes=names,
    )


@_of_run("Harvest nothing for a run until it is resumed.")
def pause(run: str, as_json: bool) -> None:
    """Give all harvested nodes of RUN back and ask for no new ones until `fallow resume`.

    Its base job keeps its nodes and trains on; when it ends, it is not submitted again while the run is paused. A run
    without a base job writes a checkpoint and waits. A paused run stays paused when the head is started again.
    """
    ask("pause", run=run)
    _done(as_json, f"run {run}: paused; harvested nodes are given back, the base job goes on", run=run, paused=True)


@_of_run("Harvest again for a paused run.")
def resume(run: str, as_json: bool) -> None:
    """Ask for nodes for RUN again: after `fallow pause` or `drain`, or where refusals or failing jobs stopped it."""
    ask("resume", run=run)
    _done(as_json, f"run {run}: resumed; nodes are asked for from the next poll on", run=run, paused=False)


@_of_run("Write a durable checkpoint now.")
def checkpoint(run: str, as_json: bool) -> None:
    """Ask RUN for a durable checkpoint at its next step boundary. It is kept until it is deleted by hand."""
    ask("checkpoint", run=run)
    _done(as_json, f"run {run}: a checkpoint will be written at the next step boundary", run=run)


@_of_run("Go back to a checkpoint.")
@click.option("--to", "step", type=click.IntRange(min=0), required=True, help="Step of a usable checkpoint.")
def rollback(run: str, step: int, as_json: bool) -> None:
    """Take RUN back to its checkpoint of a step, which `fallow status RUN` lists; training goes on from there.

    Steps after it are done again. Newer checkpoints are set aside: they are not loaded any more, and stay on disk until
    new ones take their place.
    """
    ask("rollback", run=run, step=step)
    _done(as_json, f"run {run}: going back to step {step}", run=run, step=step)


@_of_run("End a run for good.")
def cancel(run: str, as_json: bool) -> None:
    """End RUN: its workers stop and all its jobs are cancelled."""
    ask("cancel", run=run)
    _done(as_json, f"run {run}: cancelled", run=run)


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
    """Remove what ended RUNS, named in full, have left, or all runs that are old enough.

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
    tell(found, as_json, lambda found: _show_pruned(found, dry_run))


def _show_pruned(found: list[Pruned], dry_run: bool) -> None:
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


def unfold(nodes: tuple[str, ...]) -> list[str]:
    """Node names of folded lists, in order, each once."""
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
