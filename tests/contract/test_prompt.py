"""What a careless user types at a prompt: one clear line on standard error, the documented exit code, no traceback.

Only what needs processes of its own is here; single commands are tried in `tests/unit/cli`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fallow.files import Paths
from fallow.model import Exit

DEADLINE_S = 60.0


class Prompt:
    """A shell prompt in a folder with no configuration and a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FALLOW_", "SLURM_"))}
        self.environ = {
            **kept,
            "FALLOW_STATE_DIR": str(folder / "state"),
            "FALLOW_SLURM__CLIENT": "none",
            "FALLOW_HEAD__ADDRESS": "127.0.0.1",
            "XDG_CONFIG_HOME": str(folder / "config"),
            "TMPDIR": str(folder),
        }

    def type(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "fallow.cli.main", *words],
            cwd=self.folder,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def refused(self, code: int, message: str, *words: str, **environ: str) -> None:
        """The command ends with `code` and says `message` in one line, and nothing else."""
        done = self.type(*words, **environ)
        assert done.returncode == code, done.stderr
        assert message in done.stderr
        assert done.stderr.startswith("fallow: ")
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stdout == ""


@pytest.fixture
def prompt(tmp_path: Path) -> Prompt:
    return Prompt(tmp_path)


@pytest.fixture
def head(prompt: Prompt) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "fallow.head"],
        env=prompt.environ,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline, pause = time.monotonic() + DEADLINE_S, threading.Event()
    try:
        while not Paths.default(prompt.environ).head_file.exists():
            assert time.monotonic() < deadline, "no head"
            pause.wait(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(timeout=180)


def test_a_head_is_not_started_with_a_configuration_that_is_wrong_or_not_there(prompt: Prompt) -> None:
    file = prompt.folder / "config.toml"
    prompt.refused(Exit.CONFIG, "no such file (FALLOW_CONFIG names it)", "daemon", FALLOW_CONFIG=str(file))
    file.write_text("[harvets]\n")
    prompt.refused(Exit.CONFIG, "[harvets] is not known; did you mean harvest?", "daemon", FALLOW_CONFIG=str(file))
    assert not (prompt.folder / "state" / "head.json").exists()


def test_a_run_that_nobody_knows_and_a_second_head(prompt: Prompt, head: subprocess.Popen[bytes]) -> None:
    for words in (["report", "some-run"], ["cancel", "some-run"]):
        prompt.refused(Exit.NOINPUT, "run some-run: no such run; `fallow status` lists them", *words)
    prompt.refused(Exit.CANTCREAT, f"another head (pid {head.pid} on ", "daemon")
    done = prompt.type("status", "some-run", "--json")
    assert json.loads(done.stdout)["error"]["code"] == done.returncode == Exit.NOINPUT


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's client commands")
def test_a_slurmctld_that_does_not_answer(prompt: Prompt) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    conf = prompt.folder / "slurm.conf"
    conf.write_text(
        f"ClusterName=gone\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort={port}\nAuthType=auth/none\n"
        "MessageTimeout=2\nNodeName=n1\nPartitionName=p Nodes=n1\n"
    )
    done = prompt.type("doctor", "--json", SLURM_CONF=str(conf))
    assert (done.returncode, done.stderr) == (Exit.UNAVAILABLE, "")
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "slurmctld"]
    assert check["level"] == "FAIL"
    assert "Unable to contact slurm controller" in check["found"]


@pytest.mark.parametrize(("handler", "code"), [("default_int_handler", -2), ("SIG_IGN", 0)])
def test_ctrl_c_while_the_command_line_is_loaded_shows_no_traceback(handler: str, code: int) -> None:
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("words", "full", "closed"),
    [
        (["--help"], (Exit.IOERR, "No space left on device"), Exit.OK),
        (["status", "--json"], (Exit.UNAVAILABLE, "start one with: fallow daemon"), Exit.UNAVAILABLE),
    ],
)
def test_output_that_nobody_takes_is_no_bug(
    prompt: Prompt, words: list[str], full: tuple[Exit, str], closed: Exit
) -> None:
    """A full disk, and an output that was closed."""
    fallow, environ = [sys.executable, "-m", "fallow.cli.main", *words], {**prompt.environ, "PYTHONUNBUFFERED": "1"}
    with open("/dev/full", "w") as disk:
        done = subprocess.run(fallow, stdout=disk, env=environ, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n"), full[1] in done.stderr) == (full[0], 1, True)
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *fallow], env=environ, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (closed, b"")


def test_a_reader_that_is_gone_is_no_bug() -> None:
    command = f"{sys.executable} -m fallow.cli.main completion bash | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert int(done.stdout) in (0, Exit.IOERR)


def test_completion_completes(prompt: Prompt) -> None:
    environ = prompt.environ | {"_FALLOW_COMPLETE": "bash_complete", "COMP_WORDS": "fallow sub", "COMP_CWORD": "1"}
    argv = [sys.executable, "-c", "import sys; sys.argv = ['fallow']; from fallow.cli.main import main; main()"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.split(",")[-1].strip() == "submit"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_utf8_gets_escapes_and_no_traceback(prompt: Prompt, encoding: str) -> None:
    environ = prompt.environ | {"PYTHONIOENCODING": encoding, "FALLOW_STATE_DIR": str(prompt.folder / "größe模")}
    argv = [sys.executable, "-m", "fallow", "status", "--json"]
    done = subprocess.run(argv, env=environ, capture_output=True, timeout=120, check=False)
    said = (done.stdout + done.stderr).decode(encoding)
    assert done.returncode == Exit.UNAVAILABLE, said
    assert r"\u6a21" in said
    assert "größe模" in json.loads(said)["error"]["message"]
