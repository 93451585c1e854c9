"""Cutting a replicated state into parts, and copying one: all that the training waits for."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from fallow.worker.checkpoint.manifest import TensorInfo
from fallow.worker.handover.extra_state import pack
from fallow.worker.handover.state import TensorSpec, encode
from fallow.worker.prepared.objects import ModelNames

TREE = "fallow.tree"
"""Name of the last tensor: everything that is no tensor, as `state.Encoded.tree` (MessagePack)."""


class Slice(NamedTuple):
    """Rows [first, end) of a tensor; a scalar has one row."""

    tensor: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One member's part of the state after `step`, in memory of its own."""

    generation: int
    step: int
    epoch: int
    rank: int
    world: int
    tensors: list[TensorInfo]
    "of the whole state"
    slices: list[Slice]
    "of this part"
    copies: list[torch.Tensor] = field(repr=False)
    "CPU, contiguous, in the order of `slices`"
    modes: list[str]
    "what is frozen and what rests here: the members need not agree on it"
    extra: list[tuple[list[str | int], bytes]]
    "extra state of modules by path, see `manifest.Extra`; on the first rank only"
    asked: bool
    taken_at: float
    "Unix time"


def cut(specs: Sequence[TensorSpec], world: int) -> list[list[Slice]]:
    """Divide tensors among `world` members: equal bytes, cut between rows, a function of the arguments alone.

    Args:
        specs: all tensors in order.
        world: number of parts, at least 1.

    Returns:
        For each part its slices; together they hold every row of every tensor once.
    """
    parts: list[list[Slice]] = [[] for _ in range(world)]
    total = sum(spec.nbytes for spec in specs)
    at = 0
    for number, spec in enumerate(specs):
        rows = spec.shape[0] if spec.shape else 1
        width = spec.nbytes // rows if rows else 0
        if not width:
            parts[min(world - 1, at * world // total if total else 0)].append(Slice(number, 0, rows))
            continue
        first = 0
        for part in range(world):
            # The part holds the rows whose first byte is before its end.
            end = rows if part == world - 1 else min(rows, max(0, -(-(total * (part + 1) // world - at) // width)))
            if end > first:
                parts[part].append(Slice(number, first, end))
                first = end
        at += spec.nbytes
    return parts


def take(
    tree: dict[str, Any],
    rank: int,
    world: int,
    *,
    names: Sequence[ModelNames] = (),
    extra: Mapping[str, Any] | None = None,
    **known: Any,
) -> Snapshot:
    """Copy part `rank` of `world` of a state.

    Args:
        tree: as `switch.export_state` returns it; the same on all members.
        names: of the modules' tensors, so that torch's tools rebuild what `state_dict` gives.
        extra: extra state of modules by name, see `extra_state.read`.
        known: the snapshot's other fields.
    """
    encoded, tensors = encode(tree, "checkpoint")
    tensors.append(torch.frombuffer(bytearray(encoded.tree), dtype=torch.uint8))
    specs = [*encoded.tensors, TensorSpec("uint8", [len(encoded.tree)])]
    slices = cut(specs, world)[rank]
    infos = [
        TensorInfo(name=name, path=path, dtype=spec.dtype, shape=spec.shape, aliases=_aliases(path, names))
        for (name, path), spec in zip(_named(tree, names), specs, strict=True)
    ]
    copies = [_rows(tensors[piece.tensor], piece).clone() for piece in slices]
    blobs = [] if rank or not extra else _blobs(extra)
    return Snapshot(rank=rank, world=world, tensors=infos, slices=slices, copies=copies, extra=blobs, **known)


def _blobs(extra: Mapping[str, Any]) -> list[tuple[list[str | int], bytes]]:
    found: list[tuple[list[str | int], bytes]] = [([], pack(extra).numpy().tobytes())]
    for name, value in extra.items():
        _, number, key = name.split(".", 2)
        file = io.BytesIO()
        torch.save(value, file)
        found.append((["models", int(number), key], file.getvalue()))
    return found


def _aliases(path: list[str | int], names: Sequence[ModelNames]) -> list[list[str | int]]:
    if path[0] != "models" or not names:
        return []
    _, number, name = path
    assert isinstance(number, int)
    return [["models", number, alias] for alias, own in names[number].aliases.items() if own == name]


def _rows(tensor: torch.Tensor, piece: Slice) -> torch.Tensor:
    return tensor[piece.first : piece.end] if tensor.dim() else tensor


def _named(tree: dict[str, Any], names: Sequence[ModelNames] = ()) -> list[tuple[str, list[str | int]]]:
    """Names and paths of all tensors in the order of `state.encode`, then those of the tree itself."""
    seen: Counter[str] = Counter()
    found: list[tuple[str, list[str | int]]] = []
    paths: list[list[str | int]] = [path for top in tree.values() for path in _paths(top, [])]
    paths.append([TREE])
    for path in paths:
        if path[0] == "models" and names and path[2] in names[cast("int", path[1])].transient:
            path[0] = "transient"
        name = ".".join(map(str, path))
        seen[name] += 1
        if seen[name] > 1:
            # Keys like 1 and "1", or a name with a dot in it.
            name = f"{name}#{seen[name]}"
            path = [name]
        found.append((name, path))
    return found


def _paths(value: Any, at: list[str | int]) -> Iterator[list[str | int]]:
    if isinstance(value, torch.Tensor):
        yield at
    elif type(value) in (list, tuple, set):
        for number, item in enumerate(value):
            yield from _paths(item, [*at, number])
    elif type(value) in (dict, OrderedDict, Counter, defaultdict):
        for key, item in value.items():
            yield from _paths(key, [*at, "key"])
            yield from _paths(item, [*at, str(key)])
