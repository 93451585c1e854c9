"""Members whose weights have come apart get one member's state again, between two steps.

Each member's optimizer acts for itself, and kernels of unlike processors may differ in a result's last bit. Without
`reproducible=True` that is no mistake, as it is none under DDP; but what is never brought together drifts apart.
"""

from __future__ import annotations

import msgspec

from fallow.worker.prepared import extra_state, state
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport import device
from fallow.worker.transport.group import Group

EVERY = 100
"""Steps between two such transfers at least: unlike processors differ in nearly every step."""


def align(group: Group, prepared: Prepared, root: int) -> None:
    """Put `root`'s state into all members' objects, over the group's transport.

    Raises:
        Interrupted: the group broke; nothing has changed here.
    """
    text, tensors = b"", []
    if group.rank == root:
        encoded = state.encode([prepared.export(), extra_state.read(prepared.modules)], "run")
        text, tensors = msgspec.msgpack.encode((encoded.tree, encoded.specs)), encoded.tensors
    text = group.gather(text)[root]
    tree, specs = msgspec.msgpack.decode(text, type=tuple[bytes, list[state.TensorSpec]])
    if group.rank != root:
        tensors = state.room(specs, prepared.device)
    moved = [device.to_device(tensor.detach(), group.device) for tensor in tensors]
    for tensor in moved:
        if tensor.numel():
            group.copy(state.as_bytes(tensor), root)
    group.wait_and_verify()
    if group.rank != root:
        moved = [device.to_device(there, here.device) for there, here in zip(moved, tensors, strict=True)]
        objects, extra = state.decode(tree, moved)
        prepared.load(objects)
        extra_state.write(prepared.modules, extra)
