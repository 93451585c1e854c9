"""Parts in the format of torch.distributed.checkpoint, so that torch's own tools can read a checkpoint.

A part is what its `FileSystemWriter` makes: each slice as `torch.save` writes it, one behind the other. Fallow reads
the parts by its own manifest and never opens torch's index, which is a pickle.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import msgspec
import torch

from fallow.files import write_private
from fallow.worker.checkpoint.manifest import EXTRA, Chunk, Extra, FileInfo, Manifest, PartInfo
from fallow.worker.checkpoint.parts import PartSnapshot, extra_parts
from fallow.worker.prepared.state import dtype_named


def write_part(folder: Path, snapshot: PartSnapshot) -> PartInfo:
    """Write one member's part and sync it.

    Raises:
        OSError, RuntimeError: it cannot be written.
    """
    path = folder / f"__{snapshot.rank}_0.distcp"
    chunks: list[Chunk] = []
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        for piece, copy in zip(snapshot.slices, snapshot.copies, strict=True):
            begin = file.tell()
            torch.save(copy.clone(), file)  # of its own memory: `torch.save` writes all of a view's
            chunks.append(Chunk(**piece._asdict(), file=path.name, offset=begin, length=file.tell() - begin))
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
