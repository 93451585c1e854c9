"""Writing checkpoints beside the training. The first member's thread waits for all parts and puts the whole together.

A checkpoint that cannot be finished (a member was killed, the disk is full) is given up: its temporary folder goes,
older ones stay as they are, and the next one is tried as usual.

Parts have the format of torch.distributed.checkpoint, so that torch's own tools can read a checkpoint. A part is what
its `FileSystemWriter` makes: each chunk as `torch.save` writes it, one behind the other. Fallow reads the parts by its
own manifest and never opens torch's index, which is a pickle.
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
"""How long the first member waits for the others' parts after its own."""

HURRY_S = 10.0
"""How long it waits while none of their files grows, once a member may be lost."""

STUCK_S = 1200.0
"""Longer than this neither a part takes nor the wait for the others': the file system does not answer."""

LOOK_S = 0.1


class Writing(threading.Thread):
    """Writes one snapshot. `report` takes, on this thread, what the head should hear.

    Args:
        before: step of the snapshot before; what is left of older ones is removed, as nobody finishes it.
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
        self._moved_at = clock()
        "when the last part of the work began"
        self.hurry = threading.Event()
        "a member may be lost: its part may never come"
        self.completes = snapshot.rank == 0
        "the first member has to see to the whole, and has not told of it"
        self.is_told = False
        "it has; nothing but torch's index is missing"

    @property
    def is_stuck(self) -> bool:
        """True if one part of the work takes so long that the file system does not seem to answer."""
        return self._clock() - self._moved_at > STUCK_S

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
            self._sweep(self._before - 1)  # the one before may still be put together
            self._write_part(snapshot, temporary)
            if self.completes and self._await_parts(snapshot.manifest.world, temporary):
                self._moved_at = self._clock()
                manifest, digest = self._finish(snapshot, temporary, final)
                self._sweep(step)
                done = announcement(final, manifest, digest)
                self.completes = False
                self._report(replace(done, took_s=time.monotonic() - began))
                self.is_told = True
                write_index(final, manifest)  # what it imports may take longer than a node has that Slurm takes
        except Exception as error:  # whatever it is, the head must hear of it
            if is_made and not temporary.exists():
                return  # another member has given this checkpoint up, or finished it
            shutil.rmtree(temporary, ignore_errors=True)
            self._report(failure(generation, step, _explain(error, self._folder)))

    def _write_part(self, snapshot: PartSnapshot, temporary: Path) -> None:
        snapshot.bring_to_host()
        part = write_part(temporary, snapshot)
        write_private(temporary / _part_name(snapshot.rank), msgspec.json.encode(part))
        snapshot.copies.clear()
        self._moved_at = self._clock()

    def _await_parts(self, world: int, temporary: Path) -> bool:
        """Return True once all parts are there; False if another member has given the checkpoint up.

        Raises:
            FallowError: the others' parts did not come.
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
                raise FallowError(f"the parts of ranks {', '.join(map(str, missing))} did not come")
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
        """Remove what was given up: nobody finishes it any more."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                step = path.stem.rpartition("-s")[2]
                if path.suffix in (TEMPORARY, REMOVED) and step.isdigit() and int(step) <= upto:
                    shutil.rmtree(path, ignore_errors=True)


def failure(generation: int, step: int, why: str) -> Problem:
    """What the head should hear of a checkpoint that was given up."""
    reason = f"the checkpoint of step {step} was not written: {why}"
    return Problem(generation=generation, step=step, reason=reason)


def _size(folder: Path) -> int:
    """Bytes in the files of a folder, to which others write."""
    size = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


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


# -------------------------------------------------------------------------- torch's format


def write_part(folder: Path, snapshot: PartSnapshot) -> PartInfo:
    """Write one member's part and sync it.

    Raises:
        OSError, RuntimeError: it cannot be written.
    """
    path = folder / f"__{snapshot.rank}_0.distcp"
    chunks: list[Chunk] = []
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        for chunk, copy in zip(snapshot.chunks, snapshot.copies, strict=True):
            begin = file.tell()
            torch.save(copy.clone(), file)  # of its own memory: `torch.save` writes all of a view's
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
    """Write `.metadata`: torch's index of all parts. A tied tensor is in it under each of its names.

    The first one imports 700 modules, torch's compiler among them: seconds of work, for which nothing should wait.
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
            whole = dcp.TensorStorageMetadata(properties, shape, [])
            stored.setdefault(name, whole).chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
    for blob in manifest.extra:
        if blob.path:
            name = ".".join(map(str, blob.path))
            paths[name] = tuple(blob.path)
            where = _StorageInfo(EXTRA, blob.offset, blob.length)
            results.append(WriteResult(dcp.MetadataIndex(name), blob.length, where))
            stored[name] = dcp.BytesStorageMetadata()
    FileSystemWriter(folder, sync_files=True).finish(dcp.Metadata(stored, planner_data=paths), [results])
    (folder / ".metadata").chmod(0o600)
