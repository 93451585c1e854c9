"""What the script has switched on prepared modules: frozen parameters (`requires_grad`) and resting modules (`eval()`).

It belongs to the state that a newcomer needs, since its script has not come by the lines that switched it. Members need
not agree on it between two updates: one of them may evaluate and leave the model in `eval()`. So newcomers get what is
frozen, and what rests, each only where all who have the state agree on it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from fallow.worker.prepared.checksum import checksum
from fallow.worker.prepared.state import named_parameters, plain_name

KINDS = ("frozen", "resting")

_UNLIKE = "unlike"
"""In front of a kind in which members differ: it stays as each script has made it."""


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

    def export(self, kinds: Collection[str] = KINDS) -> list[str]:
        """Lines that name what is frozen and what rests; a kind that is not among `kinds` is left out."""
        self.look()
        switched = zip(KINDS, self._switched(), strict=True)
        return [line for kind, lines in switched for line in (lines if kind in kinds else [f"{_UNLIKE} {kind}"])]

    def load(self, exported: Sequence[str]) -> None:
        """Switch everything as it was where these lines were exported."""
        self.look()
        known = set(exported)
        for name, parameter in self._parameters if f"{_UNLIKE} frozen" not in known else ():
            parameter.requires_grad_(f"frozen {name}" not in known)
        for name, part in self._parts if f"{_UNLIKE} resting" not in known else ():
            part.training = f"resting {name}" not in known  # not `train()`, which goes on to all modules inside

    def fingerprints(self) -> tuple[int, int]:
        """62 bits of what is frozen, and of what rests. Cheap: each step asks, and walking over modules takes 1 ms."""
        if not self._parts:
            self.look()
        frozen, resting = self._switched()
        return checksum("\n".join(frozen).encode()), checksum("\n".join(resting).encode())

    def _switched(self) -> tuple[list[str], list[str]]:
        """The lines of both kinds."""
        frozen = [f"frozen {name}" for name, parameter in self._parameters if not parameter.requires_grad]
        return frozen, [f"resting {name}" for name, part in self._parts if not part.training]


def common(exports: Sequence[Sequence[str]]) -> list[str]:
    """What several members have exported, without a kind in which they differ."""
    switched: list[str] = []
    for kind in KINDS:
        first, *others = ([line for line in lines if line.startswith(f"{kind} ")] for lines in exports)
        switched += first if all(other == first for other in others) else [f"{_UNLIKE} {kind}"]
    return switched
