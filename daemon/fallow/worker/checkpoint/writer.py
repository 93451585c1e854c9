"""Writes checkpoints in the background. The first rank's thread waits for all parts and completes the checkpoint.

If a checkpoint cannot be completed (a member was killed, the disk is full), its temporary folder is deleted. Older
checkpoints are not touched, and the next checkpoint is written as usual.

Parts have the format of torch.distributed.checkpoint, so that torch's tools can read a checkpoint. Like torch's
`FileSystemWriter`, a part holds chunks written by `torch.save`, one after the other. Fallow reads the parts by its own
manifest and never opens torch's index, which is a pickle.
"""

import contextlib
import errno
import hashlib
import io
import os
import shutil
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from fallow.core.membership.messages import Checkpoint, Problem
from fallow.files import check_dir, read_private, sync_dir, write_private
from fallow.model import FallowError
from fallow.worker.checkpoint.manifest import (
    EXTRA,
    LARGEST_MANIFEST,
    REMOVED,
    TEMPORARY,
    Chunk,
    Extra,
    FileInfo,
    Manifest,
    PartInfo,
    announcement,
    folder_name,
    write_manifest,
)
from fallow.worker.checkpoint.parts import PartSnapshot, extra_parts
from fallow.worker.prepared.modes import common_modes
from fallow.worker.prepared.state import dtype_named

PATIENCE_S = 600.0
"""Seconds for which the first rank waits for the other parts after it has written its own."""

HURRY_S = 10.0
"""Seconds without growth of any file after which the first rank stops waiting, once a member may be lost."""

STUCK_S = 1200.0
"""Seconds after which a write counts as stuck: neither a part nor the wait for other parts takes that long."""

LOOK_S = 0.1


class Writing(threading.Thread):
    """Thread that writes one snapshot.

    Args:
        folder: folder of the run's checkpoints.
        snapshot: this member's part.
        report: called on this thread with the message for the head.
        before: step of the previous snapshot; temporary folders of older snapshots are deleted.
        clock: monotonic clock.
    """

    def __init__(
        self,
        folder: Path,
        snapshot: PartSnapshot,
        report: Callable[[Checkpoint | Problem], None],
        before: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(target=self._write, args=(snapshot, time.monotonic()), name="checkpoint", daemon=True)
        self._folder = folder
        self._report = report
        self._before = before
        self._clock = clock
        self._progress_at = clock()
        "time at which the current stage of the write began"
        self.hurry = threading.Event()
        "set once a member may be lost, whose part may never arrive"
        self.completes = snapshot.rank == 0
        "True on the first rank until it has completed the checkpoint"
        self.is_reported = False
        "True once the complete checkpoint was reported; only torch's index may be missing"

    @property
    def is_stuck(self) -> bool:
        """True if one stage of the write takes so long that the file system seems to hang."""
        return self._clock() - self._progress_at > STUCK_S

    def _write(self, snapshot: PartSnapshot, began: float) -> None:
        generation, step = snapshot.manifest.generation, snapshot.manifest.step
        final = self._folder / folder_name(generation, step)
        temporary = final.with_name(final.name + TEMPORARY)
        is_made = False
        try:
            for folder in (self._folder, temporary):
                folder.mkdir(mode=0o700, exist_ok=True)
                check_dir(folder)
            is_made = True
            self._sweep(self._before - 1)  # the previous checkpoint may still be completed
            self._write_part(snapshot, temporary)
            if self.completes and self._await_parts(snapshot.manifest.world, temporary):
                self._progress_at = self._clock()
                manifest, digest = self._finish(snapshot, temporary, final)
                self._sweep(step)
                checkpoint = announcement(final, manifest, digest)
                self.completes = False
                self._report(replace(checkpoint, took_s=time.monotonic() - began))
                self.is_reported = True
                write_index(final, manifest)  # last: its imports may take longer than a preempted node has
        except Exception as error:  # the head must learn of any error
            if is_made and not temporary.exists():
                return  # another member has completed or deleted this checkpoint
            shutil.rmtree(temporary, ignore_errors=True)
            self._report(failure(generation, step, _explain(error, self._folder)))

    def _write_part(self, snapshot: PartSnapshot, temporary: Path) -> None:
        snapshot.bring_to_host()
        part = write_part(temporary, snapshot)
        write_private(temporary / _part_name(snapshot.rank), msgspec.json.encode(part))
        snapshot.copies.clear()
        self._progress_at = self._clock()

    def _await_parts(self, world: int, temporary: Path) -> bool:
        """Wait for all parts; returns False if another member has deleted the checkpoint.

        Raises:
            FallowError: some parts did not arrive.
        """
        give_up_at = time.monotonic() + PATIENCE_S
        size, grown_at = -1, inf
        while temporary.exists():
            missing = [rank for rank in range(world) if not (temporary / _part_name(rank)).exists()]
            if not missing:
                return True
            if self.hurry.is_set() and size != (size_now := _size(temporary)):
                size, grown_at = size_now, time.monotonic()
            if time.monotonic() > min(give_up_at, grown_at + HURRY_S):
                raise FallowError(f"no part arrived from ranks {', '.join(map(str, missing))}")
            time.sleep(LOOK_S)
        return False

    def _finish(self, snapshot: PartSnapshot, temporary: Path, final: Path) -> tuple[Manifest, str]:
        notes = [temporary / _part_name(rank) for rank in range(snapshot.manifest.world)]
        parts = [msgspec.json.decode(read_private(note, LARGEST_MANIFEST), type=PartInfo) for note in notes]
        if any(part.outline != parts[0].outline for part in parts):
            raise FallowError("the members hold states of different layout; prepare the same objects on all of them")
        manifest = replace(
            snapshot.manifest,
            chunks=[chunk for part in parts for chunk in part.chunks],
            extra=[blob for part in parts for blob in part.extra],
            modes=common_modes([part.modes or [] for part in parts]),
            files=[file for part in parts for file in part.files],
        )
        digest = write_manifest(temporary, manifest)
        for note in notes:
            note.unlink()
        sync_dir(temporary)
        temporary.rename(final)
        sync_dir(self._folder)
        return manifest, digest

    def _sweep(self, upto: int) -> None:
        """Delete unfinished checkpoints up to a step: no member will complete them."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                step = path.stem.rpartition("-s")[2]
                if path.suffix in (TEMPORARY, REMOVED) and step.isdigit() and int(step) <= upto:
                    shutil.rmtree(path, ignore_errors=True)


def failure(generation: int, step: int, why: str) -> Problem:
    """Return the worker's message to the head about a failed checkpoint."""
    reason = f"the checkpoint of step {step} was not written: {why}"
    return Problem(generation=generation, step=step, reason=reason)


def _size(folder: Path) -> int:
    """Return the bytes in a folder's files. Other members may add and delete files meanwhile."""
    size = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _explain(error: BaseException, folder: Path) -> str:
    """Return the operating system's reason, which torch's exceptions hide, and advice for the user."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, OSError):
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    advice = {
        errno.ENOSPC: f"make room on the file system of {folder}",
        errno.EDQUOT: f"your quota for {folder} is used up: delete files, or ask for more",
        errno.EFBIG: "the limit on file sizes (ulimit -f) is too low",
        errno.EROFS: f"the file system of {folder} has become read-only: tell its administrators",
        errno.EIO: f"the file system of {folder} reports an error: tell its administrators",
    }
    return f"{cause.strerror}; {advice.get(cause.errno or 0, f'check {folder}')}; older checkpoints are untouched"


# -------------------------------------------------------------------------- torch's format


def write_part(folder: Path, snapshot: PartSnapshot) -> PartInfo:
    """Write one member's part and sync it.

    Raises:
        OSError, RuntimeError: the part cannot be written.
    """
    path = folder / f"__{snapshot.rank}_0.distcp"
    chunks: list[Chunk] = []
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        for chunk, copy in zip(snapshot.chunks, snapshot.copies, strict=True):
            begin = file.tell()
            torch.save(copy.clone(), file)  # `torch.save` of a view would write its whole storage
            chunks.append(replace(chunk, file=path.name, offset=begin, length=file.tell() - begin))
        file.flush()
        os.fsync(file.fileno())
    files, extra = [FileInfo.of(path)], list[Extra]()
    if snapshot.rank == 0:
        content = io.BytesIO()
        for place, data in extra_parts(snapshot):
            extra.append(Extra(path=place, offset=content.tell(), length=len(data)))
            content.write(data)
        write_private(folder / EXTRA, content.getvalue())
        files.append(FileInfo.of(folder / EXTRA))
    outline = hashlib.sha256(msgspec.json.encode(snapshot.manifest.tensors)).hexdigest()
    return PartInfo(outline=outline, files=files, chunks=chunks, extra=extra, modes=snapshot.manifest.modes)


def write_index(folder: Path, manifest: Manifest) -> None:
    """Write `.metadata`, torch's index of all parts. It lists a tied tensor under each of its names.

    The first call imports 700 modules, among them torch's compiler. This takes seconds, so nothing should wait for it.
    """
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    stored: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    results = []
    for chunk in manifest.chunks:
        info = manifest.tensors[chunk.tensor]
        shape = torch.Size(info.shape)
        offsets = torch.Size([chunk.first, *[0] * (len(shape) - 1)] if shape else [])
        sizes = torch.Size([chunk.end - chunk.first, *shape[1:]] if shape else [])
        where = _StorageInfo(chunk.file, chunk.offset, chunk.length)
        for path in (info.path, *info.aliases):
            name = ".".join(map(str, path))
            paths[name] = tuple(path)
            results.append(WriteResult(dcp.MetadataIndex(name, offsets), chunk.length, where))
            properties = dcp.TensorProperties(dtype=dtype_named(info.dtype))
            tensor_metadata = dcp.TensorStorageMetadata(properties, shape, [])
            stored.setdefault(name, tensor_metadata).chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
    for blob in manifest.extra:
        if blob.path:
            name = ".".join(map(str, blob.path))
            paths[name] = tuple(blob.path)
            where = _StorageInfo(EXTRA, blob.offset, blob.length)
            results.append(WriteResult(dcp.MetadataIndex(name), blob.length, where))
            stored[name] = dcp.BytesStorageMetadata()
    FileSystemWriter(folder, sync_files=True).finish(dcp.Metadata(stored, planner_data=paths), [results])
    (folder / ".metadata").chmod(0o600)
