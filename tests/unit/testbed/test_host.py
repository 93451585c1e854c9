"""Processes that belong to a testbed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fallow.testbed.host import owned_processes


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
