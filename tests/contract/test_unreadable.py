"""Files and folders that the user may not read: one clear line, a documented code, and no line of a script more."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import fallow
from command_line import as_a_batch_script, write_command
from fallow.core.membership.records import Root
from fallow.core.membership.roster import Roster
from fallow.files import Paths
from fallow.head.api.reports import sample_count
from fallow.model import Exit, FallowError

NOBODY = 65534

SCRIPT = """
import os
from fallow.cli import run
from fallow.cli.main import main
run.SCRIPT_S = 0.5
child = os.fork()
if not child:
    main(["run", "--", "true"])
os.waitpid(child, 0)
print("after")
"""
"""A batch script. A shell of a user without privileges may not be able to start the Python that runs the tests."""


class Stranger:
    """A user without privileges, in a folder of theirs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = Paths(folder / "state", folder / "run").create()
        self.paths.run("r1").create()
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": str(Path(fallow.__file__).parents[1]),
            "FALLOW_STATE_DIR": str(self.paths.state),
            "XDG_RUNTIME_DIR": str(folder / "run"),
        }
        self._prefix: list[str] = []
        if os.geteuid() == 0:
            self._prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
            for path in (folder, *folder.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
            works = shutil.which("setpriv") and self.run([sys.executable, "-c", "import fallow.cli.main"])
            if not works or works.returncode:
                pytest.skip("root reads everything here, and no other user can start Python")

    def run(self, argv: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
        return as_a_batch_script([*self._prefix, *argv], self.folder, self.environ | environ)


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    folder = Path(tempfile.mkdtemp(prefix="fallow-unreadable-"))
    try:
        yield Stranger(folder)
    finally:
        for path in (folder, *folder.rglob("*")):
            if path.is_dir():
                path.chmod(0o700)
        shutil.rmtree(folder)


def test_a_state_folder_and_a_head_file_that_cannot_be_read_are_named(stranger: Stranger) -> None:
    paths = stranger.paths
    paths.head_file.write_text("{}")
    paths.head_file.chmod(0)
    for path, words in ((paths.head_file, ["status"]), (paths.state, ["status"]), (paths.state, ["report", "r1"])):
        if path == paths.state:
            path.chmod(0)
        done = stranger.run([sys.executable, "-m", "fallow.cli.main", *words])
        assert (done.returncode, done.stdout) == (Exit.NOPERM, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"fallow: {path}")
        assert "cannot be read (Permission denied); check the owner and mode" in line


def test_a_job_whose_key_cannot_be_read_ends_and_runs_no_line_more(stranger: Stranger) -> None:
    write_command(stranger.folder, "scancel", "echo $1 >scancel.args\nkill -CONT $PPID")
    stranger.paths.run("r1").keys.chmod(0)
    path = f"{stranger.folder}:{os.environ['PATH']}"
    job = {"FALLOW_RUN": "r1", "FALLOW_TOKEN": "r1.0", "SLURM_JOB_ID": "5", "PATH": path}
    done = stranger.run([sys.executable, "-c", SCRIPT], **job)
    assert done.stdout == "", done.stderr + "the rest of a script runs in the elected job alone"
    first, *_ = done.stderr.splitlines()
    assert first.startswith(f"fallow: {stranger.paths.run('r1').key('r1.0')}: cannot be read (Permission denied)")
    assert "Traceback" not in done.stderr and done.returncode == -signal.SIGKILL
    assert (stranger.folder / "scancel.args").read_text() == "5\n"


def test_ledgers_that_cannot_be_read_are_no_lost_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roster = Roster(Root(run="r", minimum=1, maximum=1, limit=1))
    assert sample_count(tmp_path / "none", roster, [])().consumed == 0

    def refuse(folder: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(FallowError, match=f"{tmp_path}: cannot be read .Permission denied.; check"):
        sample_count(tmp_path, roster, [])()
