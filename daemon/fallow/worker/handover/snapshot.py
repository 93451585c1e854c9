"""A whole state in plain memory of the host: a copy of the live one, and its way into the live objects.

What a device has passes a ring, as in a hand-over. A copy from plain memory to a device would make the host wait for
all that the device has to do, and pinned memory for a whole state would take long to get and stay with the process.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from fallow.worker.handover.pieces import copy_to_device, copy_to_host
from fallow.worker.handover.transfer import export_state, load_state
from fallow.worker.prepared import extra_state, state
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport.device import asynchronous


class Snapshot:
    """Copies of all that was prepared, made when this returns: from before a rehearsal, or before a catch-up."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        encoded = _encode(prepared)
        weights = len(prepared.weights())
        # Weights have a block of memory of their own, which is free after `restore`: nobody takes their copies over.
        copies = copies_through_ring(encoded.tensors[:weights]) + copies_through_ring(encoded.tensors[weights:])
        self._tree = state.decode(encoded.tree, copies)
        self._on_device = {
            str(path)
            for path, tensor in zip(encoded.paths, encoded.tensors, strict=True)
            if asynchronous(tensor.device)
        }

    def restore(self) -> None:
        """Put everything back as it was. Once: the optimizers take the copies over.

        Raises:
            FallowError: the script has since changed what was prepared so that the copies do not fit.
        """
        tree, self._tree = self._tree, {}
        load_from_host(self._prepared, tree, self._on_device)


def load_from_host(prepared: Prepared, tree: dict[str, Any], on_device: Collection[str] = ()) -> dict[str, Any]:
    """Do as `load_state`, with tensors that are all on the host.

    Args:
        prepared: the live objects.
        tree: see `load_state`; used up.
        on_device: paths, as text, of tensors that belong on the device though nothing live tells it.

    Raises:
        FallowError: it does not fit.
    """
    if not asynchronous(prepared.device):
        return load_state(prepared, tree)
    saved, live = state.encode(tree, "state"), _encode(prepared)
    here = {str(path): tensor for path, tensor in zip(live.paths, live.tensors, strict=True)}
    placed, received = dict[int, torch.Tensor](), set[int]()
    for n, (path, tensor) in enumerate(zip(saved.paths, saved.tensors, strict=True)):
        own = here.get(str(path))
        if path[:2] == ["objects", "models"] and own is not None and _takes_bytes_of(own, tensor):
            placed[n] = own
            received.add(id(own))
        elif (
            str(path) in on_device or _is_on_device(prepared, path, tensor) if own is None else asynchronous(own.device)
        ):
            placed[n] = state.room([replace(state.spec_of(tensor), on_device=True)], prepared.device)[0]
    copy_to_device([state.as_bytes(saved.tensors[n]) for n in placed], [*map(state.as_bytes, placed.values())])
    tensors = [placed.get(n, tensor) for n, tensor in enumerate(saved.tensors)]
    return load_state(prepared, state.decode(saved.tree, tensors), received)


def _encode(prepared: Prepared) -> state.Encoded:
    """The live state; tensors of modules come first."""
    return state.encode({**export_state(prepared, {}), "extra": extra_state.read(prepared.modules)}, "run")


def _takes_bytes_of(own: torch.Tensor, saved: torch.Tensor) -> bool:
    return asynchronous(own.device) and bool(state.fitting([own], [replace(state.spec_of(saved), on_device=True)]))


def _is_on_device(prepared: Prepared, path: state.Path, tensor: torch.Tensor) -> bool:
    """Of what has no counterpart here yet: the state of an optimizer that has made no step."""
    if path[:2] != ["objects", "optimizers"]:
        return False
    group = prepared.optimizers[int(path[2])].param_groups[0]
    return tensor.dim() > 0 or bool(group.get("fused") or group.get("capturable"))


def copies_through_ring(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the tensors' values now, in one block of plain memory. Waits for the device."""
    copies = state.room([state.spec_of(tensor) for tensor in tensors])
    pairs = list(zip(tensors, copies, strict=True))
    for tensor, copy in pairs:
        if not asynchronous(tensor.device):
            copy.copy_(tensor.detach())
    on_device = [(tensor, copy) for tensor, copy in pairs if asynchronous(tensor.device)]
    copy_to_host([state.as_bytes(tensor) for tensor, _ in on_device], [state.as_bytes(copy) for _, copy in on_device])
    return copies
