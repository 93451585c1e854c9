"""Checkpoints on disk, as the head sees them: those that nobody could tell it of, and those that go."""

import shutil
from collections.abc import Collection
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import msgspec
import structlog

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Checkpoint, Report
from fallow.head.loop.faults import in_thread
from fallow.head.loop.turn import Turn
from fallow.head.state.book import Run
from fallow.model import ChangeKind, FallowError
from fallow.worker.checkpoint.manifest import REMOVED, announcement, complete_checkpoints, read_manifest

log = structlog.get_logger("fallow.head")


Look = list[Checkpoint | tuple[Path, str]]
"""Complete checkpoints; of one that is damaged its folder, and what is wrong."""


FIRST_LOOK_S = 5.0
"""The first looks are waited for, but no longer: a suspended run should not begin from an older checkpoint than there
is, and a file system that hangs must not keep all runs without a head."""


def adopt(turn: Turn) -> None:
    """Learn of checkpoints that nobody could tell of: as a head begins, and when a run has lost its last member.

    Looks are taken beside the main loop. A file system that hangs may be why the members are lost.
    """
    current = [run for run in turn.book.current.values() if not run.ended]
    first = [run for run in current if run.is_empty is None]
    turn.for_each(current, "checkpoints on disk", lambda run: _begin_look(turn, run))
    if first:
        wait([run.look for run in first if run.look is not None], FIRST_LOOK_S)
    turn.for_each(current, "checkpoints on disk", lambda run: _end_look(turn, run))


def _begin_look(turn: Turn, run: Run) -> None:
    was_empty, run.is_empty = run.is_empty, not run.roster.present()
    if was_empty is None or run.is_empty > was_empty:
        known = {saved.checkpoint.path for saved in run.roster.checkpoints.saved}
        run.look = in_thread(partial(_look, turn.book.checkpoint_folder(run), known), "look-for-checkpoints")


def _end_look(turn: Turn, run: Run) -> None:
    if run.look is not None and run.look.done():
        done, run.look = run.look, None
        _take(turn, run, done.result())


def _look(folder: Path, known: Collection[str]) -> Look:
    """What is in a folder besides what is known."""
    found: Look = []
    try:
        unknown = [path for path in complete_checkpoints(folder) if str(path) not in known]
    except OSError as error:
        log.warning("checkpoints.unseen", folder=str(folder), error=str(error))
        return found
    for path in unknown:
        try:
            # What is out of bounds could be written to the store, and not be read from there.
            found.append(msgspec.convert(msgspec.to_builtins(announcement(path, *read_manifest(path))), Checkpoint))
        except (FallowError, msgspec.ValidationError) as error:
            found.append((path, str(error)))
    return found


def _take(turn: Turn, run: Run, look: Look) -> None:
    known = {saved.checkpoint.path for saved in run.roster.checkpoints.saved}
    for found in look:
        if isinstance(found, tuple):
            turn.record(run, "damaged", found[1], path=str(found[0]))
        elif found.path not in known:
            found = msgspec.structs.replace(found, written_at=min(turn.now, found.written_at))
            turn.apply(run, ev.CheckpointFound(at=turn.at, checkpoint=found))


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
    in_thread(partial(_remove, list(folders)), "remove-checkpoints")


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
