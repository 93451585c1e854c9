"""Cutting a replicated state into parts, and copying one: all that the training waits for."""

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
"""Name of the last tensor: everything that is no tensor, as `state.Encoded.tree` (MessagePack)."""


@dataclass(frozen=True, slots=True)
class PartSnapshot:
    """One member's part of the state after a step, in memory of its own."""

    rank: int
    manifest: Manifest
    "of the whole checkpoint, as far as this member knows it: with its own `modes`, and without chunks and files"
    chunks: list[Chunk]
    "of this part"
    copies: list[torch.Tensor] = field(repr=False)
    "in the order of `chunks`; on their device if that has room for them, until `bring_to_host`"
    copied: torch.Event | None
    "the event behind which copies and `extra` may be read"
    extra: dict[str, Any]
    "extra state of modules by name, with copies of its tensors; on the first rank only"
    texts: list[tuple[Path, bytes]]
    "what is no tensor, for torch's tools; on the first rank only"

    def bring_to_host(self) -> None:
        """Wait until all copies are on the host. For the thread that writes: the training goes on meanwhile."""
        if self.copied is not None:
            devices.enter(self.copied.device)
        device = device_of(self.copies)
        if devices.asynchronous(device):
            with devices.side_stream(device, self.copied):
                self.copies[:] = copies_through_ring(self.copies)
        devices.wait(self.copied)


def cut(specs: Sequence[TensorSpec], world: int) -> list[list[Chunk]]:
    """Divide tensors among `world` members: equal bytes, cut between rows, a function of the arguments alone.

    Returns:
        For each part its chunks; together they hold every row of every tensor once.
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
            # The part holds the rows whose first byte is before its end.
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
    **known: Any,
) -> PartSnapshot:
    """Copy part `rank` of `world` of a state.

    The training may change the state as soon as the copies are made. So they are made on the device, where that takes
    no longer than reading the state once, and go to the host beside the training. Without room on the device they go
    to the host at once, and the device does nothing else meanwhile.

    Args:
        tree: as `snapshot.export_state` returns it; the same on all members.
        names: of the modules' tensors, so that torch's tools rebuild what `state_dict` gives.
        extra: extra state of modules by name, see `modes.read_extra`; of the first rank.
        known: the manifest's other fields.
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
    if devices.has_room(device, sum(row.nbytes for row in rows)):
        with contextlib.suppress(torch.OutOfMemoryError):  # this process may not use all that is free
            copies = [row.detach().clone() for row in rows]
    if not copies:
        copies, _ = host_copies(rows)
    extra_copies, _ = host_copies(encoded_extra.tensors)
    return PartSnapshot(
        rank=rank,
        manifest=Manifest(format=FORMAT, world=world, tensors=infos, chunks=[], files=[], **known),
        chunks=chunks,
        copies=copies,
        copied=devices.event(device),
        extra=decode(encoded_extra.tree, extra_copies),
        texts=[] if rank else _texts(encoded.plain),
    )


def rows_of(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """The rows of a tensor that a part holds."""
    return tensor[chunk.first : chunk.end] if tensor.dim() else tensor


def extra_parts(snapshot: PartSnapshot) -> list[tuple[Path, bytes]]:
    """The content of the first rank's file of what is no tensor, see `manifest.Extra`."""
    own: list[tuple[Path, bytes]] = []
    for name, value in snapshot.extra.items():
        _, number, key = name.split(".", 2)
        own.append((["models", int(number), key], _saved(value)))
    return [([], to_bytes(snapshot.extra, "checkpoint")), *snapshot.texts, *own]


def _texts(plain: Sequence[tuple[Path, Any]]) -> list[tuple[Path, bytes]]:
    """What torch's tools need besides the tensors to rebuild each object's `state_dict`."""
    kept = [(path[1:], value) for path, value in plain if path[:1] == ["objects"]]
    wanted = ("optimizers", "others", "dicts")
    return [(path, _saved(_with_text_keys(path, value))) for path, value in kept if path and path[0] in wanted]


def _with_text_keys(path: Path, value: Any) -> Any:
    """An optimizer's parameters have numbers, by which they are keys of its state: torch's index makes text of keys."""
    if path[0] != "optimizers" or len(path) < 3:
        return value  # all of the optimizer, with numbers throughout
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
    further: Sequence[tuple[int, Path]],
) -> list[TensorInfo]:
    """What each tensor looks like, its unique name, and the places where torch's tools see it."""
    seen: Counter[str] = Counter()
    infos: list[TensorInfo] = []
    aliases_of = defaultdict[int, list[Path]](list)
    for tensor, alias in further:
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
        seen[name] += 1
        if seen[name] > 1:
            # Keys like 1 and "1", or a name with a dot in it.
            name = f"{name}#{seen[name]}"
            path, aliases = [name], []
        infos.append(TensorInfo(name=name, path=path, dtype=spec.dtype, shape=spec.shape, aliases=aliases))
    return infos
