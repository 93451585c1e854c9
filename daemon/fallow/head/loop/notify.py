"""systemd's readiness protocol: one datagram to $NOTIFY_SOCKET (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Tells systemd how the head is; does nothing where there is no $NOTIFY_SOCKET."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def alive(self, status: str) -> None:
        """Feed the watchdog. Called only after a completed turn of the main loop."""
        self._send(f"WATCHDOG=1\nSTATUS={status}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            try:
                sender.sendto(text.encode(), self._address)
            except OSError:
                # A supervisor that went away is no reason to stop serving.
                return
