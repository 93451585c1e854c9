"""What a test needs of the device that it runs on, the same for the fake accelerator and for CUDA.

`FALLOW_TEST_DEVICE` says which: `fake` (default) or `cuda`.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

import pytest
import torch

import accelerator
from accelerator import build, collectives

HOLD_S = 60.0
"""A stream that a test still holds then is let go, so that nothing hangs for ever."""


class Fake:
    """The fake accelerator (tests/accelerator): each process has one of its own."""

    kind = "fake"
    "as torch names it; without a number it means this process's own"

    def missing(self) -> str:
        """Why nothing runs on it here; empty: it does. For pytest's own process, which does not load it."""
        try:
            build.library()
        except build.Unavailable as error:
            return str(error)
        return ""

    def count(self) -> int:
        """How many processes can have a device of their own."""
        return 2

    def load(self, rank: int) -> None:
        """Make a device of this kind this process's own, for good."""
        accelerator.load()
        accelerator.permit_speculation()

    def here(self) -> torch.device:
        """This process's device, with its number."""
        return torch.device("fake:0")

    @contextlib.contextmanager
    def hidden_syncs_raise(self) -> Iterator[None]:
        """Inside, an operator is an error if the host waits for the device without asking for that."""
        accelerator.report_syncs(True)
        try:
            yield
        finally:
            accelerator.report_syncs(False)

    def held(self, stream: torch.Stream) -> contextlib.AbstractContextManager[None]:
        """Inside, the stream begins nothing that it was not given before: an interleaving becomes certain."""
        return accelerator.held(stream)

    def pooled_streams(self) -> contextlib.AbstractContextManager[None]:
        """Inside, streams of a priority are given out again after 32 others."""
        return accelerator.pooled_streams()

    def reset(self) -> list[str]:
        """Wait for all that was queued and put the modes back. Returns what was found to be wrong meanwhile."""
        return accelerator.reset()

    def end(self) -> None:
        """Before the process ends."""
        collectives.end_all()


class Cuda:
    """GPUs of NVIDIA, or of AMD under a build of torch for them; two processes share one where there is only one."""

    kind = "cuda"

    def missing(self) -> str:
        if not torch.backends.cuda.is_built():
            return f"torch {torch.__version__} is built without CUDA: make test-gpu installs one with it"
        if torch.cuda.is_available():
            return ""
        return f"torch {torch.__version__} finds no GPU; nvidia-smi shows the CUDA version that the driver supports"

    def count(self) -> int:
        return torch.cuda.device_count()

    def load(self, rank: int) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # exact sums ask for it
        # Else a kernel that is used for the first time may wait for all streams, of which one may be held.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        torch.cuda.set_device(rank % self.count())

    def here(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @contextlib.contextmanager
    def hidden_syncs_raise(self) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @contextlib.contextmanager
    def held(self, stream: torch.Stream) -> Iterator[None]:
        """By a number in pinned memory that the stream waits for (CUDA driver API, `cuStreamWaitValue32`)."""
        gate = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        native = torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        ).cuda_stream
        code = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2(
            ctypes.c_void_p(native), ctypes.c_uint64(gate.data_ptr()), ctypes.c_uint32(1), ctypes.c_uint(0)
        )
        assert code == 0, f"cuStreamWaitValue32: error {code}"
        opening = threading.Timer(HOLD_S, gate.fill_, [1])
        opening.start()
        try:
            yield
            assert opening.is_alive(), f"the stream was held for {HOLD_S:g} s, and something waited for it meanwhile"
        finally:
            opening.cancel()
            gate.fill_(1)
            torch.cuda.synchronize()  # it reads the gate until then

    def pooled_streams(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reset(self) -> list[str]:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        return []

    def end(self) -> None:
        """Nothing is left to do."""


Device = Fake | Cuda
DEVICES: dict[str, Device] = {"fake": Fake(), "cuda": Cuda()}


def chosen() -> Device:
    """What FALLOW_TEST_DEVICE names.

    Raises:
        ValueError: nothing that there is.
    """
    name = os.environ.get("FALLOW_TEST_DEVICE", "fake")
    if name not in DEVICES:
        raise ValueError(f"FALLOW_TEST_DEVICE={name!r}: tests run on {' or '.join(DEVICES)}")
    return DEVICES[name]


def require(device: Device) -> None:
    """Where there is none, the test is skipped; with FALLOW_REQUIRE_ACCELERATOR it fails, and without a GPU all end."""
    if reason := device.missing():
        if not os.environ.get("FALLOW_REQUIRE_ACCELERATOR"):
            pytest.skip(reason)
        if device.kind != "fake":  # all tests of this run need it
            pytest.exit(reason, returncode=1)
        pytest.fail(reason)
