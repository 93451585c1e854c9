"""Other users' jobs, played on a real Slurm."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fallow.testbed.cluster import Testbed
from fallow.testbed.load import make_jobs, play
from waiting import wait_for

PATIENCE_S = 120.0


@pytest.mark.slurm
def test_a_load_is_played_until_sigterm_and_cleared_away_and_what_slurm_refuses_is_told(testbed: Testbed) -> None:
    jobs = make_jobs(3, seconds=3.0, nodes=4, utilisation=3.0, mean_s=20.0)
    stop = threading.Event()
    with ThreadPoolExecutor() as pool:
        playing = pool.submit(play, testbed, jobs, 600.0, stop)
        try:
            names = sorted(job.name for job in jobs)
            wait_for("all are submitted", lambda: listed(testbed, "%j") == names, PATIENCE_S)
            wait_for("some ran", lambda: listed(testbed, "%N"), PATIENCE_S)
        finally:
            stop.set()
        played = playing.result()
    assert (played.planned, played.submitted, played.refused) == (len(jobs), len(jobs), 0)
    wait_for("no job is left", lambda: not waiting(testbed), PATIENCE_S)

    argv = [sys.executable, "-m", "fallow", "testbed", "load", str(testbed.folder), "--utilisation", "4"]
    with subprocess.Popen([*argv, "--seconds", "600"], stdout=subprocess.PIPE, text=True) as player:
        wait_for("a job is there", lambda: waiting(testbed), PATIENCE_S)
        player.terminate()
        message, _ = player.communicate(timeout=PATIENCE_S)
    assert player.returncode == 0
    assert "jobs submitted" in message
    wait_for("no job is left", lambda: not waiting(testbed), PATIENCE_S)

    testbed.slurm("scontrol", "update", "PartitionName=normal", "State=DRAIN")
    played = play(testbed, jobs[:1], 0.0, threading.Event())
    assert (played.planned, played.submitted, played.refused) == (1, 0, 1)
    assert "sbatch" in played.refusal


def listed(testbed: Testbed, field: str) -> list[str]:
    """A field of all jobs, ended ones included; empty ones are left out."""
    return sorted(testbed.slurm("squeue", "-h", "-a", "-t", "all", "-o", field).split())


def waiting(testbed: Testbed) -> list[str]:
    """Jobs that run or wait."""
    return testbed.slurm("squeue", "-h", "-o", "%A").split()
