"""Members whose weights have come apart get one member's state again, between two steps.

Each member's optimizer acts for itself, and kernels of unlike processors may differ in a result's last bit. Without
`reproducible=True` that is no mistake, as it is none under DDP; but what is never brought together drifts apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import torch

from fallow.worker.handover import extra_state, state
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport.group import Group

EVERY = 100
"""Steps between two such transfers at least: unlike processors differ in nearly every step."""


def source(pieces: Sequence[int]) -> int:
    """Whose state counts, given a checksum of each rank: the first rank's of those that most agree with."""
    ((usual, _),) = Counter(pieces).most_common(1)
    return pieces.index(usual)


def align(group: Group, prepared: Prepared, root: int) -> None:
    """Put `root`'s state into all members' objects.

    Raises:
        Interrupted: the group broke; nothing has changed here.
    """
    encoded, tensors = state.encode([prepared.export(), extra_state.read(prepared.modules)], "run")
    text = torch.frombuffer(bytearray(msgspec.msgpack.encode(encoded)), dtype=torch.uint8)
    length = torch.tensor([text.numel()])
    group.broadcast(length, root)
    group.wait()
    if group.rank != root:
        text = torch.empty(int(length), dtype=torch.uint8)
    group.broadcast(text, root)
    group.wait()
    if group.rank != root:
        encoded = msgspec.msgpack.decode(text.numpy().tobytes(), type=state.Encoded)
        tensors = state.room(encoded.tensors)
    for tensor in tensors:
        if tensor.numel():
            group.broadcast(state.as_bytes(tensor), root)
    group.wait()
    if group.rank != root:
        objects, extra = state.decode(encoded, tensors)
        prepared.load(objects)
        extra_state.write(prepared.modules, extra)
