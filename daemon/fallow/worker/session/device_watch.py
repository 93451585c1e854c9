"""A thread that looks how far a worker's device is, see `transport.device_progress`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch

from fallow.worker.transport import device as devices
from fallow.worker.transport.group import Group

_UNSEEN = (
    "fallow: worker {worker}: {device} does not tell how far it is: {error}\n"
    "fallow: worker {worker}: until it does, a kernel that hangs there cannot be told from a wait for other members\n"
)


def watch_device(
    worker: str, device: torch.device, beat_s: float, group: Callable[[], Group | None], closed: threading.Event
) -> None:
    """Look at an asynchronous device every `beat_s` seconds until `closed` is set, on a thread of its own."""

    def look() -> None:
        is_reported = False
        while not closed.wait(beat_s):
            try:
                devices.enter(device)  # again: it may have failed
                current = group()
                if current is not None:
                    current.device_progress.look(device)
            except Exception as error:  # whatever it is, the next look may succeed
                if not is_reported:
                    sys.stderr.write(_UNSEEN.format(worker=worker, device=device, error=error))
                is_reported = True

    threading.Thread(target=look, name="fallow-device", daemon=True).start()
