"""Communicators: collectives over the tensors of one device.

Which one is taken is torch's choice for the device type: gloo on the host, `nccl` (also AMD's) or `xccl`, or what a
package has registered. A device communicator is expected to have ProcessGroupNCCL's methods and habits: a collective is
complete on the communicator's own stream, `Work.wait` makes the current stream wait and not the host, `abort` ends what
hangs and leaves garbage, and an error of the communicator shows in `get_error` alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    BroadcastOptions,
    ErrorType,
    ProcessGroupGloo,
    Store,
    _DistributedBackendOptions,
)

from fallow.worker.transport import device as devices
from fallow.worker.transport.gloo import COLLECTIVE_TIMEOUT, reason

_WATCHDOG_OFF = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"Else torch ends the process when a peer is lost, which is not the end of it here."


class Work(Protocol):
    """A collective that was launched."""

    def wait(self) -> Any: ...


class Communicator:
    """Launches collectives of a gloo group or a device communicator. RuntimeError at a launch is a mistake or `error`.

    Args:
        process_group: has the methods of `torch.distributed.Backend`.
        device: of the tensors.
    """

    def __init__(self, process_group: Any, device: torch.device) -> None:
        self._process_group = process_group
        self.device = device

    def sum(self, tensor: torch.Tensor) -> Work:
        """Sum over the ranks, in place."""
        return self._process_group.allreduce([tensor])  # type: ignore[no-any-return]

    def copy(self, tensor: torch.Tensor, root: int) -> Work:
        """`root`'s values to all, in place."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._process_group.broadcast([tensor], options)  # type: ignore[no-any-return]

    def exchange(self, given: torch.Tensor, counts: list[int], taken: torch.Tensor, arriving: list[int]) -> Work:
        """Unlike parts between all, by rank."""
        return self._process_group.alltoall_base(taken, given, arriving, counts)  # type: ignore[no-any-return]

    def collect(self, piece: torch.Tensor, whole: torch.Tensor) -> Work:
        """Pieces of one length into one tensor, by rank."""
        return self._process_group._allgather_base(whole, piece)  # type: ignore[no-any-return]

    def error(self) -> str | None:
        """Why collectives hang or end with garbage; None: they do not. Costs no wait."""
        if not devices.asynchronous(self.device):
            return None
        error = self._process_group.get_error()
        return None if error == ErrorType.SUCCESS else f"the communicator of {self.device} failed: {error.name}"

    def abort(self) -> None:
        """End what is pending, with garbage, from any thread. May take long."""
        self._process_group.abort()

    def shutdown(self) -> None:
        """Release it, once nothing is pending."""
        self._process_group.shutdown()


def exists(device: torch.device) -> bool:
    """True if torch has a communicator for this device, which is asynchronous."""
    return devices.asynchronous(device) and _maker(device) is not None


def choice(device: torch.device) -> str:
    """Which communicator tensors of this device get, and why, in words."""
    if not devices.asynchronous(device):
        return "gloo, since the model is trained on the processor"
    name = dist.Backend.default_device_backend_map.get(device.type, "")
    if exists(device):
        return f"{name}, torch's choice for devices of type {device.type}"
    return f"gloo through the host, slowly: this torch has no communicator for devices of type {device.type}"


def connect(device: torch.device, store: Store, rank: int, size: int, timeout_s: float) -> Communicator:
    """Make the communicator of a device, with its connections where it can make them before the first collective.

    Args:
        device: has a communicator.
        store: rendezvous, private to the communicator.
        rank: this process's place, 0-based.
        size: members.
        timeout_s: seconds until the attempt fails.

    Raises:
        RuntimeError: the others did not come, or the communicator refused.
    """
    make = _maker(device)
    assert make is not None
    made: list[Any] = []
    errors: list[Exception] = []

    def build() -> None:
        try:
            devices.enter(device)
            process_group = make(store, rank, size)
            if getattr(process_group, "supports_splitting", False):
                process_group.eager_connect_single_device(device)
            made.append(process_group)
        except Exception as error:
            errors.append(error)

    # NCCL waits without end for a peer that died meanwhile.
    building = threading.Thread(target=build, name="communicator", daemon=True)
    building.start()
    building.join(timeout_s)
    if errors:
        raise RuntimeError(reason(errors[0])) from errors[0]
    if not made:
        raise RuntimeError(f"the communicator of {device} had not all members within {timeout_s:.0f} s")
    return Communicator(made[0], device)


def _maker(device: torch.device) -> Callable[[Store, int, int], Any] | None:
    """What makes a communicator, as torch's `init_process_group` would make it for the device type."""
    name = dist.Backend.default_device_backend_map.get(device.type, "").upper()
    plugin = dist.Backend._plugins.get(name)
    native: Any = getattr(dist, f"ProcessGroup{name}", None) if name else None
    if plugin is None and (native is None or native is ProcessGroupGloo):
        return None

    def make(store: Store, rank: int, size: int) -> Any:
        if plugin is None:
            for key, value in _WATCHDOG_OFF.items():
                os.environ.setdefault(key, value)
            options = native.Options()
            options._timeout = COLLECTIVE_TIMEOUT
            return native(store, rank, size, options)
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, COLLECTIVE_TIMEOUT)
        extended = _DistributedBackendOptions()
        extended.store, extended.group_rank, extended.group_size = store, rank, size
        extended.timeout, extended.group_id = COLLECTIVE_TIMEOUT, ""
        extended.global_ranks_in_group = list(range(size))
        return plugin.creator_fn(extended, None)

    return make
