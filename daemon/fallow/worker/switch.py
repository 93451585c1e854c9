"""The first exchange of a generation: who has the state, and its way to those who have not."""

from __future__ import annotations

import time
import zlib
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
    paces: list[float]
    "seconds per shard that the members bring along, by rank; 0: not measured"


def export_state(prepared: Prepared, position: Position) -> dict[str, object]:
    """Everything that a newcomer needs, as a tree."""
    return {"objects": prepared.export(), "position": position.export()}


def load_state(prepared: Prepared, tree: dict[str, object]) -> Position:
    """Put an exported state into the live objects; returns the position that belongs to it."""
    objects = tree["objects"]
    assert isinstance(objects, dict)
    prepared.load(objects)
    return msgspec.convert(tree["position"], Position)


def exchange(
    group: Group, prepared: Prepared, position: Position, *, has_state: bool, newest: str | None, pace: float
) -> Exchanged:
    """Compare all members' states in a new group and bring everybody to the newest one.

    Args:
        group: the new generation's group.
        prepared: live objects; changed in place on those who receive.
        position: this member's position.
        has_state: it has trained (or received state) before.
        newest: path of the newest checkpoint, used by rank 0 if nobody has the state.
        pace: this member's seconds per shard; 0: not measured.

    Raises:
        Interrupted: the group broke; nothing was changed here.
        FallowError: members that should be equal differ, or the state does not fit.
    """
    started = time.monotonic()
    total = state.checksum_of(prepared.weights()) if has_state else 0
    words = [group.generation, int(has_state), position.progress, total, round(pace * 1e9)]
    mine = torch.tensor(words, dtype=torch.int64)
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
    receivers = [rank for rank in range(group.size) if rank not in donors]
    if receivers:
        tree, received = _transfer(group, donors[:_DONORS], prepared, position, receivers)
        if tree is not None:
            position = load_state(prepared, tree)
    paces = [view[4] / 1e9 for view in views]
    return Exchanged(position, received, met - started, time.monotonic() - met, paces)


def _donors(generation: int, views: list[list[int]]) -> list[int]:
    """Ranks with the most finished steps and phases; empty if nobody has state."""
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
            f"generation {generation}: members at step {most >> 8} hold different weights ({sums}); the script changes "
            "weights outside the prepared optimizers, or the nodes compute differently (processor, torch version)"
        )
    return donors


def _transfer(
    group: Group, donors: list[int], prepared: Prepared, position: Position, receivers: list[int]
) -> tuple[dict[str, object] | None, int]:
    """Send the whole state, one piece from each donor; returns the tree and its bytes on those who received it."""
    giving = group.rank in donors
    encoded, tensors = state.encode(export_state(prepared, position) if giving else None, "run")
    outline = msgspec.msgpack.encode(encoded)
    size = state.stream_size(encoded.tensors)
    mine = torch.empty(0, dtype=torch.uint8)
    if giving:
        mine = state.flatten(tensors, *_piece(size, donors, donors.index(group.rank)))
    heads = group.all_gather(
        torch.tensor([len(outline), zlib.crc32(outline), size, state.checksum(mine)], dtype=torch.int64)
    )
    group.wait()
    length, crc, size, _ = (int(value) for value in heads[donors[0]])
    if any(heads[donor][:3].tolist() != [length, crc, size] for donor in donors):
        raise FallowError(
            f"generation {group.generation}: members with equal weights hold different optimizer or other state; "
            "prepare everything that changes with the steps"
        )
    text = torch.frombuffer(bytearray(outline if giving else bytes(length)), dtype=torch.uint8)
    taking = group.rank in receivers
    flat = torch.empty(size if taking else 0, dtype=torch.uint8)
    group.broadcast(text, donors[0])
    for number, donor in enumerate(donors):
        first, end = _piece(size, donors, number)
        if first == end:
            continue
        part = mine if donor == group.rank else flat[first:end]
        if len(receivers) > len(donors):
            # A tree is better than one transfer per receiver. Everybody takes part, so the others need a place too.
            group.broadcast(part if part.numel() else torch.empty(end - first, dtype=torch.uint8), donor)
            continue
        for receiver in receivers:
            involved = group.rank in (donor, receiver)
            group.hand_over(donor, receiver, part if involved else flat[:0])
    group.wait()
    if not taking:
        return None, 0
    for number, donor in enumerate(donors):
        first, end = _piece(size, donors, number)
        if state.checksum(flat[first:end]) != int(heads[donor][3]):
            raise FallowError(
                f"generation {group.generation}: the state arrived damaged at rank {group.rank} from rank {donor}"
            )
    received = msgspec.msgpack.decode(text.numpy().tobytes(), type=state.Encoded)
    tree = state.decode(received, state.unflatten(flat, received.tensors))
    return tree, size + length


def _piece(size: int, donors: list[int], number: int) -> tuple[int, int]:
    """The part of a stream of `size` bytes (a multiple of 64) that the donor of that number sends."""
    words = size // 64
    return words * number // len(donors) * 64, words * (number + 1) // len(donors) * 64
