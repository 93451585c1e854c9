"""A prompt: commands typed in this process and what they print, and batch scripts."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fallow.cli.main import invoke


class Printed(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Fallow = Callable[..., Printed]


@pytest.fixture
def fallow(capsys: pytest.CaptureFixture[str]) -> Fallow:
    """Runs `fallow WORDS` in this process."""

    def run(*words: str) -> Printed:
        capsys.readouterr()
        code = invoke(words)
        return Printed(code, *capsys.readouterr())

    return run


def write_command(folder: Path, name: str, text: str) -> Path:
    """Make a program of that name: of the shell, unless its first line says otherwise."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def as_a_batch_script(argv: list[str], folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a batch script to its end; what it leaves behind is told to end then, as Slurm does."""
    with subprocess.Popen(
        argv,
        env=environ,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a fake scancel signals the whole group, as Slurm does
    ) as process:
        returncode = process.wait(180)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
        stdout, stderr = process.communicate(timeout=180)
    return subprocess.CompletedProcess(argv, returncode, stdout, stderr)
