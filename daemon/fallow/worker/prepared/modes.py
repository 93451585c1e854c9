"""What the script has switched on prepared modules: frozen parameters (`requires_grad`) and resting modules (`eval()`).

It belongs to the state that a newcomer needs, since its script has not come by the lines that switched it. Members need
not agree on it between two bodies: one of them may evaluate and leave the model in `eval()`, which the next body ends.
So it is told to newcomers only where all who have the state agree; in the final body's backward all must.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from operator import attrgetter

from torch import nn

from fallow.worker.handover.state import plain_name

_FROZEN, _RESTING = "frozen ", "resting "
_learns, _works = attrgetter("requires_grad"), attrgetter("training")

Flags = tuple[tuple[bool, ...], tuple[bool, ...]]
"""Which parameters learn, and which modules do not rest."""


class Modes:
    """Of all prepared modules.

    Args:
        modules: gives them.
    """

    def __init__(self, modules: Callable[[], Sequence[nn.Module]]) -> None:
        self._modules = modules
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._parts: list[tuple[str, nn.Module]] = []
        self._weights: list[nn.Parameter] = []
        self._submodules: list[nn.Module] = []
        "the same without names"
        self._before: Flags = (), ()
        "when the body at work began"
        self._seen: Flags | None = None
        "in its last backward; None: there was none"

    def look(self) -> None:
        """Find all parameters and modules again: a script may have exchanged some."""
        self._parameters, self._parts = [], []
        for number, module in enumerate(self._modules()):
            for name, parameter in module.named_parameters():
                self._parameters.append((plain_name(f"model.{number}.{name}"), parameter))
            for name, part in module.named_modules():
                self._parts.append((plain_name(f"model.{number}.{name}"), part))
        self._weights = [parameter for _, parameter in self._parameters]
        self._submodules = [part for _, part in self._parts]

    # ----------------------------------------------------------------------------------------------- in a body

    def begin_body(self) -> None:
        """A body begins."""
        self._before, self._seen = self._flags(), None

    def see(self) -> None:
        """A backward of the body begins."""
        self._seen = self._flags()

    def undo(self) -> None:
        """Of a void body: what it has switched behind its backwards would count for the step's next shard already.

        What it switched before stays, for scripts do some things once and for all.
        """
        if self._seen is None:
            return
        for parameter, before, seen in zip(self._weights, self._before[0], self._seen[0], strict=True):
            if before == seen:
                _set_frozen(parameter, not before)
        for part, before, seen in zip(self._submodules, self._before[1], self._seen[1], strict=True):
            if before == seen:
                _set_resting(part, not before)

    def frozen(self) -> int:
        """32 bits that are the same where the same parameters were frozen in the last backward."""
        assert self._seen is not None
        return hash(self._seen[0]) & 0xFFFFFFFF

    def resting(self) -> int:
        """Likewise, 32 bits of which modules rested."""
        assert self._seen is not None
        return hash(self._seen[1]) & 0xFFFFFFFF

    def _flags(self) -> Flags:
        return tuple(map(_learns, self._weights)), tuple(map(_works, self._submodules))

    # --------------------------------------------------------------------------------------------- to and from others

    def export(self) -> list[str]:
        """Names of what is frozen and of what rests."""
        if not self._parts:
            self.look()
        frozen = [_FROZEN + name for name, parameter in self._parameters if not parameter.requires_grad]
        return [*frozen, *[_RESTING + name for name, part in self._parts if not part.training]]

    def load(self, names: Sequence[str]) -> None:
        """Switch everything as it was where `names` were exported."""
        if not self._parts:
            self.look()
        known = set(names)
        for name, parameter in self._parameters:
            _set_frozen(parameter, _FROZEN + name in known)
        for name, part in self._parts:
            _set_resting(part, _RESTING + name in known)


def fingerprint(names: Sequence[str]) -> int:
    """62 bits of an exported list."""
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _set_frozen(parameter: nn.Parameter, frozen: bool) -> None:
    if parameter.requires_grad == frozen:
        parameter.requires_grad_(not frozen)


def _set_resting(part: nn.Module, resting: bool) -> None:
    # Not `train()`, which goes on to all modules inside.
    if part.training == resting:
        part.training = not resting
