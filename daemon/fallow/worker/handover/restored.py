"""A state that was read into plain memory goes into the live objects, without a copy for which the host waits.

A copy from plain memory to a device makes the host wait for all that the device has to do, and pinned memory for a
whole state would stay with the process. So tensors of a device pass a ring, as in a hand-over, before the objects take
them.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace

from fallow.worker.handover.pieces import copy_to_device
from fallow.worker.handover.transfer import load_state
from fallow.worker.prepared import state
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport import device as devices


def load_restored(prepared: Prepared, tree: dict[str, Any]) -> dict[str, Any]:
    """Do as `load_state`, with tensors that are all on the host.

    Raises:
        FallowError: it does not fit.
    """
    if not devices.asynchronous(prepared.device):
        return load_state(prepared, tree)
    saved, live = state.encode(tree["objects"], "checkpoint"), state.encode(prepared.export(), "run")
    here = {str(path): tensor for path, tensor in zip(live.paths, live.tensors, strict=True)}
    placed, received = dict[int, torch.Tensor](), set[int]()
    for n, (path, tensor) in enumerate(zip(saved.paths, saved.tensors, strict=True)):
        own = here.get(str(path))
        if path[0] == "models" and own is not None and _takes_bytes_of(own, tensor):
            placed[n] = own
            received.add(id(own))
        elif _is_on_device(prepared, path, tensor) if own is None else devices.asynchronous(own.device):
            placed[n] = state.room([replace(state.spec_of(tensor), on_device=True)], prepared.device)[0]
    copy_to_device([state.as_bytes(saved.tensors[n]) for n in placed], [*map(state.as_bytes, placed.values())])
    tensors = [placed.get(n, tensor) for n, tensor in enumerate(saved.tensors)]
    return load_state(prepared, {**tree, "objects": state.decode(saved.tree, tensors)}, received)


def _takes_bytes_of(own: torch.Tensor, saved: torch.Tensor) -> bool:
    is_alike = (own.shape, own.dtype) == (saved.shape, saved.dtype)
    return devices.asynchronous(own.device) and is_alike and own.is_contiguous() and saved.is_contiguous()


def _is_on_device(prepared: Prepared, path: state.Path, tensor: torch.Tensor) -> bool:
    """Of what has no counterpart here yet: the state of an optimizer that has made no step."""
    if path[0] != "optimizers":
        return False
    group = prepared.optimizers[int(path[1])].param_groups[0]
    return tensor.dim() > 0 or bool(group.get("fused") or group.get("capturable"))
