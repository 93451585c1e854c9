"""Communicators: process groups of torch that do collectives over the tensors of one device.

Which one is taken is torch's choice for the device type: gloo on the host, `nccl` (also AMD's) or `xccl`, or what a
package has registered. Where torch has none, collectives go through the host (`Staged`).

A device communicator is expected to have ProcessGroupNCCL's methods and habits: a collective is complete on the
communicator's own stream, `Work.wait` makes the current stream wait and not the host, `abort` ends what hangs and
leaves garbage, from any thread, and may take long. An error of the communicator shows in `get_error` alone.
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

_NCCL_NEEDS = {
    # Else torch's watchdog ends the process when a peer is lost, which is not the end of it here.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Else the watchdog does not see collectives, and `get_error` nothing of a lost peer.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""Whatever the job has set."""

_NCCL_SETTINGS = {
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Behind an error the watchdog waits four times as long for a dump, and holds the lock that the next launch needs.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # Seconds for which connecting, or taking down, may hold the communicator's lock, which `abort` takes as well.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
}
"""Unless the job has set them."""

_POLL_S = 1e-3
_LOOK_S = 0.02


class Staged:
    """Takes device tensors through the host, over a gloo group. Nothing overlaps."""

    def __init__(self, gloo_group: Any, device: torch.device) -> None:
        self.gloo_group = gloo_group
        self.device = device
        self.failure: str | None = None

    def abort(self) -> None:
        self.failure = self.failure or "aborted"

    def shutdown(self) -> None:
        """The gloo group is its owner's."""


Launch = Callable[..., Any]
"""Launches a collective of a process group, its first argument, over the tensors that follow: the first is filled."""


class _StagedWork:
    """A collective that begins when somebody waits for it: all members wait in the order of the launches."""

    def __init__(self, transport: Staged, launch: Launch, tensors: Sequence[torch.Tensor]) -> None:
        self._transport, self._launch, self._taken = transport, launch, tensors[0]
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
                    self._taken.copy_(self._on_host[0], non_blocking=True)
        except RuntimeError as error:
            transport.failure = reason(error)


def launch(communicator: Any, collective: Launch, tensors: Sequence[torch.Tensor]) -> Any:
    """Launch a collective over tensors of the communicator's device; returns the work."""
    if isinstance(communicator, Staged):
        return _StagedWork(communicator, collective, tensors)
    return collective(communicator, *tensors)


def exists(device: torch.device) -> bool:
    """True if torch has a communicator for this device, which is asynchronous."""
    return devices.asynchronous(device) and _backend(device) is not None


def choice(device: torch.device) -> str:
    """Which communicator tensors of this device get, and why, in words."""
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
    dropped: Callable[[], object] = devices.never,
) -> Any:
    """Make the communicator of a device. If it can, its members meet here and not in the first collective.

    Args:
        device: of the tensors that will be summed.
        gloo_group: of the same ranks; used where torch has no communicator for the device.
        store: rendezvous, private to the communicator.
        rank: this process's place, 0-based.
        size: members.
        timeout_s: seconds until the attempt fails.
        dropped: asked again and again; the attempt is given up when it returns something true.

    Raises:
        RuntimeError: the others did not come, the communicator refused, or the attempt was given up.
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
    process_group_made, connected = Future[Any](), Future[None]()

    def build() -> None:
        try:
            devices.enter(device)
            process_group = _make(backend, store, rank, size)
            is_nccl = getattr(process_group, "supports_splitting", False)
            if is_nccl:  # only begins here, so that an abort ends it
                process_group.eager_connect_single_device(device)
            process_group_made.set_result(process_group)
            if is_nccl and hasattr(process_group, "_comm_ptr"):
                # All have met behind this (torch 2.13, NCCLUtils.cpp). NCCL opens most connections between them in the
                # first collective that needs them, so the first step with a communicator takes longer.
                process_group._comm_ptr()
            connected.set_result(None)
        except Exception as error:
            connected.set_exception(error)

    # NCCL waits without end for a peer that died meanwhile.
    threading.Thread(target=build, name="communicator", daemon=True).start()
    end = time.monotonic() + timeout_s
    while not connected.done() and time.monotonic() < end and not dropped():
        wait([connected], _LOOK_S)
    error = connected.exception() if connected.done() else None
    if connected.done() and error is None:
        return process_group_made.result()
    # Also one that is still being made.
    process_group_made.add_done_callback(lambda made: abandon(made.result()))
    late = f"the communicator of {device} had not all members within {timeout_s:.0f} s"
    raise RuntimeError(reason(error) if error else "the generation was given up" if dropped() else late) from error


def abandon(communicator: Any) -> threading.Thread:
    """End what is pending, with garbage, and give its memory back. On a thread of its own: it may take long."""

    def abort() -> None:
        devices.enter()
        communicator.abort()

    aborting = threading.Thread(target=abort, name="abort", daemon=True)
    aborting.start()
    return aborting


def release(communicator: Any) -> None:
    """Give a communicator's memory back, once nothing is pending. May take long: the other ranks have to come."""
    try:
        communicator.shutdown()
    except RuntimeError:  # a peer is gone meanwhile
        communicator.abort()


def _backend(device: torch.device) -> Any:
    """What torch's `init_process_group` would take for the device: a plugin or a class of torch; None: gloo or none."""
    name = dist.Backend.default_device_backend_map.get(device.type, "").upper()
    native = getattr(dist, f"ProcessGroup{name}", None) if name else None
    return dist.Backend._plugins.get(name) or (None if native is ProcessGroupGloo else native)


def _make(backend: Any, store: Store, rank: int, size: int) -> Any:
    if not isinstance(backend, dist.Backend._BackendPlugin):
        for key, value in _NCCL_SETTINGS.items():
            os.environ.setdefault(key, value)
        for key, value in _NCCL_NEEDS.items():
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
