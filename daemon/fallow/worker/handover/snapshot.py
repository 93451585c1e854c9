"""The whole state as one tree, and copies of it in plain memory of the host.

Copies are made and put back between steps, where nobody waits for this worker's device, so they may make the host wait
for it. Pinned memory for a whole state would take long to get and stay with the process.
"""

from collections.abc import Collection, Sequence, Set
from typing import Any

import torch

from fallow.worker.prepared import state
from fallow.worker.prepared.modes import KINDS, read_extra, write_extra
from fallow.worker.prepared.objects import Prepared


def export_state(prepared: Prepared, plain: dict[str, Any], *, modes: Collection[str] = KINDS) -> dict[str, Any]:
    """All that a newcomer needs but for extra state; tensors are the live ones, those of modules come first."""
    return {"objects": prepared.export(), "plain": plain, "modes": prepared.modes.export(modes)}


def load_state(prepared: Prepared, tree: dict[str, Any], received: Set[int] = frozenset()) -> dict[str, Any]:
    """Put an exported state into the live objects.

    Args:
        prepared: the live objects.
        tree: as `export_state` made it; "extra", if it is there, is extra state of modules by name.
        received: see `Prepared.load`.

    Returns:
        The plain values that belong to the state.

    Raises:
        FallowError: it does not fit.
    """
    prepared.load(tree["objects"], received)
    if tree["modes"] is not None:
        prepared.modes.load(tree["modes"])
    if "extra" in tree:
        write_extra(prepared.modules, tree["extra"])
    plain: dict[str, Any] = tree["plain"]
    return plain


def load_from_host(prepared: Prepared, tree: dict[str, Any]) -> dict[str, Any]:
    """Do as `load_state`, with tensors that are all on the host: each goes to where the live one in its place is.

    Raises:
        FallowError: it does not fit.
    """
    saved, live = state.encode(tree, "state"), _encode(prepared)
    # Tensors of modules come first, and are copied to where they belong.
    return load_state(prepared, state.decode_onto(saved, live, len(prepared.weights())))


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


def _encode(prepared: Prepared) -> state.Encoded:
    """The live state; tensors of modules come first."""
    return state.encode({**export_state(prepared, {}), "extra": read_extra(prepared.modules)}, "run")


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    copies = state.allocate([state.spec_of(tensor) for tensor in tensors])
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach())
    return copies
