"""The first exchange of a generation: who has the state, and its way to those who have not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from fallow.model import FallowError
from fallow.worker import checkpoint, state
from fallow.worker.group import Group
from fallow.worker.position import Position
from fallow.worker.prepared import Prepared

_DONORS = 4
"""More donors at once than this do not make the transfer faster."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What the exchange did and where its time went (seconds)."""

    position: Position
    received: int
    "bytes of state that this process received"
    group_s: float
    state_s: float


def export_state(prepared: Prepared, position: Position) -> dict[str, object]:
    """Everything that a newcomer needs, as a tree."""
    return {"objects": prepared.export(), "position": position.export()}


def load_state(prepared: Prepared, tree: dict[str, object]) -> Position:
    """Put an exported state into the live objects; returns the position that belongs to it."""
    objects = tree["objects"]
    assert isinstance(objects, dict)
    prepared.load(objects)
    return msgspec.convert(tree["position"], Position)


def exchange(group: Group, prepared: Prepared, position: Position, *, has_state: bool, newest: str | None) -> Exchanged:
    """Compare all members' states in a new group and bring everybody to the newest one.

    Args:
        group: the new generation's group.
        prepared: live objects; changed in place on those who receive.
        position: this member's position.
        has_state: it has trained (or received state) before.
        newest: path of the newest checkpoint, used by rank 0 if nobody has the state.

    Raises:
        Interrupted: the group broke; nothing was changed here.
        FallowError: members that should be equal differ, or the state does not fit.
    """
    started = time.monotonic()
    total = state.checksum_of(prepared.weights()) if has_state else 0
    mine = torch.tensor([group.generation, int(has_state), position.step, total], dtype=torch.int64)
    gathered = group.all_gather(mine)
    group.wait()
    met = time.monotonic()
    views = [[int(value) for value in row] for row in gathered]
    donors = _donors(group.generation, views)
    if not donors:
        if group.rank == 0 and newest is not None:
            position = load_state(prepared, checkpoint.load(Path(newest)))
        donors = [0]
    received = 0
    if len(donors) < group.size:
        tree, received = _transfer(group, donors[:_DONORS], prepared, position)
        if tree is not None:
            position = load_state(prepared, tree)
    return Exchanged(position, received, met - started, time.monotonic() - met)


def _donors(generation: int, views: list[list[int]]) -> list[int]:
    """Ranks with the most finished steps; empty if nobody has state."""
    for rank, view in enumerate(views):
        if view[0] != generation:
            raise FallowError(f"rank {rank} is in generation {view[0]}, not {generation}: a stale process answered")
    holders = [rank for rank, view in enumerate(views) if view[1]]
    if not holders:
        return []
    most = max(views[rank][2] for rank in holders)
    donors = [rank for rank in holders if views[rank][2] == most]
    if len({views[rank][3] for rank in donors}) > 1:
        sums = ", ".join(f"rank {rank}: {views[rank][3]:x}" for rank in donors)
        raise FallowError(
            f"generation {generation}: members at step {most} hold different weights ({sums}); the script changes "
            "weights outside the prepared optimizers, or the nodes compute differently (processor, torch version)"
        )
    return donors


def _transfer(
    group: Group, donors: list[int], prepared: Prepared, position: Position
) -> tuple[dict[str, object] | None, int]:
    """Send the whole state from the donors at once; returns the tree and its bytes on those who received it."""
    giving = group.rank in donors
    encoded, tensors = state.encode(export_state(prepared, position) if giving else None, "run")
    size = sum(spec.nbytes for spec in encoded.tensors)
    flat = state.flatten(tensors, size)
    outline = msgspec.msgpack.encode(encoded)
    head = torch.tensor([len(outline), size, state.checksum(flat)], dtype=torch.int64)
    group.broadcast(head, donors[0])
    group.wait()
    length, size, total = (int(value) for value in head)
    if not giving:
        flat = torch.empty(size + -size % 8, dtype=torch.uint8)
        outline = bytes(length)
    text = torch.frombuffer(bytearray(outline), dtype=torch.uint8)
    group.broadcast(text, donors[0])
    # One piece per donor. On a donor the other donors' pieces arrive over equal bytes.
    piece = -(-flat.numel() // len(donors))
    for number, donor in enumerate(donors):
        part = flat[number * piece : (number + 1) * piece]
        if part.numel():
            group.broadcast(part, donor)
    group.wait()
    if giving:
        return None, 0
    if state.checksum(flat) != total:
        raise FallowError(
            f"generation {group.generation}: the state arrived damaged at rank {group.rank}, or the donors differ"
        )
    received = msgspec.msgpack.decode(text.numpy().tobytes(), type=state.Encoded)
    tree = state.decode(received, state.unflatten(flat, received.tensors))
    return tree, size + length
