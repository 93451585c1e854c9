"""Prometheus metrics: own prefix, base units, no job id or node name as a label."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from fallow.head.state.book import Book
from fallow.model import AllocationState, EventRecord, RunStatus


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
            start_http_server(port, addr="127.0.0.1", registry=registry)

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
