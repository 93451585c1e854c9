"""Writing checkpoints beside the training. No member waits for another: whoever finds all parts there finishes.

A checkpoint that cannot be finished (a member was killed, the disk is full) is given up: its temporary folder goes,
older ones stay as they are, and the next one is tried as usual.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fallow.files import check_dir, read_private, sync_dir, write_private
from fallow.model import Checkpointed, CheckpointFailed, FallowError
from fallow.worker.checkpoint.dcp import write_index, write_part
from fallow.worker.checkpoint.manifest import (
    LARGEST_MANIFEST,
    REMOVED,
    TEMPORARY,
    PartInfo,
    announcement,
    folder_name,
    write_manifest,
)
from fallow.worker.checkpoint.parts import Snapshot
from fallow.worker.transport import device

PATIENCE_S = 600.0
"""How long the first member waits for the others' parts after its own."""

HURRY_S = 10.0
"""The same, once it is known that a member was lost."""

STUCK_S = 1200.0
"""Longer than this neither a part takes nor the wait for the others': the file system does not answer."""

LOOK_S = 0.1


_CLAIM = "finishing"
"""Made by the one member that puts the whole together."""


class Writer:
    """Writes one snapshot at a time on a thread of its own.

    `report` takes what the head should hear. It is called on the writer's thread as a rule.
    """

    def __init__(
        self,
        worker: str,
        folder: Path,
        report: Callable[[Checkpointed | CheckpointFailed], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._folder = folder
        self._report = report
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._abandoned: threading.Thread | None = None
        self._hurry = threading.Event()
        self._moved_at = 0.0
        "when the snapshot's last part of work began"
        self.newest: tuple[int, int] | None = None
        "(generation, step) of the last snapshot"
        self.took_s = 0.0
        "from the last snapshot that was finished here until it was complete"

    @property
    def busy(self) -> bool:
        """A snapshot is being written, or waits for the others' parts."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def blocked(self) -> bool:
        """What was abandoned still waits for its file system: nothing else can be written."""
        return self._abandoned is not None and self._abandoned.is_alive()

    def is_complete(self, generation: int, step: int) -> bool:
        """A complete checkpoint of that step is on disk."""
        return (self._folder / folder_name(generation, step)).exists()

    def abandon_if_stuck(self) -> None:
        """Give up a snapshot whose file system has not answered for long, and say so. Its thread ends by itself."""
        if self.busy and self._clock() - self._moved_at > STUCK_S:
            assert self.newest is not None
            self._abandoned, self._thread = self._thread, None
            self._give_up(*self.newest, f"the file system of {self._folder} has not answered for {STUCK_S:.0f} s")

    def refuse(self, generation: int, step: int) -> None:
        """Write nothing while `blocked`, and say so."""
        self.newest = generation, step
        self._give_up(generation, step, f"the file system of {self._folder} does not answer")

    def begin(self, snapshot: Snapshot) -> None:
        """Write a snapshot in the background. The one before must be done."""
        assert not self.busy
        self.newest = snapshot.manifest.generation, snapshot.manifest.step
        self._moved_at = self._clock()
        self._hurry.clear()
        self._thread = threading.Thread(
            target=self._run, args=(snapshot, *self.newest, time.monotonic()), name="checkpoint", daemon=True
        )
        self._thread.start()

    def hurry(self) -> None:
        """A member was lost: its part may never come."""
        self._hurry.set()

    def drain(self, timeout_s: float) -> bool:
        """Wait for the snapshot that is being written; False if that took too long."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def _give_up(self, generation: int, step: int, why: str) -> None:
        reason = f"the checkpoint of step {step} was not written: {why}"
        self._report(CheckpointFailed(worker=self._worker, generation=generation, step=step, reason=reason))

    # ------------------------------------------------------------------------------------------- on the thread

    def _run(self, snapshot: Snapshot, generation: int, step: int, began: float) -> None:
        final = self._folder / folder_name(generation, step)
        temporary = final.with_name(final.name + TEMPORARY)
        is_made = False
        try:
            for folder in (self._folder, temporary):
                folder.mkdir(mode=0o700, exist_ok=True)
                check_dir(folder)
            is_made = True
            self._write_part(snapshot, temporary)
            if self._await_parts(snapshot, temporary):
                self._moved_at = self._clock()
                done = self._finish(snapshot, temporary, final)
                self._sweep(step)
                self.took_s = time.monotonic() - began
                self._report(msgspec.structs.replace(done, took_s=self.took_s))
        except (OSError, RuntimeError, FallowError) as error:
            if is_made and not temporary.exists():
                return  # another member has given this checkpoint up, or finished it
            shutil.rmtree(temporary, ignore_errors=True)
            self._give_up(generation, step, _explain(error, self._folder))

    def _write_part(self, snapshot: Snapshot, temporary: Path) -> None:
        if snapshot.rank == 0:
            sync_dir(self._folder)
        device.wait(snapshot.copied)
        part = write_part(temporary, snapshot)
        write_private(temporary / _part_name(snapshot.rank), msgspec.json.encode(part))
        snapshot.copies.clear()
        self._moved_at = self._clock()

    def _await_parts(self, snapshot: Snapshot, temporary: Path) -> bool:
        """Return True if all parts are there and this member is the one to finish. Only the first member waits.

        Raises:
            FallowError: the others' parts did not come.
        """
        give_up_at = time.monotonic() + PATIENCE_S
        while temporary.exists():
            missing = [rank for rank in range(snapshot.manifest.world) if not (temporary / _part_name(rank)).exists()]
            if not missing and _claim(temporary):
                return True
            if snapshot.rank:
                return False
            if self._hurry.is_set():
                give_up_at = min(give_up_at, time.monotonic() + HURRY_S)
                self._hurry.clear()
            if time.monotonic() > give_up_at:
                raise FallowError(
                    f"the parts of ranks {', '.join(map(str, missing))} did not come"
                    if missing
                    else "the member that was to finish it is gone"
                )
            time.sleep(LOOK_S)
        return False

    def _finish(self, snapshot: Snapshot, temporary: Path, final: Path) -> Checkpointed:
        notes = [temporary / _part_name(rank) for rank in range(snapshot.manifest.world)]
        parts = [msgspec.json.decode(read_private(note, LARGEST_MANIFEST), type=PartInfo) for note in notes]
        if any(part.outline != parts[0].outline for part in parts):
            raise FallowError("the members hold states of different layout; prepare the same objects on all of them")
        manifest = msgspec.structs.replace(
            snapshot.manifest,
            chunks=[chunk for part in parts for chunk in part.chunks],
            extra=[blob for part in parts for blob in part.extra],
            modes=parts[0].modes if all(part.modes == parts[0].modes for part in parts) else None,
        )
        files = [*(file for part in parts for file in part.files), write_index(temporary, manifest)]
        manifest = msgspec.structs.replace(manifest, files=files)
        digest = write_manifest(temporary, manifest)
        for note in notes:
            note.unlink()
        sync_dir(temporary)
        temporary.rename(final)
        # Not before: somebody who found all parts there a moment ago may only now come to claim it.
        (final / _CLAIM).unlink()
        sync_dir(self._folder)
        return announcement(self._worker, final, manifest, digest)

    def _sweep(self, upto: int) -> None:
        """Remove what was given up: nothing older than a complete checkpoint is worth finishing."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                step = path.stem.rpartition("-s")[2]
                if path.suffix in (TEMPORARY, REMOVED) and step.isdigit() and int(step) <= upto:
                    shutil.rmtree(path, ignore_errors=True)


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _claim(folder: Path) -> bool:
    try:
        os.close(os.open(folder / _CLAIM, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except FileExistsError:
        return False
    return True


def _explain(error: BaseException, folder: Path) -> str:
    """The system's reason, which torch's writer hides behind one of its own, and what to do about it."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    if not isinstance(seen, OSError):
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    advice = {
        errno.ENOSPC: f"make room on the file system of {folder}",
        errno.EDQUOT: f"your quota for {folder} is used up: remove something, or ask for more",
        errno.EFBIG: "the limit on file sizes (ulimit -f) is too low",
        errno.EROFS: f"the file system of {folder} has become read-only: tell its administrators",
        errno.EIO: f"the file system of {folder} reports an error: tell its administrators",
    }
    return f"{seen.strerror}; {advice.get(seen.errno or 0, f'check {folder}')}; the older ones are untouched"
