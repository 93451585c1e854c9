"""What a careless user types: one clear line on standard error, the documented exit code, never a traceback.

Each case is a process of its own, as at a prompt. Cases of single commands that are cheaper to try in one process are
in `test_cli_main.py` and `test_submit.py`.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fallow.files import Paths, write_struct
from fallow.model import Exit, HeadFile

SCRIPT = "#!/bin/sh\n#SBATCH -A acc\n#FALLOW nodes=1:4\nfallow run -- python t.py\n"
DEADLINE_S = 60.0


class Prompt:
    """A shell prompt in a folder with a batch script, no configuration and a state folder of its own."""

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
        self.script("job.sh", SCRIPT)

    def script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

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

    @property
    def paths(self) -> Paths:
        return Paths.default(self.environ)


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
    try:
        wait(prompt.paths.head_file.exists)
        yield process
    finally:
        process.terminate()
        process.wait(timeout=180)


def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the wait was in vain"
        pause.wait(0.05)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["statsu"], Exit.USAGE, "No such command 'statsu'. Did you mean status?"),
        (["local", "--members", "2", "--", "no-such-command"], Exit.NOINPUT, "'no-such-command': not found"),
        (["submit", "job.sh"], Exit.UNAVAILABLE, "start one with: fallow daemon"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_word_too_many_or_too_few(prompt: Prompt, words: list[str], code: Exit, message: str) -> None:
    prompt.refused(code, message, *words)


def test_options_of_the_users_own_job_do_not_reach_harvest_jobs(prompt: Prompt) -> None:
    own = ["--dependency=afterok:7", "-w", "n[1-2]", "--constraint=ib"]
    # No Slurm that could refuse them.
    done = prompt.type("submit", "--dry-run", *own, "job.sh", PATH="/nowhere")
    assert done.returncode == 0
    base, harvest = (line for line in done.stdout.splitlines() if line.startswith("sbatch "))
    for option in ("--dependency=afterok:7", "--nodelist=n[1-2]"):
        name = option.partition("=")[0]
        assert option in base.replace("'", "")
        assert name not in harvest
    assert "--constraint=ib" in base
    assert "--constraint=ib" in harvest, "what a node must have holds for every node"
    assert "--nodelist holds for the base job alone" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[harvets]\n", "[harvets] is not known; did you mean harvest?"),
        ("[membership]\nlease_s = 'long'\n", "lease_s"),
    ],
)
@pytest.mark.parametrize("words", [["daemon"], ["submit", "job.sh"]], ids=" ".join)
def test_a_wrong_configuration(prompt: Prompt, words: list[str], text: str, message: str) -> None:
    file = prompt.folder / "config.toml"
    file.write_text(text)
    prompt.refused(Exit.CONFIG, message, *words, FALLOW_CONFIG=str(file))
    assert not (prompt.folder / "state" / "head.json").exists()


@pytest.mark.parametrize("words", [["daemon"], ["status"], ["events", "--follow"]], ids=" ".join)
def test_a_configuration_that_is_not_there(prompt: Prompt, words: list[str]) -> None:
    prompt.refused(Exit.CONFIG, "no such file (FALLOW_CONFIG names it)", *words, FALLOW_CONFIG="/no/such.toml")


def test_a_run_that_nobody_knows_and_a_second_head(prompt: Prompt, head: subprocess.Popen[bytes]) -> None:
    for words in (["status", "some-run"], ["report", "some-run"], ["cancel", "some-run"], ["events", "some-run"]):
        prompt.refused(Exit.NOINPUT, "run some-run: no such run; `fallow status` lists them", *words)
    prompt.refused(Exit.CANTCREAT, f"another head (pid {head.pid} on ", "daemon")
    done = prompt.type("status", "some-run", "--json")
    assert json.loads(done.stdout)["error"]["code"] == done.returncode == Exit.NOINPUT


def test_a_head_that_is_gone(prompt: Prompt) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=180)
    paths = prompt.paths.create()
    known = HeadFile(
        version="0",
        host=socket.gethostname(),
        pid=dead.pid,
        term=1,
        endpoint="tcp://127.0.0.1:1",
        public_key="k",
        control=str(paths.control),
        started_at=0.0,
    )
    write_struct(paths.head_file, known)
    advice = f"(pid {dead.pid} on {known.host}) is gone; start one with: fallow daemon"
    for words in (["status"], ["submit", "job.sh"], ["grow", "some-run"]):
        prompt.refused(Exit.UNAVAILABLE, advice, *words)
    paths.runtime.rmdir()


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
    began = time.monotonic()
    done = prompt.type("doctor", "--json", SLURM_CONF=str(conf))
    assert time.monotonic() - began < DEADLINE_S
    assert done.returncode == Exit.UNAVAILABLE
    assert done.stderr == ""
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "slurmctld"]
    assert check["level"] == "FAIL"
    assert "Unable to contact slurm controller" in check["found"]
