"""Communicators: process groups of torch that do collectives over the tensors of one device.

Fallow takes torch's choice for the device type: gloo on the host, `nccl` (also AMD's) or `xccl`, or the backend that a
package has registered. If torch has none, collectives go through the host (`Staged`).

A device communicator must behave like ProcessGroupNCCL:
- A collective completes on the communicator's own stream. `Work.wait` blocks the current stream, not the host.
- `abort` may be called from any thread and may take long. It ends pending collectives with undefined results.
- Only `get_error` shows errors of the communicator.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    ErrorType,
    ProcessGroupGloo,
    Store,
    _DistributedBackendOptions,
)

from fallow.worker.transport import device as devices
from fallow.worker.transport.gloo import COLLECTIVE_TIMEOUT, reason

_NCCL_REQUIRED = {
    # Otherwise torch's watchdog ends the process when a peer is lost. Fallow continues without the peer.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Otherwise the watchdog does not see collectives, and `get_error` does not report a lost peer.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""Variables that override the job's environment."""

_NCCL_DEFAULTS = {
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # After an error the watchdog waits four times this long for a dump, and holds the lock that the next launch needs.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # Seconds for which connecting or shutting down may hold the communicator's lock. `abort` needs that lock.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
}
"""Variables that the job may override."""

_POLL_S = 1e-3
_LOOK_S = 0.02


class Staged:
    """Communicator for device tensors that copies them through the host to a gloo group. Nothing overlaps."""

    def __init__(self, gloo_group: Any, device: torch.device) -> None:
        self.gloo_group = gloo_group
        self.device = device
        self.failure: str | None = None

    def abort(self) -> None:
        self.failure = self.failure or "aborted"

    def shutdown(self) -> None:
        """Do nothing: the owner of the gloo group shuts it down."""


Launch = Callable[..., Any]
"""Function (process group, *tensors) -> work that launches a collective. The result goes into the first tensor."""


class _StagedWork:
    """A collective that begins in `wait`. All members wait in the order of the launches."""

    def __init__(self, transport: Staged, launch: Launch, tensors: Sequence[torch.Tensor]) -> None:
        self._transport, self._launch, self._target = transport, launch, tensors[0]
        self._on_host = [devices.to_host(tensor) for tensor in tensors]
        self._copied = devices.event(transport.device)

    def wait(self) -> None:
        transport = self._transport
        devices.wait(self._copied, lambda: transport.failure)
        try:
            if transport.failure is None:
                work = self._launch(transport.gloo_group, *self._on_host)
                while not work.is_completed() and transport.failure is None:
                    time.sleep(_POLL_S)
                if transport.failure is None:
                    work.wait()
                    self._target.copy_(self._on_host[0], non_blocking=True)
        except RuntimeError as error:
            transport.failure = reason(error)


def launch(communicator: Any, collective: Launch, tensors: Sequence[torch.Tensor]) -> Any:
    """Launch a collective over tensors of the communicator's device; returns the work."""
    if isinstance(communicator, Staged):
        return _StagedWork(communicator, collective, tensors)
    return collective(communicator, *tensors)


def exists(device: torch.device) -> bool:
    """Return True if the device is asynchronous and torch has a communicator for it."""
    return devices.asynchronous(device) and _backend(device) is not None


def choice(device: torch.device) -> str:
    """Describe which communicator this device gets, and why."""
    if not devices.asynchronous(device):
        return "gloo, since the model is trained on the processor"
    if exists(device):
        name = dist.Backend.default_device_backend_map[device.type]
        return f"{name}, torch's choice for devices of type {device.type}"
    return f"gloo through the host, slowly: this torch has no communicator for devices of type {device.type}"


def failure(communicator: Any, device: torch.device) -> str | None:
    """Why collectives on a device hang or end with garbage; None: they do not. Costs no wait."""
    if isinstance(communicator, Staged):
        return communicator.failure
    error = communicator.get_error()
    return None if error == ErrorType.SUCCESS else f"the communicator of {device} failed: {error.name}"


def connect(
    device: torch.device,
    gloo_group: Any,
    store: Store,
    rank: int,
    size: int,
    timeout_s: float,
    is_dropped: Callable[[], object] = devices.never_stop,
) -> Any:
    """Make the communicator of a device. Members connect here if the communicator supports eager connection.

    Args:
        device: device of the tensors that will be summed.
        gloo_group: gloo group of the same ranks, used if torch has no communicator for the device.
        store: rendezvous, private to the communicator.
        rank: 0-based rank of this process.
        size: number of members.
        timeout_s: seconds until the attempt fails.
        is_dropped: polled; the attempt ends once it returns a true value.

    Raises:
        RuntimeError: other members did not connect, the communicator failed, or the attempt was cancelled.
    """
    if not devices.asynchronous(device):
        return gloo_group
    backend = _backend(device)
    if backend is None:
        warnings.warn(
            f"torch has no communicator for devices of type {device.type}: gradients go through the host, slowly",
            stacklevel=2,
        )
        return Staged(gloo_group, device)
    new_group, connected = Future[Any](), Future[None]()

    def build() -> None:
        try:
            devices.enter(device)
            process_group = _make(backend, store, rank, size)
            is_nccl = getattr(process_group, "supports_splitting", False)
            if is_nccl:  # begins to connect and returns, so that an abort can end it
                process_group.eager_connect_single_device(device)
            new_group.set_result(process_group)
            if is_nccl and hasattr(process_group, "_comm_ptr"):
                # All have met behind this (torch 2.13, NCCLUtils.cpp). NCCL opens most connections between them in the
                # first collective that needs them, so the first step with a communicator takes longer.
                process_group._comm_ptr()
            connected.set_result(None)
        except Exception as error:
            connected.set_exception(error)

    # On a thread: NCCL waits forever for a peer that has died.
    threading.Thread(target=build, name="communicator", daemon=True).start()
    end = time.monotonic() + timeout_s
    while not connected.done() and time.monotonic() < end and not is_dropped():
        wait([connected], _LOOK_S)
    error = connected.exception() if connected.done() else None
    if connected.done() and error is None:
        return new_group.result()
    # A process group that is still being made is abandoned once it exists.
    new_group.add_done_callback(lambda future: abandon(future.result()))
    if error:
        raise RuntimeError(reason(error)) from error
    if is_dropped():
        raise RuntimeError("the generation was cancelled")
    raise RuntimeError(f"not all members joined the communicator of {device} within {timeout_s:.0f} s")


def abandon(communicator: Any) -> threading.Thread:
    """Abort a communicator and free its memory, on a separate thread since an abort may take long."""

    def abort() -> None:
        devices.enter()
        communicator.abort()

    aborting = threading.Thread(target=abort, name="abort", daemon=True)
    aborting.start()
    return aborting


def release(communicator: Any) -> None:
    """Free a communicator's memory once nothing is pending. May take long: the other ranks have to do so, too."""
    try:
        communicator.shutdown()
    except RuntimeError:  # a peer is gone meanwhile
        communicator.abort()


def _backend(device: torch.device) -> Any:
    """Return the backend that `init_process_group` would take: a plugin or a class. None: gloo or no backend."""
    name = dist.Backend.default_device_backend_map.get(device.type, "").upper()
    native = getattr(dist, f"ProcessGroup{name}", None) if name else None
    return dist.Backend._plugins.get(name) or (None if native is ProcessGroupGloo else native)


def _make(backend: Any, store: Store, rank: int, size: int) -> Any:
    if not isinstance(backend, dist.Backend._BackendPlugin):
        for key, value in _NCCL_DEFAULTS.items():
            os.environ.setdefault(key, value)
        for key, value in _NCCL_REQUIRED.items():
            if os.environ.get(key, value) != value:
                warnings.warn(
                    f"{key}={os.environ[key]} would end members that outlive a lost one: it is {value} now",
                    stacklevel=2,
                )
            os.environ[key] = value
        options = backend.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        if hasattr(options, "config"):
            options.config.blocking = 0
        return backend(store, rank, size, options)
    if not backend.extended_api:
        return backend.creator_fn(store, rank, size, COLLECTIVE_TIMEOUT)
    extended = _DistributedBackendOptions()
    extended.store, extended.group_rank, extended.group_size = store, rank, size
    extended.timeout, extended.group_id = COLLECTIVE_TIMEOUT, ""
    extended.global_ranks_in_group = list(range(size))
    return backend.creator_fn(extended, None)
