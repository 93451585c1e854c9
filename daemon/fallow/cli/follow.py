"""Commands that follow one run: wait for its end, read what its members print, and ask why it does not grow."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from fallow.cli.common import Finite, ask, json_option, print_json
from fallow.cli.show import not_harvested, show_report, unused
from fallow.cli.tables import duration
from fallow.model import Exit, FallowError, NodeOwner, NodeView, RunReport, RunStatus, RunView, Snapshot
from fallow.text import clean, clean_output

_LOOK_S = 0.5
_AWAY_S = 120.0
"""A head that is away for longer is not waited for."""
_CHUNK = 65536


@click.command(short_help="Wait until a run has ended.")
@click.argument("run")
@click.option("--timeout", "timeout_s", type=Finite(0, min_open=True), help="Seconds after which to give up, with 75.")
@json_option
def wait(run: str, timeout_s: float | None, as_json: bool) -> None:
    """Wait until RUN has ended, and show its report.

    Ends with 0 if it is finished, 70 if it failed, 93 if it was cancelled.
    """
    view = _ended(run, timeout_s)
    report = ask("report", RunReport, run=view.run)
    if as_json:
        print_json(report)
    else:
        show_report(report)
    codes = {RunStatus.FINISHED: Exit.OK, RunStatus.FAILED: Exit.SOFTWARE}
    click.get_current_context().exit(codes.get(view.status, Exit.NO_RESTART))


def _ended(run: str, timeout_s: float | None) -> RunView:
    """Waits across a restart of the head."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    known, heard_at = _one(run).run, time.monotonic()
    while True:
        view = None
        try:
            view, heard_at = _one(known), time.monotonic()
        except FallowError as error:
            if error.code != Exit.UNAVAILABLE or time.monotonic() > heard_at + _AWAY_S:
                raise
        if view is not None and view.status.ended:
            return view
        _check_time(deadline, view)
        time.sleep(_LOOK_S)


def _check_time(deadline: float | None, view: RunView | None) -> None:
    if deadline is not None and time.monotonic() > deadline:
        how = "the head is away" if view is None else f"run {view.run} is {view.status} at step {view.step}"
        raise FallowError(f"{how}: it has not ended within the time of --timeout", Exit.TEMPFAIL)


def _one(run: str) -> RunView:
    return ask("status", Snapshot, run=run).runs[0]


@click.command(short_help="What a run's members print.")
@click.argument("run")
@click.option("--member", help="A member, or one of its workers: n3, n3.1. Without it the main member.")
@click.option("--follow", "-f", "following", is_flag=True, help="Go on with new output until the run has ended.")
def logs(run: str, member: str | None, following: bool) -> None:
    """Print what a member of RUN has written to its standard output and error."""
    from fallow.files import Paths

    view = _one(run)
    folder = Paths.default().run(view.run).logs
    path = _log(folder, view, member)
    with path.open("rb") as log:
        while True:
            ended = not following or _one(view.run).status.ended
            while data := log.read(_CHUNK):
                sys.stdout.write(clean_output(data.decode(errors="replace"), len(data)))
            sys.stdout.flush()
            if ended:
                return
            time.sleep(_LOOK_S)


def _log(folder: Path, view: RunView, member: str | None) -> Path:
    there = sorted(path.stem for path in folder.glob("n*.log"))
    if member is None:
        member = next((one.member for one in view.members if one.rank == 0), "") or _last_main(view.run)
    found = [name for name in there if name in (member, f"{member}.0")]
    if not found:
        known = ", ".join(there) or "none"
        raise FallowError(
            f"run {view.run}: no output of {member or 'any member'} in {folder}; there is: {known}", Exit.NOINPUT
        )
    return folder / f"{found[0]}.log"


def _last_main(run: str) -> str:
    generations = ask("report", RunReport, run=run).generations
    return generations[-1].members[0] if generations else ""


@click.command(short_help="Why a run does not grow, or why a node is not used.")
@click.argument("name", metavar="RUN|NODE")
@json_option
def why(name: str, as_json: bool) -> None:
    """Say why RUN has no more nodes than it has, or why NODE is not used."""
    snapshot = ask("status", Snapshot)
    node = next((one for one in snapshot.nodes if one.node == name), None)
    try:
        reasons = _of_node(node) if node is not None else _of_run(_one(name), snapshot)
    except FallowError as error:
        if error.code != Exit.NOINPUT:
            raise
        raise FallowError(f"{name}: neither a run (`fallow status` lists them) nor a node", Exit.NOINPUT) from None
    if as_json:
        print_json({"name": name, "reasons": reasons})
        return
    for reason in reasons:
        click.echo(clean(reason))


def _of_node(node: NodeView) -> list[str]:
    left = f", for another {duration(node.ends_in_s)}" if node.ends_in_s is not None else ""
    match node.owner:
        case NodeOwner.OURS:
            return [f"{node.node} is used by run {node.run}{left}"]
        case NodeOwner.OTHERS:
            return [f"{node.node} is used by somebody else{left}"]
        case NodeOwner.PLANNED:
            return [f"{node.node} is planned for somebody else: {node.unused or node.state}"]
        case NodeOwner.DOWN:
            return [f"{node.node} is not available: Slurm says {node.state}"]
    return [f"{node.node} is idle: {node.unused or 'the next plan may use it'}"]


def _of_run(run: RunView, snapshot: Snapshot) -> list[str]:
    members = sum(member.rank is not None for member in run.members)
    reasons = [f"run {run.run} is {run.status}, with {members} of at most {run.limit} nodes"]
    if run.status.ended:
        return reasons + [run.message] * bool(run.message)
    if members >= run.limit:
        reasons.append("it has as many nodes as it may have; `fallow grow` moves the limit")
    elif members >= run.useful:
        reasons.append("a step has no more shards than its nodes already compute")
    reasons += [text for text in (run.change, run.message, run.paused, *run.without_agent) if text]
    reasons += not_harvested(snapshot.head)
    reasons += [f"node {node} is barred: {text}" for node, text in sorted(run.barred.items())]
    reasons += [f"{nodes} idle ({names}): {text}" for text, nodes, names in unused(snapshot)]
    return list(dict.fromkeys(reasons))
