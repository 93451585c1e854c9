"""State of objects that have a `state_dict`, without a wait for the device where the object is a GradScaler.

A scaler keeps its scale and its count of good steps on the device. Its own `state_dict` reads both, for which the host
waits until the device has done all that it was given. Here they are tensors, as the rest of the state is.
"""

from __future__ import annotations

from typing import Any

import torch

_Scaler = torch.amp.GradScaler


def read(thing: Any) -> dict[str, Any]:
    """Return its state; tensors are the live ones."""
    if not _is_plain_scaler(thing) or thing._get_scale_async() is None:
        state: dict[str, Any] = thing.state_dict()
        return state
    return {
        "scale": thing._scale,
        "growth_factor": thing.get_growth_factor(),
        "backoff_factor": thing.get_backoff_factor(),
        "growth_interval": thing.get_growth_interval(),
        "_growth_tracker": thing._growth_tracker,
    }


def write(thing: Any, state: dict[str, Any]) -> None:
    """Have it take over what `read` gave.

    Raises:
        Exception: its `load_state_dict` raised it.
    """
    if _is_plain_scaler(thing) and thing._get_scale_async() is None:  # until its first step it keeps them as numbers
        state = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    thing.load_state_dict(state)


def _is_plain_scaler(thing: Any) -> bool:
    """True for a scaler that is enabled, and whose class gives and takes its state as torch's own does."""
    if not isinstance(thing, _Scaler) or not thing.is_enabled():
        return False
    kind = type(thing)
    return (kind.state_dict, kind.load_state_dict) == (_Scaler.state_dict, _Scaler.load_state_dict)
