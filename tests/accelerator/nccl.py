"""The communicator of device `fake` under the name and with the interface of ProcessGroupNCCL.

Builds of torch for NVIDIA and AMD have the class `torch.distributed.ProcessGroupNCCL` and choose it for their devices.
With `present` torch looks like such a build, so that the code runs here which runs on a GPU. What NCCL does
otherwise than a registered backend (torch 2.13, `ProcessGroupNCCL.cpp`):

- It is made without a connection. `eager_connect_single_device` connects: rank 0 gives the store a unique id, and the
  others wait for that. With `config.blocking == 0` the rest goes on in the background, and an `abort` ends it.
- `_comm_ptr` waits until it is connected, for as long as TORCH_NCCL_NONBLOCKING_TIMEOUT says at most. It holds the
  communicator's lock meanwhile, so that `abort` waits, too.
- `_is_initialized` is false before that, connected or not.
- What is launched before it is connected waits in the host, which a step must not. Here it is refused.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from accelerator.collectives import BACKEND, Communicator

_ID = "unique id"


class Options:
    """As `ProcessGroupNCCL.Options`."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.config = SimpleNamespace(blocking=None)
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


class ProcessGroupNCCL(Communicator):
    """See the module.

    Args:
        store: where the ranks find each other.
        rank: of this process.
        size: number of ranks.
        options: as NCCL's.
    """

    Options = Options
    supports_splitting = True

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, options._timeout, connects=False)
        self._options = options
        self._failure: Exception | None = None
        self._connected = threading.Event()
        self._initialized = False
        self._lock = threading.Lock()

    @property
    def options(self) -> Any:
        return self._options

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect, or begin to."""
        if device.index is None:
            raise ValueError("a communicator is bound to one device: name its number")
        if self.rank() == 0:
            self._store.set(_ID, "x" * 128)
        else:
            self._store.get(_ID)
        connecting = threading.Thread(target=self._connect, daemon=True)
        connecting.start()
        if self._options.config.blocking != 0:
            connecting.join()
            self._comm_ptr()

    def _connect(self) -> None:
        try:
            if not self._ended():
                self._connect_gloo()
        except RuntimeError as error:
            self._failure = dist.DistBackendError(str(error))
        self._connected.set()

    def _comm_ptr(self) -> int:
        with self._lock:
            if not self._connected.wait(float(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"])):
                raise dist.DistBackendError("NCCL timeout in communicator initialization")
            if self._failure is not None or self._ended():
                raise self._failure or dist.DistBackendError("NCCL communicator was aborted")
            self._initialized = True
            return id(self)

    def _is_initialized(self) -> bool:
        return self._initialized

    def abort(self) -> None:
        with self._lock:
            super().abort()

    def _check_launch(self) -> None:
        if not self._initialized:
            raise AssertionError("launched before the communicator was connected: the host would wait")
        super()._check_launch()


def present() -> None:
    """From now on torch has this class, and chooses it for device `fake`."""
    known: Any = dist
    known.ProcessGroupNCCL = ProcessGroupNCCL
    dist.Backend.default_device_backend_map["fake"] = "nccl"


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Inside, torch chooses the backend that is registered for device `fake`."""
    dist.Backend.default_device_backend_map["fake"] = BACKEND
    try:
        yield
    finally:
        dist.Backend.default_device_backend_map["fake"] = "nccl"
