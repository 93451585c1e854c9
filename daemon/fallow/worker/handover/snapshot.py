"""The whole state as one tree, and copies of the state in pageable host memory.

Copies are made and restored between steps, when no member waits for this worker. So they may block the host. Pinned
memory for a whole state would take long to allocate and would stay with the process.
"""

from collections.abc import Collection, Sequence, Set
from typing import Any

import torch

from fallow.worker.prepared import state
from fallow.worker.prepared.modes import KINDS, read_extra, write_extra
from fallow.worker.prepared.objects import Prepared


def export_state(prepared: Prepared, plain: dict[str, Any], *, modes: Collection[str] = KINDS) -> dict[str, Any]:
    """Return the state for a new member, without extra state. Tensors are live; those of modules come first."""
    return {"objects": prepared.export(), "plain": plain, "modes": prepared.modes.export(modes)}


def load_state(prepared: Prepared, tree: dict[str, Any], received: Set[int] = frozenset()) -> dict[str, Any]:
    """Put an exported state into the live objects.

    Args:
        prepared: the live objects.
        tree: result of `export_state`; an optional entry "extra" holds extra state of modules by name.
        received: see `Prepared.load`.

    Returns:
        The plain values that belong to the state.

    Raises:
        FallowError: the tree does not fit the objects.
    """
    prepared.load(tree["objects"], received)
    if tree["modes"] is not None:
        prepared.modes.load(tree["modes"])
    if "extra" in tree:
        write_extra(prepared.modules, tree["extra"])
    plain: dict[str, Any] = tree["plain"]
    return plain


def load_from_host(prepared: Prepared, tree: dict[str, Any]) -> dict[str, Any]:
    """Load a state whose tensors are all on the host: each tensor goes to the device of its live counterpart.

    Raises:
        FallowError: the tree does not fit the objects.
    """
    saved, live = state.encode(tree, "state"), _encode(prepared)
    # Tensors of modules come first: `load_state` copies them into the live tensors.
    return load_state(prepared, state.decode_onto(saved, live, len(prepared.weights())))


class Snapshot:
    """A copy of everything prepared, taken by the constructor. Used before a rehearsal or a catch-up."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        encoded = _encode(prepared)
        weights = len(prepared.weights())
        self._tree = encoded.tree
        # Copies of weights are in a separate block, which is freed after `restore`: no optimizer adopts them.
        self._copies = _copies(encoded.tensors[:weights]) + _copies(encoded.tensors[weights:])

    def restore(self) -> None:
        """Restore everything. Works once, since the optimizers adopt the copies.

        Raises:
            FallowError: the script has since changed prepared objects so that the copies do not fit.
        """
        copies, self._copies = self._copies, []
        load_from_host(self._prepared, state.decode(self._tree, copies))


def _encode(prepared: Prepared) -> state.Encoded:
    """Encode the live state; tensors of modules come first."""
    return state.encode({**export_state(prepared, {}), "extra": read_extra(prepared.modules)}, "run")


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    copies = state.allocate([state.spec_of(tensor) for tensor in tensors])
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach())
    return copies
