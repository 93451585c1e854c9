"""Parts in the format of torch.distributed.checkpoint, so that torch's own tools can read a checkpoint.

A part is what its `FileSystemWriter` makes: each slice as `torch.save` writes it, one behind the other. Fallow reads
the parts by its own manifest and never opens torch's index, which is a pickle.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fallow.worker.checkpoint.manifest import EXTRA, Chunk, Extra, TensorInfo
from fallow.worker.checkpoint.parts import Snapshot
from fallow.worker.prepared.state import dtype_named


def write_part(path: Path, snapshot: Snapshot) -> list[Chunk]:
    """Write one member's part and sync it; returns where each slice is.

    Raises:
        OSError, RuntimeError: it cannot be written.
    """
    chunks = []
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        for piece, copy in zip(snapshot.slices, snapshot.copies, strict=True):
            begin = file.tell()
            torch.save(copy.clone(), file)  # of its own memory: `torch.save` writes all of a view's
            end = file.tell()
            chunks.append(Chunk(**piece._asdict(), file=path.name, offset=begin, length=end - begin))
        file.flush()
        os.fsync(file.fileno())
    return chunks


def write_index(
    folder: Path, tensors: Sequence[TensorInfo], chunks: Sequence[Chunk], extra: Sequence[Extra] = ()
) -> None:
    """Write `.metadata`: torch's index of all parts. A tied tensor is in it under each of its names."""
    # These take most of a second to import: no newcomer should wait for that.
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    stored: dict[str, Any] = {}
    results = []
    for chunk in chunks:
        info = tensors[chunk.tensor]
        rest = len(info.shape) - 1
        offsets = torch.Size([chunk.first] + [0] * rest if info.shape else [])
        sizes = torch.Size([chunk.end - chunk.first, *info.shape[1:]] if info.shape else [])
        where = _StorageInfo(chunk.file, chunk.offset, chunk.length)
        for name in (info.name, *map(_joined, info.aliases)):
            index = MetadataIndex(name, offsets)
            results.append(WriteResult(index=index, size_in_bytes=chunk.length, storage_data=where))
            whole = TensorStorageMetadata(TensorProperties(dtype=dtype_named(info.dtype)), torch.Size(info.shape), [])
            stored.setdefault(name, whole).chunks.append(ChunkStorageMetadata(offsets, sizes))
    paths = {info.name: info.path for info in tensors}
    paths |= {_joined(path): path for info in tensors for path in info.aliases}
    for blob in extra:
        if blob.path:
            name = _joined(blob.path)
            where = _StorageInfo(EXTRA, blob.offset, blob.length)
            results.append(WriteResult(index=MetadataIndex(name), size_in_bytes=blob.length, storage_data=where))
            stored[name], paths[name] = BytesStorageMetadata(), blob.path
    metadata = Metadata(state_dict_metadata=stored, planner_data={name: tuple(path) for name, path in paths.items()})
    FileSystemWriter(folder, sync_files=True).finish(metadata, [results])


def _joined(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))
