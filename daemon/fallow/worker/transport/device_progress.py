"""How far a member's device has got, for the heartbeats.

The training thread may be stuck behind its device: in an allocation, or because the device's queue is full. That looks
alike on a member whose kernel hangs and on those who wait for that member's sums. What tells them apart is the stream:
of those who wait it has done all that it was given, but for waits for others.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fallow.worker.transport import device as devices

_UNSEEN = (
    "fallow: worker {worker}: {device} does not tell how far it is: {error}\n"
    "fallow: worker {worker}: until it does, a kernel that hangs there cannot be told from a wait for other members\n"
)


@dataclass(slots=True)
class _StreamWait:
    """A stream waits for other members."""

    own: torch.Event | None
    "behind what the stream was given before: this member's own work"
    end: torch.Event | None = None
    "behind the wait; None as long as the host is still giving it to the stream"


class DeviceProgress:
    """The training thread notes its waits, and another thread looks. The beats read what that one saw last.

    Nobody else looks: a driver that is busy may hold up whoever asks it. What runs on streams of the script's own is
    not seen.
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
        wait = _StreamWait(devices.event(device))
        self._waits.append(wait)
        try:
            yield
        finally:
            wait.end = devices.event(device)

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
        return not devices.idle(device), False


def watch_device(
    worker: str, device: torch.device, beat_s: float, now: Callable[[], DeviceProgress | None], closed: threading.Event
) -> None:
    """Look at an asynchronous device every `beat_s` seconds until `closed` is set, on a thread of its own."""

    def look() -> None:
        is_reported = False
        while not closed.wait(beat_s):
            try:
                devices.enter(device)  # again: it may have failed
                progress = now()
                if progress is not None:
                    progress.look(device)
            except Exception as error:  # whatever it is, the next look may succeed
                if not is_reported:
                    sys.stderr.write(_UNSEEN.format(worker=worker, device=device, error=error))
                is_reported = True

    threading.Thread(target=look, name="fallow-device", daemon=True).start()
