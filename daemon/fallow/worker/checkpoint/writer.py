"""Writing checkpoints beside the training. No member waits for another: whoever finds all parts there finishes.

A checkpoint that cannot be finished (a member was killed, the disk is full) is given up: its temporary folder goes,
older ones stay as they are, and the next one is tried as usual.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from fallow.files import check_dir, read_private, sync_dir, write_private
from fallow.model import Checkpointed, CheckpointFailed, FallowError
from fallow.worker.checkpoint.dcp import write_index, write_part
from fallow.worker.checkpoint.manifest import (
    EXTRA,
    FORMAT,
    LARGEST_MANIFEST,
    MANIFEST,
    METADATA,
    REMOVED,
    TEMPORARY,
    Extra,
    FileInfo,
    Manifest,
    PartInfo,
    announcement,
    encode_manifest,
    folder_name,
    outline,
)
from fallow.worker.checkpoint.parts import Snapshot, blobs
from fallow.worker.transport import device

PATIENCE_S = 600.0
"""How long the first member waits for the others' parts after its own."""

HURRY_S = 10.0
"""The same, once it is known that a member was lost."""

STUCK_S = 1200.0
"""Longer than this neither a part takes nor the wait for the others': the file system does not answer."""

LOOK_S = 0.1


class GivenUp(Exception):
    """Somebody else has given this checkpoint up, or finished it."""


class Writer:
    """Writes one snapshot at a time on a thread of its own.

    Args:
        worker: name of this worker, for reports.
        folder: where the run's checkpoints are.
        report: takes what the head should hear; called on the writer's thread as a rule.
        clock: seconds, as `time.monotonic`.
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
    def stuck(self) -> bool:
        """It is busy with one thing for so long that its file system does not seem to answer."""
        return self.busy and self._clock() - self._moved_at > STUCK_S

    @property
    def blocked(self) -> bool:
        """What was abandoned still waits for its file system: nothing else can be written."""
        return self._abandoned is not None and self._abandoned.is_alive()

    def is_complete(self, generation: int, step: int) -> bool:
        """A complete checkpoint of that step is on disk."""
        return (self._folder / folder_name(generation, step)).exists()

    def abandon(self) -> None:
        """Give the snapshot that is being written up, and say so. Its thread cannot be ended: it ends by itself."""
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
        self.newest = snapshot.generation, snapshot.step
        self._moved_at = self._clock()
        self._hurry.clear()
        self._thread = threading.Thread(target=self._run, args=(snapshot, time.monotonic()), name="checkpoint")
        self._thread.daemon = True
        self._thread.start()

    def hurry(self) -> None:
        """A member was lost: its part may never come."""
        self._hurry.set()

    def drain(self, timeout_s: float) -> bool:
        """Wait for the snapshot that is being written; False if that took too long."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    # ------------------------------------------------------------------------------------------- on the thread

    def _run(self, snapshot: Snapshot, began: float) -> None:
        name = folder_name(snapshot.generation, snapshot.step)
        temporary = self._folder / (name + TEMPORARY)
        try:
            done = self._write(snapshot, temporary, self._folder / name)
            if done is not None:
                self.took_s = time.monotonic() - began
                self._report(msgspec.structs.replace(done, took_s=self.took_s))
        except GivenUp:
            return
        except (OSError, RuntimeError, FallowError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            self._give_up(snapshot.generation, snapshot.step, _explain(error, self._folder))

    def _give_up(self, generation: int, step: int, why: str) -> None:
        reason = f"the checkpoint of step {step} was not written: {why}"
        self._report(CheckpointFailed(worker=self._worker, generation=generation, step=step, reason=reason))

    def _write(self, snapshot: Snapshot, temporary: Path, final: Path) -> Checkpointed | None:
        """This member's part and, if it was the last, the whole; the first member stays until it is whole."""
        for folder in (self._folder, temporary):
            folder.mkdir(mode=0o700, exist_ok=True)
            check_dir(folder)
        if snapshot.rank == 0:
            sync_dir(self._folder)
        device.wait(snapshot.copied)
        with _vanishing(temporary):
            part = _write_part(temporary, snapshot)
            write_private(temporary / _part_name(snapshot.rank), msgspec.json.encode(part))
            snapshot.copies.clear()
        self._moved_at = self._clock()
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            with _vanishing(temporary):
                missing = [rank for rank in range(snapshot.world) if not (temporary / _part_name(rank)).exists()]
                if not missing and _claim(temporary):
                    self._moved_at = self._clock()
                    done = self._finish(snapshot, temporary, final)
                    self._sweep(snapshot)
                    return done
            if snapshot.rank:
                return None
            if self._hurry.is_set():
                give_up_at = min(give_up_at, time.monotonic() + HURRY_S)
                self._hurry.clear()
            if time.monotonic() > give_up_at:
                raise FallowError(
                    f"the parts of ranks {', '.join(map(str, missing))} did not come"
                    if missing
                    else "the member that was to finish it is gone"
                )
            if not temporary.exists():
                return None
            time.sleep(LOOK_S)

    def _finish(self, snapshot: Snapshot, temporary: Path, final: Path) -> Checkpointed:
        parts = [_read_part(temporary / _part_name(rank)) for rank in range(snapshot.world)]
        if any(part.outline != parts[0].outline for part in parts):
            raise FallowError("the members hold states of different layout; prepare the same objects on all of them")
        chunks = [chunk for part in parts for chunk in part.chunks]
        extra = [blob for part in parts for blob in part.extra]
        write_index(temporary, snapshot.tensors, chunks, extra)
        (temporary / METADATA).chmod(0o600)
        manifest = Manifest(
            format=FORMAT,
            generation=snapshot.generation,
            step=snapshot.step,
            epoch=snapshot.epoch,
            world=snapshot.world,
            written_at=snapshot.taken_at,
            asked=snapshot.asked,
            tensors=snapshot.tensors,
            chunks=chunks,
            files=[
                *(file for part in parts for file in (part.file, part.extra_file) if file is not None),
                _describe(temporary / METADATA),
            ],
            extra=extra,
            modes=parts[0].modes if all(part.modes == parts[0].modes for part in parts) else None,
        )
        data, digest = encode_manifest(manifest)
        write_private(temporary / MANIFEST, data)
        for rank in range(snapshot.world):
            (temporary / _part_name(rank)).unlink()
        sync_dir(temporary)
        temporary.rename(final)
        # Not before: somebody who found all parts there a moment ago may only now come to claim it.
        (final / _CLAIM).unlink()
        sync_dir(self._folder)
        return announcement(self._worker, final, manifest, digest)

    def _sweep(self, snapshot: Snapshot) -> None:
        """Remove what was given up: nothing older than a complete checkpoint is worth finishing."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                step = path.stem.rpartition("-s")[2]
                if path.suffix in (TEMPORARY, REMOVED) and step.isdigit() and int(step) <= snapshot.step:
                    shutil.rmtree(path, ignore_errors=True)


_CLAIM = "finishing"
"""Made by the one member that puts the whole together."""


@contextlib.contextmanager
def _vanishing(folder: Path) -> Iterator[None]:
    """Whatever fails inside is GivenUp if the temporary folder itself is gone."""
    try:
        yield
    except Exception:
        if not folder.exists():
            raise GivenUp from None
        raise


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _write_part(folder: Path, snapshot: Snapshot) -> PartInfo:
    name = f"__{snapshot.rank}_0.distcp"
    chunks = write_part(folder / name, snapshot)
    found = blobs(snapshot)
    if found:
        write_private(folder / EXTRA, b"".join(data for _, data in found))
    ends = itertools.accumulate(len(data) for _, data in found)
    extra = [
        Extra(path=path, offset=end - len(data), length=len(data))
        for (path, data), end in zip(found, ends, strict=True)
    ]
    return PartInfo(
        rank=snapshot.rank,
        outline=outline(snapshot.tensors),
        file=_describe(folder / name),
        chunks=chunks,
        extra_file=_describe(folder / EXTRA) if extra else None,
        extra=extra,
        modes=snapshot.modes,
    )


def _read_part(path: Path) -> PartInfo:
    return msgspec.json.decode(read_private(path, LARGEST_MANIFEST), type=PartInfo)


def _describe(path: Path) -> FileInfo:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileInfo(name=path.name, size=file.tell(), sha256=digest)


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
