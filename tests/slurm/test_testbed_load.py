"""Other users' jobs: made alike from the same seed, and played on a real Slurm."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fallow.testbed.cluster import Testbed
from fallow.testbed.load import LoadJob, make_jobs, play
from waiting import wait_for

PATIENCE_S = 120.0


def jobs(seed: int = 1, seconds: float = 600.0, nodes: int = 8, utilisation: float = 0.7) -> list[LoadJob]:
    return make_jobs(seed, seconds=seconds, nodes=nodes, utilisation=utilisation, mean_s=20.0)


@pytest.mark.parametrize("utilisation", [0.4, 0.7, 0.95])
def test_jobs_ask_for_about_the_wanted_part(utilisation: float) -> None:
    seconds = 20_000.0
    made = jobs(seconds=seconds, utilisation=utilisation)
    node_s = sum(job.nodes * min(job.runs_s, seconds - job.at_s) for job in made)
    assert node_s / (seconds * 8) == pytest.approx(utilisation, rel=0.15)


@pytest.mark.parametrize("nodes", [1, 2, 20])
def test_jobs_fit_the_testbed(nodes: int) -> None:
    made = jobs(nodes=nodes)
    assert made == jobs(nodes=nodes) != jobs(seed=2, nodes=nodes)
    assert all(1 <= job.nodes <= nodes for job in made)
    assert all(0 <= job.at_s <= 600 and job.runs_s > 0 and job.limit_minutes * 60 >= job.runs_s for job in made)
    assert [job.at_s for job in made] == sorted(job.at_s for job in made)
    assert len({job.name for job in made}) == len(made) > 0


@pytest.mark.slurm
def test_a_load_is_played_until_sigterm_and_cleared_away_and_what_slurm_refuses_is_told(testbed: Testbed) -> None:
    made = jobs(seed=3, seconds=3.0, nodes=4, utilisation=3.0)
    stop = threading.Event()
    with ThreadPoolExecutor() as pool:
        playing = pool.submit(play, testbed, made, 600.0, stop)
        try:
            names = sorted(job.name for job in made)
            wait_for("all are submitted", lambda: listed(testbed, "%j") == names, PATIENCE_S)
            wait_for("some ran", lambda: listed(testbed, "%N"), PATIENCE_S)
        finally:
            stop.set()
        played = playing.result()
    assert (played.planned, played.submitted, played.refused) == (len(made), len(made), 0)
    wait_for("no job is left", lambda: not waiting(testbed), PATIENCE_S)

    argv = [sys.executable, "-m", "fallow", "testbed", "load", str(testbed.folder), "--utilisation", "4"]
    with subprocess.Popen([*argv, "--seconds", "600"], stdout=subprocess.PIPE, text=True) as player:
        wait_for("a job is there", lambda: waiting(testbed), PATIENCE_S)
        player.terminate()
        told, _ = player.communicate(timeout=PATIENCE_S)
    assert player.returncode == 0
    assert "jobs submitted" in told
    wait_for("no job is left", lambda: not waiting(testbed), PATIENCE_S)

    testbed.slurm("scontrol", "update", "PartitionName=normal", "State=DRAIN")
    played = play(testbed, made[:1], 0.0, threading.Event())
    assert (played.planned, played.submitted, played.refused) == (1, 0, 1)
    assert "sbatch" in played.refusal


def listed(testbed: Testbed, field: str) -> list[str]:
    """A field of all jobs, ended ones included; empty ones are left out."""
    return sorted(testbed.slurm("squeue", "-h", "-a", "-t", "all", "-o", field).split())


def waiting(testbed: Testbed) -> list[str]:
    """Jobs that run or wait."""
    return testbed.slurm("squeue", "-h", "-o", "%A").split()
