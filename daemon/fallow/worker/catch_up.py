"""What a script sets in prepared objects on its way to the place where the members are.

A newcomer that has just received the state, and members that went back to a checkpoint, run lines of the script that
others have run before: those between two calls of `run.steps`. Prepared objects do nothing there (see `Gate`), but a
line may set a learning rate, freeze a layer or put a module to rest, and change weights by hand or the statistics of a
BatchNorm by a forward. The state that was received has all that already, so it is put back as it came.
"""

from __future__ import annotations

from typing import Any

import torch

from fallow.worker.prepared import Prepared


class CatchUp:
    """Settings of prepared objects, weights and buffers, as received."""

    def __init__(self) -> None:
        self._groups: list[list[dict[str, Any]]] | None = None
        "of each optimizer; None: nothing is kept"
        self._modes: list[str] = []
        self._weights: list[torch.Tensor] = []
        "copies in main memory: an accelerator's may have no room for them"

    def keep(self, prepared: Prepared) -> None:
        """The state is here, and the script is elsewhere. What is kept already stays: the script has gone on since."""
        if self._groups is None:
            self._groups = [[_settings(group) for group in o.param_groups] for o in prepared.optimizers]
            self._modes = prepared.modes.export()
            self._weights = [tensor.detach().to("cpu", copy=True) for tensor in prepared.weights()]

    def put_back(self, prepared: Prepared) -> None:
        """The script is where the members are, or they compare what they have."""
        kept, self._groups = self._groups, None
        if kept is None:
            return
        for optimizer, groups in zip(prepared.optimizers, kept, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        prepared.modes.load(self._modes)
        with torch.no_grad():
            for tensor, weight in zip(prepared.weights(), self._weights, strict=True):
                tensor.copy_(weight)
        self._weights = []


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
