"""Cuts a replicated state into parts and copies one part. The training waits only for this copy."""

import contextlib
import io
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch

from fallow.worker.checkpoint.manifest import FORMAT, Chunk, Manifest, TensorInfo
from fallow.worker.handover.pieces import copies_through_ring
from fallow.worker.prepared.objects import ModelNames
from fallow.worker.prepared.state import Path, TensorSpec, decode, device_of, encode, host_copies, spec_of, to_bytes
from fallow.worker.transport import device as devices

_TREE = "fallow.tree"
"""Name of the last tensor. It holds everything that is no tensor: `state.Encoded.tree` (MessagePack)."""


@dataclass(frozen=True, slots=True)
class PartSnapshot:
    """A copy of one member's part of the state after a step."""

    rank: int
    manifest: Manifest
    "manifest of the whole checkpoint, with this member's `modes`, and still without chunks and files"
    chunks: list[Chunk]
    "chunks of this part"
    copies: list[torch.Tensor] = field(repr=False)
    "copies in the order of `chunks`; on the device, if it has free memory, until `bring_to_host`"
    copies_ready: torch.Event | None
    "event after which copies and `extra` may be read"
    extra: dict[str, Any]
    "extra state of modules by name, with copied tensors; first rank only"
    texts: list[tuple[Path, bytes]]
    "everything that is no tensor, for torch's tools; first rank only"

    def bring_to_host(self) -> None:
        """Move all copies to the host. Called by the writing thread while the training continues."""
        if self.copies_ready is not None:
            devices.enter(self.copies_ready.device)
        device = device_of(self.copies)
        if devices.asynchronous(device):
            with devices.side_stream(device, self.copies_ready):
                self.copies[:] = copies_through_ring(self.copies)
        devices.wait(self.copies_ready)


def cut(specs: Sequence[TensorSpec], world: int) -> list[list[Chunk]]:
    """Divide tensors among `world` members: nearly equal bytes, cut between rows. Depends only on the arguments.

    Returns:
        The chunks of each part. Together they hold every row of every tensor once.
    """
    parts: list[list[Chunk]] = [[] for _ in range(world)]
    total = sum(spec.nbytes for spec in specs)
    at = 0
    for number, spec in enumerate(specs):
        rows = spec.shape[0] if spec.shape else 1
        width = spec.nbytes // rows if rows else 0
        if not width:
            parts[min(world - 1, at * world // total if total else 0)].append(Chunk(tensor=number, first=0, end=rows))
            continue
        first = 0
        for part in range(world):
            # A part holds the rows whose first byte is before the part's end.
            end = rows if part == world - 1 else min(rows, max(0, -(-(total * (part + 1) // world - at) // width)))
            if end > first:
                parts[part].append(Chunk(tensor=number, first=first, end=end))
                first = end
        at += spec.nbytes
    return parts


def take(
    tree: dict[str, Any],
    rank: int,
    world: int,
    *,
    names: Sequence[ModelNames] = (),
    extra: Mapping[str, Any] = MappingProxyType({}),
    **manifest_fields: Any,
) -> PartSnapshot:
    """Copy part `rank` of `world` of a state.

    The training may change the state once the copies are made. Copies on the device are fast, and the writing thread
    moves them to the host later. If the device lacks free memory, copies go to the host at once and the device waits.

    Args:
        tree: result of `snapshot.export_state`; equal on all members.
        rank: 0-based number of the part.
        world: number of parts.
        names: names of the modules' tensors, so that torch's tools rebuild the `state_dict` of each module.
        extra: extra state of modules by name, see `modes.read_extra`; first rank only.
        manifest_fields: further fields of the manifest.
    """
    encoded = encode(tree, "checkpoint")
    tensors = [*encoded.tensors, torch.frombuffer(bytearray(encoded.tree), dtype=torch.uint8)]
    specs = [spec_of(tensor) for tensor in tensors]
    chunks = cut(specs, world)[rank]
    infos = _infos([*encoded.paths, [_TREE]], specs, names, encoded.aliases)
    encoded_extra = encode(dict(extra), "checkpoint")
    rows = [rows_of(tensors[chunk.tensor], chunk) for chunk in chunks]
    device = device_of([*rows, *encoded_extra.tensors])
    copies: list[torch.Tensor] = []
    if devices.has_free_memory(device, sum(row.nbytes for row in rows)):
        with contextlib.suppress(torch.OutOfMemoryError):  # the process may be limited to less than the free memory
            copies = [row.detach().clone() for row in rows]
    if not copies:
        copies, _ = host_copies(rows)
    extra_copies, _ = host_copies(encoded_extra.tensors)
    return PartSnapshot(
        rank=rank,
        manifest=Manifest(format=FORMAT, world=world, tensors=infos, chunks=[], files=[], **manifest_fields),
        chunks=chunks,
        copies=copies,
        copies_ready=devices.event(device),
        extra=decode(encoded_extra.tree, extra_copies),
        texts=[] if rank else _texts(encoded.plain),
    )


def rows_of(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return a view of the chunk's rows of a tensor."""
    return tensor[chunk.first : chunk.end] if tensor.dim() else tensor


def extra_parts(snapshot: PartSnapshot) -> list[tuple[Path, bytes]]:
    """Return the content of the file `EXTRA`, see `manifest.Extra`."""
    own: list[tuple[Path, bytes]] = []
    for name, value in snapshot.extra.items():
        _, number, key = name.split(".", 2)
        own.append((["models", int(number), key], _saved(value)))
    return [([], to_bytes(snapshot.extra, "checkpoint")), *snapshot.texts, *own]


def _texts(plain: Sequence[tuple[Path, Any]]) -> list[tuple[Path, bytes]]:
    """Return the values that torch's tools need besides tensors to rebuild each object's `state_dict`."""
    object_values = [(path[1:], value) for path, value in plain if path[:1] == ["objects"]]
    kinds = ("optimizers", "others", "dicts")
    return [(path, _saved(_with_text_keys(path, value))) for path, value in object_values if path and path[0] in kinds]


def _with_text_keys(path: Path, value: Any) -> Any:
    """Turn the parameter numbers in an optimizer's state into text, since keys in torch's index are text."""
    if path[0] != "optimizers" or len(path) < 3:
        return value  # a whole optimizer keeps its numbers
    if path[2:] == ["state"]:
        return {str(number): entry for number, entry in value.items()}
    if path[2:] == ["param_groups"]:
        return [{**group, "params": list(map(str, group["params"]))} for group in value]
    if path[2] == "param_groups" and path[4:] == ["params"]:
        return list(map(str, value))
    return value


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _infos(
    paths: Sequence[Path],
    specs: Sequence[TensorSpec],
    names: Sequence[ModelNames],
    alias_paths: Sequence[tuple[int, Path]],
) -> list[TensorInfo]:
    """Describe each tensor: unique name, dtype, shape, and positions for torch's tools."""
    name_counts: Counter[str] = Counter()
    infos: list[TensorInfo] = []
    aliases_of = defaultdict[int, list[Path]](list)
    for tensor, alias in alias_paths:
        aliases_of[tensor].append(alias[alias[0] == "objects" :])
    for tensor, (path, spec) in enumerate(zip(paths, specs, strict=True)):
        path, aliases = path[path[0] == "objects" :], aliases_of[tensor]
        if path[0] == "models" and names:
            _, number, key = path
            own = names[cast("int", number)]
            if key in own.transient:
                path = ["transient", number, key]
            else:
                aliases = [["models", number, alias] for alias in own.aliases.get(str(key), ())]
        name = ".".join(map(str, path))
        name_counts[name] += 1
        if name_counts[name] > 1:
            # Two paths have one name: keys like 1 and "1", or a key with a dot.
            name = f"{name}#{name_counts[name]}"
            path, aliases = [name], []
        infos.append(TensorInfo(name=name, path=path, dtype=spec.dtype, shape=spec.shape, aliases=aliases))
    return infos
