"""What keeps Slurm's commands from starting, and the file that sbatch is given: it cannot be written, or is gone."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from command_line import write_command
from fallow.model import JobRequest
from fallow.slurm.cli import CliClient
from fallow.slurm.client import SlurmUnavailable, SubmitRejected

REQUEST = JobRequest(token="fallow-r-h1", options=["--time=5"], script="#!/bin/sh\nexit 0\n", cwd="/")

SBATCH = """#!/bin/sh
for word; do case $word in */fallow-*.sh) script=$word;; esac; done
[ -n "$KEEP" ] && cp -p "$script" "$KEEP" && pwd > "$KEEP.cwd"
rm -f "$script"
echo 7
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files of its own, beside a sbatch that says yes."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    sbatch = write_command(tmp_path / "bin", "sbatch", SBATCH)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


async def test_a_script_that_was_cleaned_away_meanwhile_does_not_undo_the_submission(scripts: Path) -> None:
    assert await CliClient().submit(REQUEST) == "7"
    assert os.listdir(scripts) == []


async def test_only_we_can_read_the_script_and_sbatch_is_called_in_the_jobs_folder(
    scripts: Path, tmp_path: Path
) -> None:
    kept, cwd = tmp_path / "kept", tmp_path / '-a "$(id)"'
    cwd.mkdir()
    request = JobRequest(token="t", options=[], script=REQUEST.script, environment={"KEEP": str(kept)}, cwd=str(cwd))
    await CliClient().submit(request)
    assert (kept.read_text(), (tmp_path / "kept.cwd").read_text()) == (REQUEST.script, f"{cwd}\n")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


async def test_a_full_temporary_folder_is_told_and_nothing_is_submitted(
    scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, fdopen = os.open("/dev/full", os.O_WRONLY), os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda fd, mode: fdopen(os.dup2(full, fd), mode))
    with pytest.raises(SlurmUnavailable) as caught:
        await CliClient().submit(REQUEST)
    assert caught.value.message == (
        f"sbatch: its script cannot be written to {scripts} (No space left on device); "
        "make room there, or start the head with TMPDIR set to another folder"
    )
    assert os.listdir(scripts) == []


async def test_a_missing_working_folder_is_a_refusal(scripts: Path) -> None:
    with pytest.raises(SubmitRejected, match=r"/nosuch/folder.*No such file"):
        await CliClient().submit(JobRequest(token="t", options=[], script=REQUEST.script, cwd="/nosuch/folder"))
    assert os.listdir(scripts) == []


async def test_missing_commands_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nosuch")
    with pytest.raises(SlurmUnavailable, match=r"scontrol .*install"):
        await CliClient().config()
