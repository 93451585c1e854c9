"""How long others waited for a node of ours."""

import msgspec
import pytest

from builders import NOW, cluster, job
from fallow.core.neighbour.watch import Delays
from fallow.model import ClusterState, DelayReport, JobInfo


def poll(at: float, *jobs: JobInfo) -> ClusterState:
    return cluster([], jobs, at=at)


def stored(delays: Delays) -> Delays:
    """As a head that comes back reads them."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(delays), type=Delays)


A, B = frozenset(["a"]), frozenset(["b"])
"""Tokens of ours that others wait for."""


def test_a_delay_lasts_until_our_node_is_free() -> None:
    delays = Delays()
    waiting = job("1", "PENDING", submit_at=NOW + 3)
    assert delays.note(poll(NOW), {}) == []
    assert delays.note(poll(NOW + 5, waiting), {"1": A}) == []
    assert delays.report(NOW + 6) == DelayReport(jobs=1, p95_s=3.0, max_s=3.0)
    # Ours ended at 8, theirs started at 11 in Slurm's own good time.
    ours = job("7", "CANCELLED", name="a", end_at=NOW + 8)
    (over,) = delays.note(poll(NOW + 10, waiting, ours), {})
    assert (over.job_id, over.user, over.waited_s) == ("1", "alice", 5.0)
    assert delays.note(poll(NOW + 15, job("1", "RUNNING", start_at=NOW + 11)), {}) == []
    # Started within the second in which it came: Slurm's time is before it was seen waiting.
    soon = Delays(polled_at=NOW)
    soon.note(poll(NOW + 1.5, job("2", "PENDING", submit_at=NOW + 1)), {"2": A})
    (over,) = soon.note(poll(NOW + 3, job("2", "RUNNING", start_at=NOW + 1)), {})
    assert over.waited_s == 0.5
    assert stored(delays).report(NOW + 99) == delays.report(NOW + 99) == DelayReport(jobs=1, p95_s=5.0, max_s=5.0)


def test_all_delays_count_and_the_longest_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fallow.core.neighbour.watch.MAX_JOBS", 100)
    delays, waits = Delays(), [100.0, 0.0, *(1.0 + number % 20 for number in range(299))]
    for number, wait in enumerate(waits):
        at, name = NOW + 1000.0 * number, str(number)
        delays.note(poll(at, job(name, "PENDING", submit_at=at)), {name: A})
        delays.note(poll(at + 500.0, job(name, "RUNNING", start_at=at + wait)), {})
    report = delays.report(at + 500.0)
    assert (report.jobs, report.max_s) == (300, 100.0)
    assert 19.0 <= report.p95_s <= 19.0 * 1.1
    assert len(delays.jobs) == 100
    assert stored(delays).report(at) == delays.report(at)
