"""Monitoring of the head: systemd's readiness protocol (sd_notify(3)), and Prometheus metrics.

Metrics have their own prefix and base units; no job id or node name is a label.
"""

import os
import socket
from collections.abc import Mapping

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from fallow.head.state.registry import Registry
from fallow.model import AllocationState, EventRecord, RunStatus

log = structlog.get_logger("fallow.head")


PATIENCE_S = 2.0
"""Longest wait for a systemd whose queue is full, for the messages READY and STOPPING."""


class Notifier:
    """Reports the head's state to systemd. Does nothing without $NOTIFY_SOCKET."""

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
            # If systemd hangs, its queue is full. The message of each tick must not wait for it.
            sender.settimeout(wait_s)
            try:
                sender.sendto(text.encode(), self._address)
            except OSError:
                # The head serves on without its supervisor.
                return


class Metrics:
    """Counters of one head, served on the loopback interface when a port is configured."""

    def __init__(self, port: int | None) -> None:
        collectors = CollectorRegistry()
        self._events = Counter("fallow_events", "Lines of the event log", ["kind"], registry=collectors)
        self._members = Gauge("fallow_members", "Members (nodes) of all runs", registry=collectors)
        self._runs = Gauge("fallow_runs", "Runs by status", ["status"], registry=collectors)
        self._allocations = Gauge("fallow_allocations", "Allocations by state", ["state"], registry=collectors)
        self._pause = Histogram(
            "fallow_pause_seconds",
            "Pause of a membership change",
            ["kind"],
            registry=collectors,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
        )
        self._others_delayed = Histogram(
            "fallow_others_delayed_seconds",
            "Time that a job of somebody else waited because a node was still ours",
            registry=collectors,
            buckets=(1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 300.0),
        )
        self._is_served = port is not None
        if port is not None:
            try:
                start_http_server(port, addr="127.0.0.1", registry=collectors)
            except OSError as error:  # another user's head may have the port: a site's setting applies to all users
                log.warning("metrics.unserved", port=port, error=error.strerror, advice="set [head] prometheus_port")

    def count_event(self, event: EventRecord) -> None:
        self._events.labels(kind=event.kind).inc()
        if event.kind == "delayed":
            self._others_delayed.observe(event.data["waited_s"])
        if pause_s := event.data.get("pause_s"):
            self._pause.labels(kind=event.kind).observe(pause_s)

    def update(self, registry: Registry) -> None:
        """Set the gauges from the registry. Does nothing if the metrics are not served."""
        if not self._is_served:
            return
        runs = list(registry.current.values())
        self._members.set(sum(len(r.roster.present()) for r in runs if not r.ended))
        statuses = [r.root.status for r in registry.runs.values()]
        for status in RunStatus:
            self._runs.labels(status=status.value).set(statuses.count(status))
        live = [a for r in runs for a in r.live_allocations()]
        for state in AllocationState:
            self._allocations.labels(state=state.value).set(sum(1 for a in live if a.state is state))
