"""What the script has switched on prepared modules: frozen parameters (`requires_grad`) and resting modules (`eval()`).

It belongs to the state that a newcomer needs, since its script has not come by the lines that switched it. Members need
not agree on it between two updates: one of them may evaluate and leave the model in `eval()`. So newcomers get it only
where all who have the state agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from fallow.worker.prepared.checksum import checksum
from fallow.worker.prepared.state import plain_name

_FROZEN, _RESTING = "frozen ", "resting "


class Modes:
    """Of all prepared modules.

    Args:
        modules: gives them.
    """

    def __init__(self, modules: Callable[[], Sequence[nn.Module]]) -> None:
        self._modules = modules

    def export(self) -> list[str]:
        """Names of what is frozen and of what rests."""
        frozen = [_FROZEN + name for name, parameter in self._parameters() if not parameter.requires_grad]
        return [*frozen, *[_RESTING + name for name, part in self._parts() if not part.training]]

    def load(self, names: Sequence[str]) -> None:
        """Switch everything as it was where `names` were exported."""
        known = set(names)
        for name, parameter in self._parameters():
            if parameter.requires_grad == (_FROZEN + name in known):
                parameter.requires_grad_(not parameter.requires_grad)
        for name, part in self._parts():
            part.training = _RESTING + name not in known  # not `train()`, which goes on to all modules inside

    def fingerprint(self) -> int:
        """62 bits of what `export` gives."""
        return checksum("\n".join(self.export()).encode())

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, module in enumerate(self._modules()):
            for name, parameter in module.named_parameters():
                yield plain_name(f"model.{number}.{name}"), parameter

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        for number, module in enumerate(self._modules()):
            for name, part in module.named_modules():
                yield plain_name(f"model.{number}.{name}"), part
