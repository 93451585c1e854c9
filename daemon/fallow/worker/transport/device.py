"""What an asynchronous device needs: events, copies that do not wait, a side stream; and how far it has got.

The host runs ahead of such a device. A copy to the host is readable once an event behind the copy is complete; a device
tensor is usable at once by whatever the same stream is given later. No other module knows of streams, and none
waits for a device but through `wait`, and `handover.snapshot` between steps. On the host, and on the `meta` device,
there is nothing to wait for.
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
"Part of a wait by which polling may prolong it."

_SIDE_PRIORITY = -2
"""torch gives a stream of a priority out again after 32 others (c10/cuda/CUDAStream.h). Communicators and scripts have
those of 0, -1 and the highest priority, -3 on most GPUs: they may wait for other members, and those for what we do."""

_CAPTURE_MODES = {
    "libcuda.so.1": "cuThreadExchangeStreamCaptureMode",
    "libamdhip64.so": "hipThreadExchangeStreamCaptureMode",  # as torch's wheels name it
    "libamdhip64.so.6": "hipThreadExchangeStreamCaptureMode",
    "libamdhip64.so.7": "hipThreadExchangeStreamCaptureMode",
}
"""Driver library -> its function that exchanges the calling thread's capture mode (CUDA's driver API, HIP's)."""

_THREAD_LOCAL = 1
"""The capture mode in which a thread heeds only its own captures: CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, and HIP's."""

_UNSEEN = (
    "fallow: worker {worker}: {device} does not tell how far it is: {error}\n"
    "fallow: worker {worker}: until it does, a kernel that hangs there cannot be told from a wait for other members\n"
)


def never() -> bool:
    """A reason to stop that never comes."""
    return False


def asynchronous(device: torch.device) -> bool:
    """True if the host runs ahead of this device."""
    return device.type not in ("cpu", "meta")


def enter(device: torch.device = HOST) -> None:
    """Prepare a thread of our own, never the training thread, for work on a device.

    The device becomes the calling thread's current one: every thread begins with the first one. And the thread may use
    the driver while another one captures a graph. `torch.cuda.graph` captures in mode "global" unless the script asks
    for another one. Then a query of an event, or an allocation, on any thread spoils the capture, except on threads of
    the mode "thread local".
    """
    if asynchronous(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)
    for library, function in _CAPTURE_MODES.items():
        with contextlib.suppress(OSError, AttributeError):
            driver = ctypes.CDLL(library, mode=os.RTLD_NOLOAD)
            getattr(driver, function)(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


def capturing(device: torch.device) -> bool:
    """True if the calling thread's current stream records a graph (`torch.cuda.graph`) and computes nothing."""
    if not asynchronous(device):
        return False
    is_capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return is_capturing is not None and bool(is_capturing())


# What torch's public function calls: each gradient asks, and that one takes 15 times as long.
_stream_of = getattr(torch._C, "_accelerator_getStream", torch.accelerator.current_stream)


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream to which this thread gives the device work; None on the host."""
    return _stream_of(device.index) if asynchronous(device) else None


def event(device: torch.device, *, timed: bool = False) -> torch.Event | None:
    """An event behind everything that the device's current stream was given; None on the host."""
    # Not by `Event.record`, which takes the stream of the thread's current device: a script need not have set that.
    stream = current_stream(device)
    return None if stream is None else stream.record_event(torch.Event(device, enable_timing=timed))


def idle(device: torch.device) -> bool:
    """True if the device's current stream has done all that it was given."""
    stream = current_stream(device)
    return stream is None or stream.query()


def wait(event: torch.Event | None, stop: Callable[[], object] = never) -> None:
    """Wait until an event is complete, by polling: a call that blocks in the driver could not be ended.

    Args:
        event: None is complete.
        stop: asked again and again; the wait ends when it returns something true.
    """
    began = time.monotonic()
    while event is not None and not event.query() and not stop():
        time.sleep(min(_LONGEST_POLL_S, max(_POLL_S, _POLL_SHARE * (time.monotonic() - began))))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor's value now, on the host: readable once an event behind this call is complete."""
    if not asynchronous(tensor.device):
        return tensor.detach().clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=True)
    return pinned.copy_(tensor.detach(), non_blocking=True)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The host tensor on a device, for what its current stream is given from now on. Nobody may change it meanwhile."""
    if not asynchronous(device) or tensor.device.type == device.type:
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def has_room(device: torch.device, nbytes: int) -> bool:
    """Return True if twice `nbytes` fit into the device's free memory: what torch has reserved does not count as free.

    False on the host, and where the device does not tell.
    """
    with contextlib.suppress(AttributeError, RuntimeError):
        free, _ = torch.get_device_module(device).mem_get_info(device)
        return bool(free >= 2 * nbytes)
    return False


@contextlib.contextmanager
def side_stream(device: torch.device, behind: torch.Event | None) -> Iterator[None]:
    """Inside, the current stream is behind this event, and behind nothing that another stream waits for.

    The current stream outside may wait for other members, and they for what is done inside. Allocate device memory
    outside: the allocator ties it to the stream that is current. To use inside's results on the stream outside, `wait`
    for an `event` that was taken inside. On the host nothing happens.
    """
    if behind is None:
        yield
        return
    stream = torch.Stream(device=device, priority=_SIDE_PRIORITY)
    stream.wait_event(behind)
    with stream:
        yield


# ---------------------------------------------------------------------------------------------- how far a device is


@dataclass(slots=True)
class _StreamWait:
    """A stream waits for other members."""

    own: torch.Event | None
    "behind what the stream was given before: this member's own work"
    end: torch.Event | None = None
    "behind the wait; None as long as the host is still giving it to the stream"


class DeviceProgress:
    """How far a member's device has got, for the heartbeats.

    The training thread may be stuck behind its device: in an allocation, or because the device's queue is full. That
    looks alike on a member whose kernel hangs and on those who wait for that member's sums. What tells them apart is
    the stream: of those who wait it has done all that it was given, but for waits for others.

    The training thread notes its waits, and another thread looks. The beats read what that one saw last. Nobody else
    looks: a driver that is busy may hold up whoever asks it. What runs on streams of the script's own is not seen.
    """

    def __init__(self) -> None:
        self.computes = False
        "the device is at this member's own work, or hangs in it"
        self.awaits_others = False
        "all that it has to do waits for other members"
        self._waits: list[_StreamWait] = []

    @contextlib.contextmanager
    def wait(self, device: torch.device) -> Iterator[None]:
        """Inside, the device's current stream is made to wait for others."""
        wait = _StreamWait(event(device))
        self._waits.append(wait)
        try:
            yield
        finally:
            wait.end = event(device)

    def arrived(self) -> None:
        """Nothing waits any more."""
        self._waits, self.awaits_others = [], False

    def look(self, device: torch.device) -> None:
        """See how far the device is. Does not wait for it.

        Raises:
            RuntimeError: the device does not tell; then neither `computes` nor `awaits_others`.
        """
        seen = False, False
        try:
            seen = self._see(device)
        finally:
            self.computes, self.awaits_others = seen

    def _see(self, device: torch.device) -> tuple[bool, bool]:
        """Whether the device computes, and whether it waits for others."""
        for wait in list(self._waits):
            own_is_done = wait.own is None or wait.own.query()
            if not own_is_done or wait.end is None or not wait.end.query():
                return not own_is_done, own_is_done
        return not idle(device), False


def watch_device(
    worker: str, device: torch.device, beat_s: float, find: Callable[[], DeviceProgress | None], closed: threading.Event
) -> None:
    """Look at an asynchronous device every `beat_s` seconds until `closed` is set, on a thread of its own.

    `find` gives what the training thread notes its waits in, as long as there is a group.
    """

    def look() -> None:
        is_reported = False
        while not closed.wait(beat_s):
            try:
                enter(device)  # again: it may have failed
                progress = find()
                if progress is not None:
                    progress.look(device)
            except Exception as error:  # whatever it is, the next look may succeed
                if not is_reported:
                    sys.stderr.write(_UNSEEN.format(worker=worker, device=device, error=error))
                is_reported = True

    threading.Thread(target=look, name="fallow-device", daemon=True).start()
