"""What a script sets in prepared objects on its way to the place where the members are.

A newcomer that has just received the state, and members that went back to a checkpoint, run lines of the script that
others have run before: those between two calls of `run.steps`. Prepared objects do nothing there (see `Gate`), but a
line may set a learning rate, freeze a layer or put a module to rest. The state that was received has all that already,
so it is put back as it came.
"""

from __future__ import annotations

from typing import Any

import torch

from fallow.worker.prepared import Prepared


class CatchUp:
    """Settings of prepared objects, as received."""

    def __init__(self) -> None:
        self._groups: list[list[dict[str, Any]]] | None = None
        "of each optimizer; None: nothing is kept"
        self._modes: list[str] = []

    def forget(self) -> None:
        """Another state comes."""
        self._groups = None

    def keep(self, prepared: Prepared) -> None:
        """The state is here, and the script is elsewhere. What is kept already stays: the script has gone on since."""
        if self._groups is None:
            self._groups = [[_settings(group) for group in o.param_groups] for o in prepared.optimizers]
            self._modes = prepared.modes.export()

    def put_back(self, prepared: Prepared) -> None:
        """The script is where the members are."""
        kept, self._groups = self._groups, None
        if kept is None:
            return
        for optimizer, groups in zip(prepared.optimizers, kept, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        prepared.modes.load(self._modes)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
