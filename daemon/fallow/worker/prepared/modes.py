"""What the script has switched on prepared modules: frozen parameters (`requires_grad`) and resting modules (`eval()`).

It belongs to the state that a newcomer needs, since its script has not come by the lines that switched it. Members need
not agree on it between two updates: one of them may evaluate and leave the model in `eval()`. So newcomers get it only
where all who have the state agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from fallow.worker.prepared.checksum import checksum
from fallow.worker.prepared.state import named_parameters, plain_name


@dataclass(frozen=True, slots=True)
class Modes:
    """Of all prepared modules."""

    modules: Sequence[nn.Module]

    def export(self) -> list[str]:
        """Names of what is frozen and of what rests."""
        frozen = [f"frozen {name}" for name, p in named_parameters(self.modules) if not p.requires_grad]
        return [*frozen, *[f"resting {name}" for name, part in self._parts() if not part.training]]

    def load(self, names: Sequence[str]) -> None:
        """Switch everything as it was where `names` were exported."""
        known = set(names)
        for name, parameter in named_parameters(self.modules):
            parameter.requires_grad_(f"frozen {name}" not in known)
        for name, part in self._parts():
            part.training = f"resting {name}" not in known  # not `train()`, which goes on to all modules inside

    def fingerprint(self) -> int:
        """62 bits of what `export` gives."""
        return checksum("\n".join(self.export()).encode())

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        for number, module in enumerate(self.modules):
            for name, part in module.named_modules():
                yield plain_name(f"model.{number}.{name}"), part
