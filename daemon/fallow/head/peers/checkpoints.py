"""Checkpoints on disk: the head finds those that no worker reported, and removes old ones."""

import asyncio
import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path

import msgspec
import structlog

from fallow.core.membership import events as ev
from fallow.core.membership.messages import Checkpoint, Report
from fallow.head.loop.turn import Turn
from fallow.head.state.registry import Run
from fallow.model import ChangeKind, FallowError
from fallow.threads import in_thread
from fallow.worker.checkpoint.manifest import REMOVED, announcement, complete_checkpoints, read_manifest

log = structlog.get_logger("fallow.head")


Look = list[Checkpoint | tuple[Path, str]]
"""Complete checkpoints, and (folder, problem) of damaged ones."""


FIRST_LOOK_S = 5.0
"""Longest wait for the first scans. A suspended run should start from its newest checkpoint, but a file system that
hangs must not stop all runs."""


async def look_at_start(turn: Turn) -> None:
    """Look for checkpoints of all runs when a head starts. `adopt` takes in what is found."""
    runs = [run for run in turn.registry.current.values() if not run.ended]
    turn.for_each(runs, "checkpoints on disk", lambda run: _begin_look(turn, run))
    if looks := [asyncio.wrap_future(run.look) for run in runs if run.look is not None]:
        await asyncio.wait(looks, timeout=FIRST_LOOK_S)


def adopt(turn: Turn) -> None:
    """Find unreported checkpoints of a run that has lost its last member.

    Threads scan the folders, because a file system that hangs may be the reason for the loss.
    """
    current = [run for run in turn.registry.current.values() if not run.ended]
    turn.for_each(current, "checkpoints on disk", lambda run: _begin_look(turn, run))
    turn.for_each(current, "checkpoints on disk", lambda run: _end_look(turn, run))


def _begin_look(turn: Turn, run: Run) -> None:
    was_empty, run.is_empty = run.is_empty, not run.roster.present()
    if was_empty is None or run.is_empty > was_empty:
        known_paths = {saved.checkpoint.path for saved in run.roster.checkpoints.saved}
        run.look = in_thread(partial(_look, turn.registry.checkpoint_folder(run), known_paths), "look-for-checkpoints")


def _end_look(turn: Turn, run: Run) -> None:
    if run.look is not None and run.look.done():
        finished_look, run.look = run.look, None
        _apply_look(turn, run, finished_look.result())


def _look(folder: Path, known_paths: Collection[str]) -> Look:
    """Scan a folder for checkpoints whose paths are not known."""
    entries: Look = []
    try:
        new_paths = [path for path in complete_checkpoints(folder) if str(path) not in known_paths]
    except OSError as error:
        log.warning("checkpoints.unseen", folder=str(folder), error=str(error))
        return entries
    for path in new_paths:
        try:
            # Check bounds here: the store would accept a value out of bounds, and reading it back would fail.
            entries.append(msgspec.convert(msgspec.to_builtins(announcement(path, *read_manifest(path))), Checkpoint))
        except (FallowError, msgspec.ValidationError) as error:
            entries.append((path, str(error)))
    return entries


def _apply_look(turn: Turn, run: Run, look: Look) -> None:
    known_paths = {saved.checkpoint.path for saved in run.roster.checkpoints.saved}
    for entry in look:
        if isinstance(entry, tuple):
            turn.record(run, "damaged", entry[1], path=str(entry[0]))
        elif entry.path not in known_paths:
            entry = msgspec.structs.replace(entry, written_at=min(turn.now, entry.written_at))
            turn.apply(run, ev.CheckpointFound(at=turn.at, checkpoint=entry))


def by_this_clock(run: Run, report: Report, now: float) -> Report:
    """Convert the time of the newest checkpoint's snapshot to this host's clock (`now`: Unix time).

    Nodes' clocks differ. A worker reports a checkpoint as soon as it is finished, so its snapshot was `took_s` ago. For
    a checkpoint that was finished without a head, this time is too late.
    """
    new = report.saved
    if new is None or any(saved.checkpoint.path == new.path for saved in run.roster.checkpoints.saved):
        return report
    new = msgspec.structs.replace(new, written_at=max(0.0, now - new.took_s))
    return msgspec.structs.replace(report, saved=new)


def due_in_s(run: Run, every_s: float, now: float) -> float | None:
    """Seconds until the next periodic checkpoint must begin; None: periodic checkpoints are off."""
    if not every_s:
        return None
    change = run.root.change
    is_empty = not any(map(run.roster.alive, run.roster.members))
    if is_empty or (change is not None and change.kind is ChangeKind.START):
        return every_s  # the run is about to start, so it has nothing to lose
    return run.record.saving.due_in_s(every_s, now)


def remove(folders: list[str]) -> None:
    """Delete folders, such as checkpoints, in a thread: shared file systems are slow."""
    in_thread(partial(_remove, list(folders)), "remove-checkpoints")


def _remove(folders: list[str]) -> None:
    for folder in folders:
        path = Path(folder)
        try:
            # Rename the folder first, so that a partly deleted checkpoint does not look complete.
            path = path.rename(path.with_name(path.name + REMOVED))
            shutil.rmtree(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("checkpoint.remove", path=folder, error=error.strerror)
