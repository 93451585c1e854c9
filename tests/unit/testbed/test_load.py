"""Jobs of other users: a seed makes the same jobs, and a load ends with its testbed."""

import threading
from pathlib import Path

import pytest

from fallow.testbed.cluster import Testbed
from fallow.testbed.conf import Layout
from fallow.testbed.load import LoadJob, make_jobs, play


def jobs(seed: int = 1, seconds: float = 600.0, nodes: int = 8, utilisation: float = 0.7) -> list[LoadJob]:
    return make_jobs(seed, seconds=seconds, nodes=nodes, utilisation=utilisation, mean_s=20.0)


@pytest.mark.parametrize("utilisation", [0.4, 0.7, 0.95])
def test_jobs_ask_for_about_the_wanted_part(utilisation: float) -> None:
    seconds = 20_000.0
    load_jobs = jobs(seconds=seconds, utilisation=utilisation)
    node_s = sum(job.nodes * min(job.runs_s, seconds - job.at_s) for job in load_jobs)
    assert node_s / (seconds * 8) == pytest.approx(utilisation, rel=0.15)


@pytest.mark.parametrize("nodes", [1, 2, 20])
def test_jobs_fit_the_testbed(nodes: int) -> None:
    load_jobs = jobs(nodes=nodes)
    assert load_jobs == jobs(nodes=nodes) != jobs(seed=2, nodes=nodes)
    assert all(1 <= job.nodes <= nodes for job in load_jobs)
    assert all(0 <= job.at_s <= 600 and job.runs_s > 0 and job.limit_minutes * 60 >= job.runs_s for job in load_jobs)
    assert [job.at_s for job in load_jobs] == sorted(job.at_s for job in load_jobs)
    assert len({job.name for job in load_jobs}) == len(load_jobs) > 0


class Hurrying(threading.Event):
    """It is never set, and nobody waits for it."""

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None and timeout < 3600.0, "it waits for the end of a load that is over"
        return False


def test_a_load_ends_with_its_testbed(tmp_path: Path) -> None:
    removed_testbed = Testbed(Layout(str(tmp_path / "gone"), "me", 20_000, (25, 11), 0.0))
    load_jobs = jobs()
    played = play(removed_testbed, load_jobs, 86_400.0, Hurrying())
    assert (played.planned, played.submitted, played.refused) == (len(load_jobs), 0, 0)
