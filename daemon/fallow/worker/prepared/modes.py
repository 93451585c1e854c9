"""What the script has switched on prepared modules: frozen parameters (`requires_grad`) and resting modules (`eval()`).

It belongs to the state that a newcomer needs, since its script has not come by the lines that switched it. Members need
not agree on it between two updates: one of them may evaluate and leave the model in `eval()`. So newcomers get it only
where all who have the state agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fallow.worker.prepared.checksum import checksum
from fallow.worker.prepared.state import named_parameters, plain_name


class Modes:
    """Of all prepared modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._parts: list[tuple[str, nn.Module]] = []

    def look(self) -> None:
        """Learn which parameters and modules there are. Between two calls of this there are no others."""
        self._parameters = list(named_parameters(self._modules))
        self._parts = [
            (plain_name(f"model.{number}.{name}"), part)
            for number, module in enumerate(self._modules)
            for name, part in module.named_modules()
        ]

    def export(self) -> list[str]:
        """Names of what is frozen and of what rests."""
        self.look()
        return self._switched()

    def load(self, names: Sequence[str]) -> None:
        """Switch everything as it was where `names` were exported."""
        self.look()
        known = set(names)
        for name, parameter in self._parameters:
            parameter.requires_grad_(f"frozen {name}" not in known)
        for name, part in self._parts:
            part.training = f"resting {name}" not in known  # not `train()`, which goes on to all modules inside

    def fingerprint(self) -> int:
        """62 bits of what `export` gives. Cheap: each step asks for it, and walking over the modules takes 1 ms."""
        if not self._parts:
            self.look()
        return checksum("\n".join(self._switched()).encode())

    def _switched(self) -> list[str]:
        frozen = [f"frozen {name}" for name, parameter in self._parameters if not parameter.requires_grad]
        return [*frozen, *[f"resting {name}" for name, part in self._parts if not part.training]]
