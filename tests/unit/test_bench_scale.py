"""How the head grows with the cluster, measured small: what is counted is there, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

from fallow.bench import scale, scale_cluster, scale_head, scale_poll


def test_one_size(tmp_path: Path) -> None:
    by_socket_s = scale_head.socket_s(tmp_path)
    assert by_socket_s > 0.0
    found = scale.measure(40, 4, 300.0, by_socket_s)
    assert (found.nodes, found.runs) == (40, 4)
    assert found.polls >= 5
    assert 0 < found.poll_p50_s <= found.poll_p95_s <= found.poll_max_s
    assert found.read_s > 0.0
    assert found.busy_share > 0.0
    assert 5 < found.idle_nodes < 35
    assert found.workers == 8 * 12
    assert found.submits_per_min <= 120.0
    assert {len(row) for row in scale.rows([found])} == {len(scale.COLUMNS)}
    assert scale.findings([found])[0].startswith("40 nodes: a poll takes ")
    assert not list(tmp_path.iterdir())


def test_others_use_about_as_much_as_is_said() -> None:
    load = scale_cluster.Load(1000, 100.0)
    running = [job for job in load.jobs() if job.submit_at == 0.0]
    assert 0 <= sum(job.parts[0].nodes for job in running) - 700 < max(scale_cluster.WIDTHS)
    assert all(job.runs_s <= job.limit_s for job in load.jobs())
    assert list(load.jobs()) == list(load.jobs())


def test_made_up_polls_are_as_large_as_the_cluster() -> None:
    assert scale_poll.measure(50) > 0.0


def test_every_beat_is_answered() -> None:
    book = scale_head.filled(2, 3, 4)
    sizes = [len(run.roster.members) for run in book.runs.values()]
    assert sizes == [8, 4]
    assert scale_head.measure(2, 3, 4).beat_s > 0.0
