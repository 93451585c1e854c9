"""What a careless user types at a prompt: one clear line on standard error, the documented exit code, no traceback.

Only what needs processes of its own is here; single commands are tried in `tests/unit/cli`.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fallow.model import Exit

FALLOW = [sys.executable, "-m", "fallow.cli.main"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command in a folder with no configuration and a state folder of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FALLOW_", "SLURM_"))}
    usual = {
        **kept,
        "FALLOW_STATE_DIR": str(tmp_path / "state"),
        "FALLOW_SLURM__CLIENT": "none",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "TMPDIR": str(tmp_path),
    }

    def run(argv: list[str], stdout: Any = subprocess.PIPE, encoding: str = "utf-8", **environ: str) -> Any:
        return subprocess.run(
            argv, cwd=tmp_path, env=usual | environ, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
            encoding=encoding, timeout=180, check=False,
        )  # fmt: skip

    return run


def test_a_head_is_not_started_with_a_configuration_that_is_wrong(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[harvets]\n")
    done = run([*FALLOW, "daemon"], FALLOW_CONFIG=str(file))
    assert (done.returncode, done.stdout) == (Exit.CONFIG, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("fallow: ") and "[harvets] is not known; did you mean harvest?" in line
    assert not (tmp_path / "state" / "head.json").exists()


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's client commands")
def test_a_slurmctld_that_does_not_answer(run: Run, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        conf = tmp_path / "slurm.conf"
        conf.write_text(
            f"ClusterName=gone\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort={port}\nAuthType=auth/none\n"
            "MessageTimeout=2\nNodeName=n1\nPartitionName=p Nodes=n1\n"
        )
        done = run([*FALLOW, "doctor", "--json"], SLURM_CONF=str(conf))
    assert (done.returncode, done.stderr) == (Exit.UNAVAILABLE, "")
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "slurmctld"]
    assert check["level"] == "FAIL"
    assert "Unable to contact slurm controller" in check["found"]


@pytest.mark.parametrize(("handler", "code"), [("default_int_handler", -2), ("SIG_IGN", 0)])
def test_ctrl_c_while_the_command_line_is_loaded_shows_no_traceback(run: Run, handler: str, code: int) -> None:
    script = f"""
import os, signal, sys
from fallow.__main__ import main
signal.signal(signal.SIGINT, signal.{handler})
class PressedNow:
    def find_spec(self, name, path=None, target=None):
        if name == "fallow.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, PressedNow())
sys.argv = ["fallow", "--version"]
main()
"""
    done = run([sys.executable, "-c", script])
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("words", "code", "says", "closed"),
    [
        (["--help"], Exit.IOERR, "No space left on device", Exit.OK),
        (["status", "--json"], Exit.UNAVAILABLE, "start one with: fallow daemon", Exit.UNAVAILABLE),
    ],
)
def test_output_that_nobody_takes_is_no_bug(run: Run, words: list[str], code: Exit, says: str, closed: Exit) -> None:
    """A full disk, an output that was closed, and a reader that is gone."""
    argv = [*FALLOW, *words]
    with open("/dev/full", "w") as disk:
        done = run(argv, disk, PYTHONUNBUFFERED="1")
    assert (done.returncode, done.stderr.count("\n"), says in done.stderr) == (code, 1, True)
    done = run(["sh", "-c", '"$@" >&-', "sh", *argv], PYTHONUNBUFFERED="1")
    assert (done.returncode, done.stderr) == (closed, "")
    done = run(["sh", "-c", '"$@" <&-', "sh", *FALLOW, "submit"])
    assert (done.returncode, "the batch script is empty" in done.stderr) == (Exit.DATA, True)
    done = run(["bash", "-c", '"$@" | true; exit ${PIPESTATUS[0]}', "bash", *FALLOW, "completion", "bash"])
    assert done.stderr == ""
    assert done.returncode in (0, Exit.IOERR)


def test_completion_completes(run: Run) -> None:
    script = "import sys; sys.argv = ['fallow']; from fallow.cli.main import main; main()"
    for words, count, shown in (("fallow sub", "1", "plain,submit"), ("fallow submit tr", "2", "file,tr")):
        asked = {"_FALLOW_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count}
        done = run([sys.executable, "-c", script], **asked)
        assert (done.returncode, done.stdout.strip()) == (0, shown)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_utf8_gets_escapes_and_no_traceback(run: Run, tmp_path: Path, encoding: str) -> None:
    state = str(tmp_path / "größe模")
    done = run([*FALLOW, "status", "--json"], encoding=encoding, PYTHONIOENCODING=encoding, FALLOW_STATE_DIR=state)
    said = done.stdout + done.stderr
    assert done.returncode == Exit.UNAVAILABLE, said
    assert r"\u6a21" in said
    assert "größe模" in json.loads(said)["error"]["message"]
