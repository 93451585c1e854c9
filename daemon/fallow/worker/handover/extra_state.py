"""Extra state of modules: what `get_extra_state` gives, for example the scales of FP8 layers.

A forward may change extra state, and then the members' extra states differ. So one member's counts as a whole: it is
broadcast to newcomers, and rank 0 writes it into checkpoints. It travels as other state does (`state.encode`), without
pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from fallow.model import Exit, FallowError
from fallow.worker.handover import state
from fallow.worker.transport.group import Group

_KEY = "_extra_state"
"""As in torch's `state_dict`."""


def holders(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Modules that have extra state, by name: `model.NUMBER.` and the key that `state_dict` has for it."""
    return {
        state.plain_name(".".join(filter(None, ("model", str(number), name, _KEY)))): part
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


def pack(values: Mapping[str, Any], where: str = "run") -> torch.Tensor:
    """Extra state as bytes of its own.

    Raises:
        FallowError: a value cannot be handed to another member; the text names the module.
    """
    encoded, tensors = state.encode(dict(values), where)
    head = msgspec.msgpack.encode(encoded)
    flat = bytearray(len(head).to_bytes(8, "little") + head)
    for tensor in tensors:
        flat += bytes(state.padded(len(flat)) - len(flat))
        flat += state.as_bytes(tensor).numpy().tobytes()
    return torch.frombuffer(flat, dtype=torch.uint8)


def unpack(flat: torch.Tensor) -> dict[str, Any]:
    """The inverse of `pack`. Raises FallowError for bytes that `pack` did not make."""
    data = bytearray(flat.numpy().tobytes())
    at = 8 + int.from_bytes(data[:8], "little")
    try:
        encoded = msgspec.msgpack.decode(data[8:at], type=state.Encoded)
        tensors = []
        for spec in encoded.tensors:
            at = state.padded(at)
            piece = torch.frombuffer(data[at : at + spec.nbytes], dtype=torch.uint8) if spec.nbytes else _NOTHING
            tensors.append(piece.view(state.dtype_named(spec.dtype)).reshape(spec.shape))
            at += spec.nbytes
    except (msgspec.DecodeError, RuntimeError, ValueError) as error:
        raise FallowError(f"received or stored extra state cannot be read: {error}", Exit.DATA) from None
    values: dict[str, Any] = state.decode(encoded, tensors)
    return values


_NOTHING = torch.empty(0, dtype=torch.uint8)


def share(group: Group, modules: Sequence[nn.Module], root: int) -> dict[str, Any]:
    """Rank `root`'s extra state, on every rank. All ranks must call it.

    Raises:
        Interrupted: the group broke.
    """
    flat = pack(read(modules)) if group.rank == root else _NOTHING
    length = torch.tensor([flat.numel()])
    group.broadcast(length, root)
    group.wait()
    if group.rank != root:
        flat = torch.empty(int(length), dtype=torch.uint8)
    group.broadcast(flat, root)
    group.wait()
    return unpack(flat)
