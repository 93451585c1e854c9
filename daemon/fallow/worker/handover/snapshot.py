"""The state from before a rehearsal, or before a newcomer's way to the members' place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fallow.worker.handover.pieces import copy_to_device, copy_to_host
from fallow.worker.handover.transfer import export_state, load_state
from fallow.worker.prepared import extra_state, state
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport.device import asynchronous


class Snapshot:
    """Copies of all that was prepared, on the host: a device may have no room for them.

    They are made when this returns. What a device has passes a ring: pinned memory for all of it would take long to get
    and stay with the process.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        tree = {**export_state(prepared, {}), "extra": extra_state.read(prepared.modules)}
        encoded = state.encode(tree, "run")
        self._tree = encoded.tree
        self._specs = encoded.specs
        self._weights = len(prepared.weights())
        weights, others = encoded.tensors[: self._weights], encoded.tensors[self._weights :]
        # Weights have a block of memory of their own, which is free after `restore`: nobody takes their copies over.
        self._copies = copies_through_ring(weights) + copies_through_ring(others)

    def restore(self) -> None:
        """Put everything back as it was. Once: the optimizers take the copies over.

        Raises:
            FallowError: the script has since changed what was prepared so that the copies do not fit.
        """
        on_device = {n: spec for n, spec in enumerate(self._specs) if spec.on_device}
        weights = state.fitting(self._prepared.weights(), self._specs[: self._weights])
        live = {n: tensor for n, tensor in weights.items() if n in on_device}
        others = [n for n in on_device if n not in live]
        new = state.room([on_device[n] for n in others], self._prepared.device)
        placed = {**live, **dict(zip(others, new, strict=True))}
        copy_to_device([state.as_bytes(self._copies[n]) for n in placed], [*map(state.as_bytes, placed.values())])
        tensors = [placed.get(n, copy) for n, copy in enumerate(self._copies)]
        self._copies = []
        load_state(self._prepared, state.decode(self._tree, tensors), {id(tensor) for tensor in live.values()})


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
