"""Extra state of modules: what `get_extra_state` gives, for example the scales of FP8 layers.

A forward may change extra state, and then the members' extra states differ. So one member's counts as a whole: each
newcomer has its first donor's, and rank 0 writes its own into checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fallow.model import Exit, FallowError
from fallow.worker.prepared.state import plain_name


def holders(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Modules that have extra state, by name: `model.NUMBER.` and the key that `state_dict` has for it."""
    return {
        plain_name(".".join(filter(None, ("model", str(number), name, "_extra_state")))): part
        for number, module in enumerate(modules)
        for name, part in module.named_modules(remove_duplicate=False)
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def read(modules: Sequence[nn.Module]) -> dict[str, Any]:
    """Extra state by name; tensors are the live ones."""
    return {name: part.get_extra_state() for name, part in holders(modules).items()}


def write(modules: Sequence[nn.Module], values: Mapping[str, Any]) -> None:
    """Put extra state into live modules.

    Raises:
        FallowError: it belongs to other modules.
        Exception: `set_extra_state` raised it.
    """
    parts = holders(modules)
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
