"""Work on an asynchronous device: events, non-blocking copies, side streams, and the progress of the device.

The host runs ahead of an asynchronous device. A copy to the host is readable once an event recorded after the copy is
complete. Later work on the same stream may use a device tensor at once. Only this module knows of streams. All waits
for a device go through `wait`, except those of `handover.snapshot` between steps. The host and the `meta` device never
need a wait.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

HOST = torch.device("cpu")

_POLL_S = 50e-6
_LONGEST_POLL_S = 1e-3
_POLL_SHARE = 0.02
"Poll interval as a share of the time waited so far."

_SIDE_PRIORITY = -2
"""Priority that neither communicators nor scripts use: they use 0, -1 and the highest, -3 on most GPUs. torch reuses a
stream of one priority after 32 others (c10/cuda/CUDAStream.h). A shared stream could deadlock: communicators' streams
wait for other members, and other members for the work on side streams."""

_CAPTURE_MODES = {
    "libcuda.so.1": "cuThreadExchangeStreamCaptureMode",
    "libamdhip64.so": "hipThreadExchangeStreamCaptureMode",  # as torch's wheels name it
    "libamdhip64.so.6": "hipThreadExchangeStreamCaptureMode",
    "libamdhip64.so.7": "hipThreadExchangeStreamCaptureMode",
}
"""Driver library -> its function that sets the calling thread's capture mode (driver APIs of CUDA and HIP)."""

_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, the same in HIP: other threads' captures do not restrict this thread."""

_LOOK_FAILED = (
    "fallow: worker {worker}: cannot read the progress of {device}: {error}\n"
    "fallow: worker {worker}: until this works, a kernel that hangs looks like a wait for other members\n"
)


def never_stop() -> bool:
    return False


def asynchronous(device: torch.device) -> bool:
    """Return True if the host runs ahead of this device."""
    return device.type not in ("cpu", "meta")


def enter(device: torch.device = HOST) -> None:
    """Prepare one of Fallow's own threads, never the training thread, for work on a device.

    First, make `device` the calling thread's current device: every thread begins with the first device.

    Second, let the thread use the driver while another thread captures a graph. By default `torch.cuda.graph` captures
    in mode "global": an event query or an allocation on any thread then spoils the capture, except on threads in mode
    "thread local".
    """
    if asynchronous(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)
    for library, function in _CAPTURE_MODES.items():
        with contextlib.suppress(OSError, AttributeError):
            driver = ctypes.CDLL(library, mode=os.RTLD_NOLOAD)
            getattr(driver, function)(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


def is_capturing(device: torch.device) -> bool:
    """Return True if the calling thread's current stream captures a graph (`torch.cuda.graph`)."""
    if not asynchronous(device):
        return False
    query = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return query is not None and bool(query())


# The function behind torch's public one, which takes 15 times as long. Called once per gradient.
_stream_of = getattr(torch._C, "_accelerator_getStream", torch.accelerator.current_stream)


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the calling thread's current stream on the device; None on the host."""
    return _stream_of(device.index) if asynchronous(device) else None


def event(device: torch.device, *, timed: bool = False) -> torch.Event | None:
    """Record an event after all work on the device's current stream so far; None on the host."""
    # Not `Event.record`: it uses the thread's current device, which the script may not have set to `device`.
    stream = current_stream(device)
    return None if stream is None else stream.record_event(torch.Event(device, enable_timing=timed))


def is_idle(device: torch.device) -> bool:
    """Return True if the device's current stream has no work left."""
    stream = current_stream(device)
    return stream is None or stream.query()


def wait(event: torch.Event | None, stop: Callable[[], object] = never_stop) -> None:
    """Wait until an event is complete. Polls, since a call that blocks in the driver could not be ended.

    Args:
        event: None counts as complete.
        stop: polled; the wait ends once it returns a true value.
    """
    began = time.monotonic()
    while event is not None and not event.query() and not stop():
        time.sleep(min(_LONGEST_POLL_S, max(_POLL_S, _POLL_SHARE * (time.monotonic() - began))))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the tensor's current value to the host. Readable once an event recorded after this call is complete."""
    if not asynchronous(tensor.device):
        return tensor.detach().clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=True)
    return pinned.copy_(tensor.detach(), non_blocking=True)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device, for later work on the current stream. Do not change `tensor` before the copy."""
    if not asynchronous(device) or tensor.device.type == device.type:
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def has_free_memory(device: torch.device, nbytes: int) -> bool:
    """Return True if the device has twice `nbytes` of free memory. Memory that torch has reserved is not free.

    False on the host, and on devices that do not report free memory.
    """
    with contextlib.suppress(AttributeError, RuntimeError):
        free, _ = torch.get_device_module(device).mem_get_info(device)
        return bool(free >= 2 * nbytes)
    return False


@contextlib.contextmanager
def side_stream(device: torch.device, behind: torch.Event | None) -> Iterator[None]:
    """Make a separate stream current that waits for the event `behind` and for nothing else.

    Why: the outer stream may wait for other members, and these may wait for the work on the side stream. Allocate
    device memory outside: the allocator ties it to the current stream. Before the outer stream uses results, `wait`
    for an `event` recorded inside. Does nothing on the host.
    """
    if behind is None:
        yield
        return
    stream = torch.Stream(device=device, priority=_SIDE_PRIORITY)
    stream.wait_event(behind)
    with stream:
        yield


# ---------------------------------------------------------------------------------------------- progress of a device


@dataclass(slots=True)
class _StreamWait:
    """A wait for other members on a stream."""

    own: torch.Event | None
    "event after this member's own work, before the wait"
    end: torch.Event | None = None
    "event after the wait; None while the host still enqueues the wait"


class DeviceProgress:
    """Progress of a member's device, for the heartbeats.

    The training thread may block on its device: in an allocation, or because the device's queue is full. This looks
    the same on a member whose kernel hangs and on the members that wait for its sums. The stream tells them apart: on
    a waiting member the stream has finished all work except waits for other members.

    The training thread records its waits. A separate thread calls `look`, and the heartbeats read its last result: a
    busy driver may block the thread that queries it. Work on the script's own streams is not seen.
    """

    def __init__(self) -> None:
        self.computes = False
        "True while the device runs this member's own work, or hangs in it"
        self.awaits_others = False
        "True while all pending work of the device waits for other members"
        self._waits: list[_StreamWait] = []

    @contextlib.contextmanager
    def wait(self, device: torch.device) -> Iterator[None]:
        """Record a wait for other members, which the caller enqueues on the current stream inside."""
        wait = _StreamWait(event(device))
        self._waits.append(wait)
        try:
            yield
        finally:
            wait.end = event(device)

    def clear(self) -> None:
        """Forget all waits: they have ended."""
        self._waits, self.awaits_others = [], False

    def look(self, device: torch.device) -> None:
        """Update `computes` and `awaits_others`. Does not wait for the device.

        Raises:
            RuntimeError: the query failed; both are False then.
        """
        progress = False, False
        try:
            progress = self._see(device)
        finally:
            self.computes, self.awaits_others = progress

    def _see(self, device: torch.device) -> tuple[bool, bool]:
        """Return (computes, awaits_others)."""
        for wait in list(self._waits):
            own_is_done = wait.own is None or wait.own.query()
            if not own_is_done or wait.end is None or not wait.end.query():
                return not own_is_done, own_is_done
        return not is_idle(device), False


def watch_device(
    worker: str, device: torch.device, beat_s: float, find: Callable[[], DeviceProgress | None], closed: threading.Event
) -> None:
    """Look at an asynchronous device every `beat_s` seconds until `closed` is set, on a thread of its own.

    `find` returns the current group's `DeviceProgress`, or None without a group.
    """

    def look() -> None:
        is_reported = False
        while not closed.wait(beat_s):
            try:
                enter(device)  # in every round, since an earlier call may have failed
                progress = find()
                if progress is not None:
                    progress.look(device)
            except Exception as error:  # whatever it is, the next look may succeed
                if not is_reported:
                    sys.stderr.write(_LOOK_FAILED.format(worker=worker, device=device, error=error))
                is_reported = True

    threading.Thread(target=look, name="fallow-device", daemon=True).start()
