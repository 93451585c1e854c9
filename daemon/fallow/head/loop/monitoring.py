"""What monitors hear of the head: systemd's readiness protocol (sd_notify(3)), and Prometheus metrics.

Metrics have their own prefix and base units; no job id or node name is a label.
"""

import os
import socket
from collections.abc import Mapping

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from fallow.head.state.book import Book
from fallow.model import AllocationState, EventRecord, RunStatus

log = structlog.get_logger("fallow.head")


PATIENCE_S = 2.0
"""So long the head waits, once, for a systemd that takes no messages to hear that it has begun, or that it ends."""


class Notifier:
    """Tells systemd how the head is; does nothing where there is no $NOTIFY_SOCKET."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}", PATIENCE_S)

    def alive(self, status: str) -> None:
        """Feed the watchdog. Called only after a completed turn of the main loop."""
        self._send(f"WATCHDOG=1\nSTATUS={status}")

    def stopping(self) -> None:
        self._send("STOPPING=1", PATIENCE_S)

    def _send(self, text: str, wait_s: float = 0.0) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            # The queue of a systemd that hangs is full: what comes with each tick must not wait for room there.
            sender.settimeout(wait_s)
            try:
                sender.sendto(text.encode(), self._address)
            except OSError:
                # A supervisor that went away is no reason to stop serving.
                return


class Metrics:
    """Counters of one head, served on the loopback interface when a port is configured."""

    def __init__(self, port: int | None) -> None:
        registry = CollectorRegistry()
        self._events = Counter("fallow_events", "Lines of the event log", ["kind"], registry=registry)
        self._members = Gauge("fallow_members", "Members (nodes) of all runs", registry=registry)
        self._runs = Gauge("fallow_runs", "Runs by status", ["status"], registry=registry)
        self._allocations = Gauge("fallow_allocations", "Allocations by state", ["state"], registry=registry)
        self._pause = Histogram(
            "fallow_pause_seconds",
            "Pause of a membership change",
            ["kind"],
            registry=registry,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
        )
        self._delayed = Histogram(
            "fallow_others_delayed_seconds",
            "Time that a job of somebody else waited because a node was still ours",
            registry=registry,
            buckets=(1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 300.0),
        )
        self._served = port is not None
        if port is not None:
            try:
                start_http_server(port, addr="127.0.0.1", registry=registry)
            except OSError as error:  # maybe of another user's head: on a login node, one setting is for all
                log.warning("metrics.unserved", port=port, error=error.strerror, advice="set [head] prometheus_port")

    def count_event(self, event: EventRecord) -> None:
        self._events.labels(kind=event.kind).inc()
        if event.kind == "delayed":
            self._delayed.observe(event.data["waited_s"])
        if pause_s := event.data.get("pause_s"):
            self._pause.labels(kind=event.kind).observe(pause_s)

    def update(self, book: Book) -> None:
        """Take the gauges' values from the book. Costs nothing while nobody can read them."""
        if not self._served:
            return
        runs = list(book.current.values())
        self._members.set(sum(len(r.roster.present()) for r in runs if not r.ended))
        statuses = [r.root.status for r in book.runs.values()]
        for status in RunStatus:
            self._runs.labels(status=status.value).set(statuses.count(status))
        live = [a for r in runs for a in r.live_allocations()]
        for state in AllocationState:
            self._allocations.labels(state=state.value).set(sum(1 for a in live if a.state is state))
