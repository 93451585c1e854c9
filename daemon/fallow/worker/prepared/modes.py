"""What prepared modules hold besides tensors: extra state, and modes.

*Extra state* is the result of `get_extra_state`, for example the scales of FP8 layers. A forward may change it, so the
members' extra states may differ. Each newcomer takes over all of its first donor's extra state. Checkpoints hold rank
0's extra state.

*Modes* are frozen parameters (`requires_grad`) and resting modules (`eval()`). A newcomer's script has not run the
lines that switched them. Members may differ in their modes between two updates: one member may evaluate, and leave the
model in `eval()`. So a newcomer takes over each kind of mode only if all donors agree on it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from fallow.model import Exit, FallowError
from fallow.worker.prepared.checksum import checksum
from fallow.worker.prepared.state import named_parameters, plain_name

KINDS = ("frozen", "resting")

_UNLIKE = "unlike"
"""Prefix of a kind of mode in which the donors differ. Each script keeps its own modes of this kind."""


class Modes:
    """Frozen parameters and resting modules among all prepared modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._parts: list[tuple[str, nn.Module]] = []

    def list_parts(self) -> None:
        """List the modules' parameters and parts. Call again when the script may have changed them."""
        self._parameters = list(named_parameters(self._modules))
        self._parts = [
            (plain_name(f"model.{number}.{name}"), part)
            for number, module in enumerate(self._modules)
            for name, part in module.named_modules()
        ]

    def export(self, kinds: Collection[str] = KINDS) -> list[str]:
        """Return lines that name what is frozen and what rests. A kind outside of `kinds` is marked by `_UNLIKE`."""
        self.list_parts()
        switched = zip(KINDS, self._switched(), strict=True)
        return [line for kind, lines in switched for line in (lines if kind in kinds else [f"{_UNLIKE} {kind}"])]

    def load(self, exported: Sequence[str]) -> None:
        """Apply exported modes."""
        self.list_parts()
        lines = set(exported)
        for name, parameter in self._parameters if f"{_UNLIKE} frozen" not in lines else ():
            parameter.requires_grad_(f"frozen {name}" not in lines)
        for name, part in self._parts if f"{_UNLIKE} resting" not in lines else ():
            part.training = f"resting {name}" not in lines  # not `train()`, which goes on to all modules inside

    def fingerprints(self) -> tuple[int, int]:
        """Return checksums of the frozen parameters' and of the resting modules' names.

        Called several times a step: it walks over lists, because a walk over the modules takes 1 ms.
        """
        if not self._parts:
            self.list_parts()
        frozen, resting = self._switched()
        return checksum("\n".join(frozen).encode()), checksum("\n".join(resting).encode())

    def _switched(self) -> tuple[list[str], list[str]]:
        """Return the lines of both kinds."""
        frozen = [f"frozen {name}" for name, parameter in self._parameters if not parameter.requires_grad]
        return frozen, [f"resting {name}" for name, part in self._parts if not part.training]


def common_modes(exports: Sequence[Sequence[str]]) -> list[str]:
    """Return what all these members have exported. A kind in which they differ becomes a line with `_UNLIKE`."""
    switched: list[str] = []
    for kind in KINDS:
        first, *further = ([line for line in lines if line.startswith(f"{kind} ")] for lines in exports)
        switched += first if all(other == first for other in further) else [f"{_UNLIKE} {kind}"]
    return switched


def extra_holders(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that have extra state, by name: `model.NUMBER.` and the state's key in `state_dict`."""
    return {
        plain_name(".".join(filter(None, ("model", str(number), name, "_extra_state")))): part
        for number, module in enumerate(modules)
        for name, part in module.named_modules(remove_duplicate=False)
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def read_extra(modules: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the extra state by name, with the live tensors."""
    return {name: part.get_extra_state() for name, part in extra_holders(modules).items()}


def write_extra(modules: Sequence[nn.Module], values: Mapping[str, Any]) -> None:
    """Put extra state into live modules.

    Raises:
        FallowError: it belongs to other modules.
        Exception: `set_extra_state` raised it.
    """
    parts = extra_holders(modules)
    unlike = sorted(parts.keys() ^ values.keys())
    if unlike:
        raise FallowError(
            f"the run's extra state does not fit the prepared modules: {', '.join(unlike)}; "
            "use the same script, arguments and library versions in every allocation",
            Exit.DATA,
        )
    for name, part in parts.items():
        try:
            part.set_extra_state(values[name])
        except Exception as error:
            error.add_note(f"while {name} ({type(part).__name__}) took over the run's extra state")
            raise
