"""Parts in the format of torch.distributed.checkpoint, so that torch's own tools can read a checkpoint.

Its writer and its index are used as they are, one call per member and no process group. Fallow reads the parts by its
own manifest and never opens the index, which is a pickle.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fallow.worker.checkpoint.manifest import EXTRA, Chunk, Extra, TensorInfo
from fallow.worker.checkpoint.parts import Slice, Snapshot
from fallow.worker.handover.state import dtype_named


class _Copies(SavePlanner):
    """Hands the snapshot's copies to torch's writer."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._copies = dict(zip(snapshot.slices, snapshot.copies, strict=True))
        self._names = {info.name: number for number, info in enumerate(snapshot.tensors)}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        first = chunk.offsets[0] if chunk.offsets else 0
        rows = chunk.sizes[0] if chunk.sizes else 1
        return self._copies[Slice(self._names[write_item.index.fqn], first, first + rows)]

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise NotImplementedError


def write_part(folder: Path, snapshot: Snapshot) -> list[Chunk]:
    """Write one member's part to `folder` and sync it; returns where each slice is.

    Raises:
        OSError, RuntimeError: it cannot be written.
    """
    writer = FileSystemWriter(folder, sync_files=True)
    items = [_item(snapshot.tensors[piece.tensor], piece) for piece in snapshot.slices]
    # The writer names files after the place in this list.
    plans = writer.prepare_global_plan([SavePlan([])] * snapshot.rank + [SavePlan(items)])
    chunks = []
    numbers = {info.name: number for number, info in enumerate(snapshot.tensors)}
    for result in writer.write_data(plans[-1], _Copies(snapshot)).wait():
        number, where = numbers[result.index.fqn], result.storage_data
        first = result.index.offset[0] if result.index.offset else 0
        piece = next(p for p in snapshot.slices if p.tensor == number and p.first == first)
        chunks.append(
            Chunk(
                tensor=number,
                first=first,
                end=piece.end,
                file=where.relative_path,
                offset=where.offset,
                length=where.length,
            )
        )
    return chunks


def write_index(
    folder: Path, tensors: Sequence[TensorInfo], chunks: Sequence[Chunk], extra: Sequence[Extra] = ()
) -> None:
    """Write `.metadata`: torch's index of all parts. A tied tensor is in it under each of its names."""
    stored: dict[str, Any] = {}
    results = []
    for chunk in chunks:
        info = tensors[chunk.tensor]
        piece = _chunk(info, Slice(chunk.tensor, chunk.first, chunk.end))
        where = _StorageInfo(chunk.file, chunk.offset, chunk.length)
        for name in (info.name, *map(_joined, info.aliases)):
            index = MetadataIndex(name, piece.offsets)
            results.append(WriteResult(index=index, size_in_bytes=chunk.length, storage_data=where))
            stored.setdefault(
                name, TensorStorageMetadata(properties=_properties(info), size=torch.Size(info.shape), chunks=[])
            ).chunks.append(piece)
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


def _chunk(info: TensorInfo, piece: Slice) -> ChunkStorageMetadata:
    if not info.shape:
        return ChunkStorageMetadata(offsets=torch.Size([]), sizes=torch.Size([]))
    return ChunkStorageMetadata(
        offsets=torch.Size([piece.first] + [0] * (len(info.shape) - 1)),
        sizes=torch.Size([piece.end - piece.first, *info.shape[1:]]),
    )


def _index(info: TensorInfo, piece: Slice) -> MetadataIndex:
    return MetadataIndex(info.name, _chunk(info, piece).offsets)


def _properties(info: TensorInfo) -> TensorProperties:
    return TensorProperties(dtype=dtype_named(info.dtype))


def _item(info: TensorInfo, piece: Slice) -> WriteItem:
    data = TensorWriteData(chunk=_chunk(info, piece), properties=_properties(info), size=torch.Size(info.shape))
    return WriteItem(index=_index(info, piece), type=WriteItemType.SHARD, tensor_data=data)
