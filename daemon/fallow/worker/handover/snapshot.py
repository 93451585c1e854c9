"""The state from before a rehearsal, or before a newcomer's way to the members' place."""

from __future__ import annotations

from fallow.worker.handover.transfer import export_state, load_state
from fallow.worker.prepared import extra_state, state
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport import device


class Snapshot:
    """Copies of all that was prepared, on the host: a device may have no room for them.

    The copies are complete behind what the device was given by now; nobody waits for them here.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        tree = {**export_state(prepared, {}), "extra": extra_state.read(prepared.modules)}
        encoded = state.encode(tree, "run")
        self._tree = encoded.tree
        self._specs = encoded.specs
        self._weights = len(prepared.weights())
        weights, _ = state.host_copies(encoded.tensors[: self._weights])  # by themselves: nobody takes them over
        others, self._copied = state.host_copies(encoded.tensors[self._weights :])
        self._copies = [*weights, *others]

    def restore(self) -> None:
        """Put everything back as it was. Once: the optimizers take the copies over.

        Raises:
            FallowError: the script has since changed what was prepared so that the copies do not fit.
        """
        device.wait(self._copied)
        tensors = [
            device.to_device(copy, self._prepared.device) if spec.on_device and number >= self._weights else copy
            for number, (copy, spec) in enumerate(zip(self._copies, self._specs, strict=True))
        ]
        self._copies = []
        load_state(self._prepared, state.decode(self._tree, tensors))
