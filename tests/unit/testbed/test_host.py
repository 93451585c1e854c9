"""Which processes a testbed takes for its own, and what a load does whose testbed is gone."""

import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from fallow.testbed.cluster import Testbed
from fallow.testbed.conf import Layout
from fallow.testbed.host import owned_processes
from fallow.testbed.load import make_jobs, play


@pytest.mark.parametrize(("name", "owned"), [("slurmstepd", True), ("sleep", False)])
def test_a_step_manager_without_environment_is_the_testbeds(tmp_path: Path, name: str, owned: bool) -> None:
    """slurmstepd empties its environment from 24.11 on; anybody else may work in the folder."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    program = shutil.copy(sleep, tmp_path / name)
    folder = tmp_path / "testbed"
    folder.mkdir()
    with subprocess.Popen([program, "60"], env={}, cwd=folder) as process:
        try:
            assert owned_processes(folder, folder / "slurm.conf") == ({process.pid} if owned else set())
            assert owned_processes(tmp_path / "other", tmp_path / "other" / "slurm.conf") == set()
        finally:
            process.kill()


class Hurrying(threading.Event):
    """It is never set, and nobody waits for it."""

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None and timeout < 3600.0, "it waits for the end of a load that is over"
        return False


def test_a_load_ends_with_its_testbed(tmp_path: Path) -> None:
    gone = Testbed(Layout(str(tmp_path / "gone"), "me", 20_000, (25, 11), 0.0))
    jobs = make_jobs(1, seconds=600.0, nodes=8, utilisation=0.7, mean_s=20.0)
    played = play(gone, jobs, 86_400.0, Hurrying())
    assert (played.planned, played.submitted, played.refused) == (len(jobs), 0, 0)
