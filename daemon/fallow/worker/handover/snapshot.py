"""A whole state in plain memory of the host: a copy of the live one, and its way into the live objects.

Both are done between steps, where nobody waits for this worker's device, so the copies may make the host wait for it.
Pinned memory for a whole state would take long to get and stay with the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fallow.worker.handover.transfer import export_state, load_state
from fallow.worker.prepared import extra_state, state
from fallow.worker.prepared.objects import Prepared


class Snapshot:
    """Copies of all that was prepared, made when this returns: from before a rehearsal, or before a catch-up."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        encoded = _encode(prepared)
        weights = len(prepared.weights())
        self._tree = encoded.tree
        # Weights have a block of memory of their own, which is free after `restore`: nobody takes their copies over.
        self._copies = _copies(encoded.tensors[:weights]) + _copies(encoded.tensors[weights:])

    def restore(self) -> None:
        """Put everything back as it was. Once: the optimizers take the copies over.

        Raises:
            FallowError: the script has since changed what was prepared so that the copies do not fit.
        """
        copies, self._copies = self._copies, []
        load_from_host(self._prepared, state.decode(self._tree, copies))


def load_from_host(prepared: Prepared, tree: dict[str, Any]) -> dict[str, Any]:
    """Do as `load_state`, with tensors that are all on the host: each goes to where the live one in its place is.

    Raises:
        FallowError: it does not fit.
    """
    saved, live = state.encode(tree, "state"), _encode(prepared)
    # Tensors of modules come first, and are copied to where they belong.
    return load_state(prepared, state.placed(saved, live, len(prepared.weights())))


def _encode(prepared: Prepared) -> state.Encoded:
    """The live state; tensors of modules come first."""
    return state.encode({**export_state(prepared, {}), "extra": extra_state.read(prepared.modules)}, "run")


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    copies = state.room([state.spec_of(tensor) for tensor in tensors])
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach())
    return copies
