"""Checkpoints on disk, as the head sees them: those that nobody could tell it of, and those that go."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import msgspec
import structlog

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Checkpoint, Report
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
from fallow.model import ChangeKind, FallowError
from fallow.worker.checkpoint.manifest import REMOVED, announcement, complete_ones, read_manifest

log = structlog.get_logger("fallow.head")


def adopt(turn: Turn) -> None:
    """Learn of checkpoints that nobody could tell of: as a head begins, and when a run has lost its last member."""
    unseen: list[Run] = []
    for run in turn.book.current.values():
        was_empty, run.is_empty = run.is_empty, not run.roster.present()
        if was_empty is None or run.is_empty > was_empty:
            unseen.append(run)
    turn.for_each(unseen, "checkpoints on disk", lambda run: _adopt_run(turn, run))


def _adopt_run(turn: Turn, run: Run) -> None:
    if run.ended:
        return
    known = {saved.checkpoint.path for saved in run.roster.checkpoints.saved}
    try:
        folders = complete_ones(turn.book.checkpoint_folder(run))
    except OSError as error:  # a file system that failed may be why the members are lost
        log.warning("checkpoints.unseen", run=run.id, error=str(error))
        return
    for folder in folders:
        if str(folder) in known:
            continue
        try:
            manifest, digest = read_manifest(folder)
            # What is out of bounds could be written to the store, and not be read from there.
            found = msgspec.convert(msgspec.to_builtins(announcement(folder, manifest, digest)), Checkpoint)
        except (FallowError, msgspec.ValidationError) as error:
            turn.record(run, "damaged", str(error), path=str(folder))
            continue
        found = msgspec.structs.replace(found, written_at=min(turn.now, found.written_at))
        turn.apply(run, ev.Found(at=turn.at, checkpoint=found))


def by_this_clock(run: Run, report: Report, now: float) -> Report:
    """The report, with the time of its newest checkpoint's snapshot by this host's clock (`now`: Unix time).

    Nodes' clocks differ, and all that is shown is by the head's. It is told at once, but for one that was finished
    while no head was there.
    """
    new = report.saved
    if new is None or any(saved.checkpoint.path == new.path for saved in run.roster.checkpoints.saved):
        return report
    new = msgspec.structs.replace(new, written_at=max(0.0, now - new.took_s))
    return msgspec.structs.replace(report, saved=new)


def due_in_s(run: Run, every_s: float, now: float) -> float | None:
    """Seconds until the members have to begin the next periodic checkpoint; None: there are none."""
    if not every_s:
        return None
    change = run.root.change
    is_empty = not any(map(run.roster.alive, run.roster.members))
    if is_empty or (change is not None and change.kind is ChangeKind.START):
        return every_s  # it is about to begin, with nothing to lose
    return run.record.saving.due_in_s(every_s, now)


def remove(folders: list[str]) -> None:
    """Delete folders, such as checkpoints, beside the main loop: a shared file system takes its time."""
    threading.Thread(target=_remove, args=(list(folders),), name="remove-checkpoints", daemon=True).start()


def _remove(folders: list[str]) -> None:
    for folder in folders:
        path = Path(folder)
        try:
            # Renamed first: a half deleted folder must not look complete.
            path = path.rename(path.with_name(path.name + REMOVED))
            shutil.rmtree(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("checkpoint.remove", path=folder, error=error.strerror)
