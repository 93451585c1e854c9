"""What a script does to prepared objects on its way to the place where the members are.

A newcomer that has just received the state, and members that went back to a checkpoint, run lines of the script that
others have run before: those between two calls of `run.steps`. Prepared objects do not act there (see `Gate`), but a
line may set a learning rate, freeze a layer or put a module to rest, change weights by hand or the statistics of a
BatchNorm by a forward, clear an optimizer's state or begin a moving average anew. The state that was received has all
that already, so it is put back as it came.
"""

from __future__ import annotations

import torch

from fallow.worker.handover import extra_state
from fallow.worker.handover.state import Encoded, decode, encode
from fallow.worker.prepared.objects import Prepared


class CatchUp:
    """The state of prepared objects, as received."""

    def __init__(self) -> None:
        self._state: Encoded | None = None
        "None: nothing is kept"
        self._tensors: list[torch.Tensor] = []
        "its own; copies in main memory: an accelerator's may have no room for them"
        self._modes: list[str] = []

    def keep(self, prepared: Prepared) -> None:
        """The state is here, and the script is elsewhere. What is kept already stays: the script has gone on since."""
        if self._state is None:
            self._state, tensors = encode([prepared.export(), extra_state.read(prepared.modules)], "run")
            self._tensors = [tensor.clone() for tensor in tensors]
            self._modes = prepared.modes.export()

    def put_back(self, prepared: Prepared) -> None:
        """The script is where the members are, or they compare what they have."""
        kept, self._state = self._state, None
        tensors, self._tensors = self._tensors, []
        if kept is not None:
            objects, extra = decode(kept, tensors)
            prepared.load(objects)
            extra_state.write(prepared.modules, extra)
            prepared.modes.load(self._modes)
