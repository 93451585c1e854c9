"""Commands that follow a run: its events, its output, why it does not grow, and its end."""

import codecs
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import click

from fallow.cli.common import Finite, ask, duration, json_option, json_text, moment, say, tell
from fallow.cli.show import newest_first, not_harvested, show_report, unused
from fallow.control.client import MOST_EVENTS, TIMEOUT_S, WATCH_S
from fallow.files import Paths
from fallow.model import EventRecord, Exit, FallowError, NodeOwner, NodeView, RunReport, RunStatus, RunView, Snapshot
from fallow.model.bounds import MOST
from fallow.text import clean, clean_output

T = TypeVar("T")

_ABSENCE_S = 120.0
"""Seconds to wait for a head that cannot be reached."""
_ABSENCE_CODES = (Exit.UNAVAILABLE, Exit.TEMPFAIL)
"""Exit codes of requests to a head that restarts, has stopped or is overloaded."""
_NOT_ENDED = "the run has not ended within --timeout"
_CHUNK = 65536
_ESCAPE_FACTOR = 10
"""Most characters that one character of the output may become when it is escaped. Output is never cut."""


@click.command(short_help="What happened.")
@click.argument("run", required=False)
@click.option("--since", type=click.IntRange(0, MOST), default=0, help="Only events with a higher number.")
@click.option(
    "--limit",
    type=click.IntRange(1, MOST_EVENTS),
    default=100,
    show_default=True,
    help="Show the last N events.",
    metavar="N",
)
@click.option("--follow", "-f", "follow", is_flag=True, help="Show new events, too, until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array; with --follow one JSON value per line.")
def events(run: str | None, since: int, limit: int, follow: bool, as_json: bool) -> None:
    """Show the events of all runs, or of one RUN."""
    newest = 0
    if follow and run is not None:
        snapshot = ask("status", Snapshot, run=run)
        run, newest = snapshot.runs[0].run, snapshot.last_event
    records = ask("events", list[EventRecord], run=run, since=since, limit=limit)
    if not follow:
        tell(records, as_json, _show_events)
    while follow:
        _show_events([event for event in records if run in (None, event.run)], as_json)
        since = max([since, newest, *(event.seq for event in records)])
        time.sleep(WATCH_S)
        # Ask for the events of all runs even for one run: the head then reads new events only, not all that it keeps.
        records = _ask_patiently(partial(ask, "events", list[EventRecord], since=since, limit=MOST_EVENTS))


def _ask_patiently(request: Callable[[], T], end_at: float = math.inf) -> T:
    """Repeat a request until the head answers, so that a restart of the head does no harm.

    Raises:
        FallowError: the head refuses, or cannot be reached for `_ABSENCE_S`, or at `end_at` (time.monotonic()).
    """
    absence_end_at = time.monotonic() + _ABSENCE_S
    while True:
        try:
            return request()
        except FallowError as error:
            if error.code not in _ABSENCE_CODES or time.monotonic() > absence_end_at:
                raise
            if time.monotonic() > end_at:
                raise FallowError(f"the head cannot be reached; {_NOT_ENDED}", Exit.TEMPFAIL) from error
        time.sleep(WATCH_S)


def _show_events(records: list[EventRecord], as_json: bool = False) -> None:
    for event in records:
        run, kind, text = clean(event.run or "-"), clean(event.kind), clean(event.text)
        line = f"{event.seq:>6}  {moment(event.at)}  {run:<20}  {kind:<10}  {text}"
        sys.stdout.write((json_text(event, indent=-1) if as_json else line) + "\n")
    sys.stdout.flush()


@click.command(short_help="Wait until a run has ended.")
@click.argument("run")
@click.option(
    "--timeout", "timeout_s", type=Finite(0, min_open=True), help="Seconds after which to give up, with exit code 75."
)
@json_option
def wait(run: str, timeout_s: float | None, as_json: bool) -> int:
    """Wait until RUN has ended, and show its report.

    Exit code: 0 if the run is finished, 70 if it failed, 93 if it was cancelled.
    """
    end_at = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    view = _run_view(run)
    while not view.status.ended:
        if time.monotonic() > end_at:
            text = f"run {view.run} is {view.status} at step {view.step}: {_NOT_ENDED}"
            raise FallowError(text, Exit.TEMPFAIL)
        time.sleep(WATCH_S)
        view = _ask_patiently(partial(_run_view, view.run), end_at)
    tell(_ask_patiently(partial(ask, "report", RunReport, run=view.run)), as_json, show_report)
    codes = {RunStatus.FINISHED: Exit.OK, RunStatus.FAILED: Exit.SOFTWARE}
    return codes.get(view.status, Exit.NO_RESTART)


def _run_view(run: str) -> RunView:
    return ask("status", Snapshot, run=run).runs[0]


@click.command(short_help="What a run's members print.")
@click.argument("run", required=False)
@click.option("--member", help="A member, or one of its workers: n3, n3.1. Default: the main member.")
@click.option("--follow", "-f", "follow", is_flag=True, help="Show new output, too, until the run has ended.")
def logs(run: str | None, member: str | None, follow: bool) -> None:
    """Print the standard output and error of a member of RUN, or of the newest run, if possible one that is active."""
    view = _run_view(run) if run is not None else _current_run()
    path = _log_path(Paths.default().run(view.run).logs, view, member)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(log: BinaryIO) -> None:
        while data := log.read(_CHUNK):
            text = decoder.decode(data)
            sys.stdout.write(clean_output(text, _ESCAPE_FACTOR * len(text)))
        sys.stdout.flush()

    with contextlib.ExitStack() as files:
        log = files.enter_context(path.open("rb"))
        with contextlib.suppress(FileNotFoundError):
            full_log = files.enter_context(path.with_name(f"{path.name}.1").open("rb"))
            # An agent may have renamed the log since it was opened: then this is the same file.
            if not os.path.sameopenfile(full_log.fileno(), log.fileno()):
                show(full_log)
        while True:
            has_ended = not follow or _ask_patiently(partial(_run_view, view.run)).status.ended
            is_replaced = _has_been_replaced(log, path)
            show(log)
            if is_replaced:
                log = files.enter_context(path.open("rb"))
            elif has_ended:
                return
            else:
                time.sleep(WATCH_S)


def _current_run() -> RunView:
    runs = newest_first(ask("status", Snapshot).runs)
    if not runs:
        raise FallowError("there is no run; start one with: fallow submit --nodes=MIN:MAX SCRIPT", Exit.NOINPUT)
    say(f"output of run {runs[0].run}")
    return runs[0]


def _has_been_replaced(log: BinaryIO, path: Path) -> bool:
    """True if the agent has renamed a full log to `.1` and started a new one (`agent.output`)."""
    try:
        return not os.path.samestat(os.fstat(log.fileno()), path.stat())
    except FileNotFoundError:
        return False  # the new log does not exist yet


def _log_path(folder: Path, view: RunView, member: str | None) -> Path:
    members_with_log = sorted(path.stem for path in folder.glob("n*.log"))
    if member is None:
        main = next((one.member for one in view.members if one.rank == 0), "") or _last_main(view.run)
        # A run that has not trained has no main member: show the first member with output.
        member = main or next(iter(members_with_log), "")
    matches = [name for name in members_with_log if name in (member, f"{member}.0")]
    if not matches:
        choices = ", ".join(members_with_log) or "none"
        raise FallowError(
            f"run {view.run}: no output of {member or 'any member'} in {folder}; there is: {choices}", Exit.NOINPUT
        )
    return folder / f"{matches[0]}.log"


def _last_main(run: str) -> str:
    generations = ask("report", RunReport, run=run, count=False, timeout_s=TIMEOUT_S).generations
    return generations[-1].members[0] if generations else ""


@click.command(short_help="Why a run does not grow, or why a node is not used.")
@click.argument("name", metavar="RUN|NODE")
@json_option
def why(name: str, as_json: bool) -> None:
    """Say why RUN does not get more nodes, or why NODE is not used."""
    snapshot = ask("status", Snapshot)
    node = next((one for one in snapshot.nodes if one.node == name), None)
    try:
        reasons = _node_reasons(node) if node is not None else _run_reasons(_run_view(name), snapshot)
    except FallowError as error:
        if error.code != Exit.NOINPUT:
            raise
        raise FallowError(f"{name}: neither a run (`fallow status` lists them) nor a node", Exit.NOINPUT) from None
    tell({"name": name, "reasons": reasons}, as_json, lambda _: click.echo("\n".join(clean(one) for one in reasons)))


def _node_reasons(node: NodeView) -> list[str]:
    remaining = f", for another {duration(node.ends_in_s)}" if node.ends_in_s is not None else ""
    match node.owner:
        case NodeOwner.OURS:
            return [f"{node.node} is used by run {node.run}{remaining}"]
        case NodeOwner.OTHERS:
            return [f"{node.node} is used by somebody else{remaining}"]
        case NodeOwner.PLANNED:
            return [f"{node.node} is planned for somebody else: {node.unused or node.state}"]
        case NodeOwner.DOWN:
            return [f"{node.node} is not available: Slurm says {node.state}"]
    return [f"{node.node} is idle: {node.unused or 'the next plan may use it'}"]


def _run_reasons(run: RunView, snapshot: Snapshot) -> list[str]:
    members = len(run.training)
    reasons = [f"run {run.run} is {run.status}, with {members} of at most {run.limit} nodes"]
    if run.status.ended:
        return reasons + [run.message] * bool(run.message)
    if members >= run.limit:
        by_hand = run.limit < run.max_nodes
        reasons.append("it has reached its limit of nodes" + "; `fallow grow` raises the limit" * by_hand)
    elif members >= run.useful:
        reasons.append("more nodes would not help: a step has too few shards for them")
    reasons += [text for text in (run.change, run.message, run.paused, *run.without_agent) if text]
    reasons += not_harvested(snapshot.head)
    reasons += [f"node {node} is barred: {text}" for node, text in sorted(run.barred.items())]
    reasons += [f"{nodes} idle ({names}): {text}" for text, nodes, names in unused(snapshot)]
    return list(dict.fromkeys(reasons))
