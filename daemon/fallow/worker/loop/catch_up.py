"""What a script does to prepared objects on its way to the place where the members are.

A newcomer that has just received the state, and members that went back to a checkpoint, run lines of the script that
others have run before: those between two calls of `run.updates`. Such a line may step a scheduler, set a learning rate,
freeze a layer or put a module to rest, change weights by hand or the statistics of a BatchNorm by a forward, clear an
optimizer's state or begin a moving average anew. The state that was received has all that already, so it is put back as
it came.
"""

from __future__ import annotations

from typing import Any

import torch

from fallow.worker.handover.snapshot import Snapshot
from fallow.worker.prepared.objects import Prepared


class CatchUp:
    """The state of prepared objects, as received."""

    def __init__(self) -> None:
        self._state: Snapshot | None = None
        "None: nothing is kept"
        self._optimizers: list[torch.optim.Optimizer] = []
        "that add no groups: those that the members have added are there already"

    def keep(self, prepared: Prepared) -> None:
        """The state is here, and the script is elsewhere. What is kept already stays: the script has gone on since."""
        if self._state is None:
            self._state = Snapshot(prepared)
            self._optimizers = list(prepared.optimizers)
            for optimizer in self._optimizers:
                setattr(optimizer, "add_param_group", _added_already)  # noqa: B010  # mypy forbids assigning to a method

    def put_back(self) -> None:
        """The script is where the members are, or they compare what they have."""
        state, self._state = self._state, None
        if state is not None:
            for optimizer in self._optimizers:
                delattr(optimizer, "add_param_group")
            state.restore()


def _added_already(*args: Any, **kwargs: Any) -> None:
    """In the place of `Optimizer.add_param_group`."""
