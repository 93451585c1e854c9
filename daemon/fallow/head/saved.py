"""Checkpoints on disk, as the head sees them: those that nobody could tell it of, and those that go."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import msgspec
import structlog

from fallow.core import events as ev
from fallow.head.book import Run
from fallow.head.turn import Turn
from fallow.model import ChangeKind, Checkpointed, CheckpointFailed, FallowError
from fallow.worker.checkpoint.manifest import REMOVED, announcement, complete_ones, read_manifest

log = structlog.get_logger("fallow.head")


def adopt(turn: Turn, keep: int) -> None:
    """Once per run and head: learn of checkpoints that were finished while no head was there."""
    unseen = [run for run in turn.book.current.values() if not run.looked_for_checkpoints]
    turn.for_each(unseen, "checkpoints on disk", lambda run: _adopt_run(turn, run, keep))


def _adopt_run(turn: Turn, run: Run, keep: int) -> None:
    run.looked_for_checkpoints = True
    if run.roster.status.ended:
        return
    known = {saved.written.path for saved in run.roster.checkpoints}
    for folder in complete_ones(turn.book.checkpoint_folder(run)):
        if str(folder) in known:
            continue
        try:
            manifest, digest = read_manifest(folder)
            # What is out of bounds could be written to the store, and not be read from there.
            written = msgspec.convert(msgspec.to_builtins(announcement("", folder, manifest, digest)), Checkpointed)
        except (FallowError, msgspec.ValidationError) as error:
            turn.record(run, "damaged", str(error), path=str(folder))
            continue
        take(turn, run, written, min(turn.now, written.written_at), keep)


def take(turn: Turn, run: Run, written: Checkpointed, taken_at: float, keep: int) -> None:
    """Note a checkpoint that is complete on disk; `taken_at`: Unix time of its snapshot by this host's clock.

    The worker's own time is not kept: nodes' clocks differ, and all that is shown is by the head's.
    """
    written = msgspec.structs.replace(written, written_at=taken_at)
    known = {saved.written.path for saved in run.roster.checkpoints}
    turn.apply(run, ev.CheckpointWritten(at=turn.at, written=written, keep=keep))
    if written.path not in known and written in run.roster.usable_checkpoints():
        run.record.saving.written(taken_at, written.took_s)


def give_up(turn: Turn, run: Run, failed: CheckpointFailed) -> None:
    """Note one that could not be written; several members may say so."""
    if run.roster.checkpoint_given_up != (failed.generation, failed.step):
        run.record.saving.failed(turn.now)
    turn.apply(run, ev.Said(at=turn.at, message=failed))


def due_in_s(run: Run, every_s: float, now: float) -> float | None:
    """Seconds until the members have to begin the next periodic checkpoint; None: there are none."""
    if not every_s:
        return None
    r = run.roster
    if not r.members or (r.change is not None and r.change.kind is ChangeKind.START):
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
