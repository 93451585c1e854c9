"""Communicators: collectives over the tensors of one device.

Which one is taken is torch's choice for the device type: gloo on the host, `nccl` (also AMD's) or `xccl`, or what a
package has registered. Where torch has none, collectives go through the host (`Staged`).

A device communicator is expected to have ProcessGroupNCCL's methods and habits: a collective is complete on the
communicator's own stream, `Work.wait` makes the current stream wait and not the host, `abort` ends what hangs and
leaves garbage, and an error of the communicator shows in `get_error` alone.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
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

_POLL_S = 1e-3


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


class Staged(Communicator):
    """Takes device tensors through the host, over a gloo group. Nothing overlaps."""

    failure: str | None = None

    def sum(self, tensor: torch.Tensor) -> Work:
        return _StagedWork(self, tensor, tensor, lambda _, taken: Communicator.sum(self, taken))

    def copy(self, tensor: torch.Tensor, root: int) -> Work:
        return _StagedWork(self, tensor, tensor, lambda _, taken: Communicator.copy(self, taken, root))

    def exchange(self, given: torch.Tensor, counts: list[int], taken: torch.Tensor, arriving: list[int]) -> Work:
        return _StagedWork(
            self, given, taken, lambda given, taken: Communicator.exchange(self, given, counts, taken, arriving)
        )

    def collect(self, piece: torch.Tensor, whole: torch.Tensor) -> Work:
        return _StagedWork(self, piece, whole, lambda piece, whole: Communicator.collect(self, piece, whole))

    def error(self) -> str | None:
        return self.failure

    def abort(self) -> None:
        self.failure = self.failure or "aborted"

    def shutdown(self) -> None:
        """The group of the host tensors is its owner's."""


class _StagedWork:
    """A collective that begins when somebody waits for it: all members wait in the order of the launches."""

    def __init__(
        self,
        transport: Staged,
        given: torch.Tensor,
        taken: torch.Tensor,
        launch: Callable[[torch.Tensor, torch.Tensor], Any],
    ) -> None:
        self._transport, self._taken, self._launch = transport, taken, launch
        self._given_on_host = devices.to_host(given)
        self._taken_on_host = self._given_on_host if taken is given else devices.to_host(taken)
        self._copied = devices.event(transport.device)

    def wait(self) -> None:
        transport = self._transport
        devices.wait(self._copied, transport.error)
        try:
            if transport.failure is None:
                work = self._launch(self._given_on_host, self._taken_on_host)
                while not work.is_completed() and transport.failure is None:
                    time.sleep(_POLL_S)
                if transport.failure is None:
                    work.wait()
                    self._taken.copy_(self._taken_on_host, non_blocking=True)
        except RuntimeError as error:
            transport.failure = reason(error)


def exists(device: torch.device) -> bool:
    """True if torch has a communicator for this device, which is asynchronous."""
    return devices.asynchronous(device) and _maker(device) is not None


def connect(
    device: torch.device, gloo_group: Any, store: Store, rank: int, size: int, timeout_s: float
) -> Communicator:
    """Make the communicator of a device, with its connections where it can make them before the first collective.

    Args:
        device: of the tensors that will be summed.
        gloo_group: of the same ranks; used where torch has no communicator for the device.
        store: rendezvous, private to the communicator.
        rank: this process's place, 0-based.
        size: members.
        timeout_s: seconds until the attempt fails.

    Raises:
        RuntimeError: the others did not come, or the communicator refused.
    """
    if not devices.asynchronous(device):
        return Communicator(gloo_group, device)
    make = _maker(device)
    if make is None:
        warnings.warn(
            f"torch has no communicator for devices of type {device.type}: gradients go through the host, slowly",
            stacklevel=2,
        )
        return Staged(gloo_group, device)
    made = Future[Any]()

    def build() -> None:
        try:
            devices.enter(device)
            process_group = make(store, rank, size)
            if getattr(process_group, "supports_splitting", False):
                process_group.eager_connect_single_device(device)
            made.set_result(process_group)
        except Exception as error:
            made.set_exception(error)

    # NCCL waits without end for a peer that died meanwhile.
    threading.Thread(target=build, name="communicator", daemon=True).start()
    try:
        return Communicator(made.result(timeout_s), device)
    except Exception as error:
        late = f"the communicator of {device} had not all members within {timeout_s:.0f} s"
        raise RuntimeError(reason(error) if made.done() else late) from error


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
