"""How the head grows with the cluster, measured small: what is counted is there, and nothing is left behind."""

from __future__ import annotations

import os

from fallow.bench import head, scale, scale_cluster, scale_poll
from fallow.bench.head import Change, Measured


def test_one_size() -> None:
    found = scale.measure(40, 4, 300.0, rest_s=0.1)
    assert (found.nodes, found.runs) == (40, 4)
    assert found.polls >= 5
    assert 0 < found.poll_p50_s <= found.poll_p95_s <= found.poll_max_s
    assert found.read_s > 0.0
    assert found.busy_share > 0.0
    assert 5 < found.idle_nodes < 35
    assert found.held == 12
    assert 0.0 < found.cores < os.cpu_count()
    assert found.rss_mb > 10.0
    assert found.submits_per_min <= 120.0
    assert {len(row) for row in scale.rows([found])} == {len(scale.COLUMNS)}
    assert scale.findings([found])[0].startswith("40 nodes: a poll takes ")


def test_rows_tell_orders_and_reports_apart_from_the_rest() -> None:
    kill = Change(0.25, 0.125, {"orders": 400_000, "reports": 600_000, "gathers": 5_000_000}, 3000)
    absorb = Change(0.5, 0.25, {"orders": 500_000, "heartbeats": 9_000_000}, 1000)
    rows = head.rows(Measured([kill, kill], [absorb], rest_cores=0.5, rss_mb=120.0), 1000, 8)
    shown = {row.name: (row.ours.p50, row.unit, row.ours.n) for row in rows}
    assert shown["kill: all told"] == (0.25, "s", 2)
    assert shown["absorb: head's loop"] == (0.25, "s", 1)
    assert (shown["kill: messages"][0], shown["absorb: messages"][0]) == (1.0, 0.5)
    assert shown["kill: store"] == (3.0, "kB", 2)
    assert (shown["head at rest"][0], shown["head's memory"][0]) == (0.5, 120.0)
    assert "gathers 5.00" in next(row.note for row in rows if row.name == "kill: messages")
    assert {row.members for row in rows} == {1000}


def test_others_use_about_as_much_as_is_said() -> None:
    load = scale_cluster.Load(1000, 100.0)
    running = [job for job in load.jobs() if job.submit_at == 0.0]
    assert 0 <= sum(job.parts[0].nodes for job in running) - 700 < max(scale_cluster.WIDTHS)
    assert all(job.runs_s <= job.limit_s for job in load.jobs())
    assert list(load.jobs()) == list(load.jobs())


def test_made_up_polls_are_as_large_as_the_cluster() -> None:
    assert scale_poll.measure(50) > 0.0
