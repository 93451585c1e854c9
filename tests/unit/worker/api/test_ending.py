"""A process ends with the code that its script wants: in one of its own, since it is about the interpreter's end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fallow.model import FallowError
from fallow.worker.api.process import session_with_agent

BEGIN = """
import atexit
import sys
from fallow.worker.api.process import Ending
def tell(*words):
    print(*words, flush=True)
class Run:
    def __init__(self, thing, released):
        self.thing, self.released = thing, released
    def _finished(self):
        tell("finished")
        return 0 if self.released else None
    def _failed(self, code, text, trace, signature):
        tell("failed", code, text)
    def _advice(self, error):
        return ""
    def _ends_at_once(self):
        return True
def init(thing=None, released=False):
    Ending(Run(thing, released))
"""

FORMS = {
    "init(); raise SystemExit(3)": (3, "finished"),
    "from sys import exit as leave; init(); leave(5)": (5, "finished"),
    "init()\ntry:\n    sys.exit(7)\nexcept SystemExit as error:\n    assert error.code == 7": (0, "finished"),
    "init(); atexit.register(lambda: tell('mine')); sys.exit(6)": (6, "mine/finished"),
    "class Left:\n    def __del__(self):\n        tell('torn down')\nleft = Left()\ninit(left); sys.exit(8)": (
        8,
        "finished",
    ),
    "init(released=True); sys.exit(9)": (0, "finished"),
    "init(); raise KeyError('x')": (1, "failed 1 KeyError: 'x'"),
    "init(); sys.excepthook = lambda *_: None; raise KeyError('x')": (1, "failed 1 KeyError: 'x'"),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_end_is_told_with_its_own_code(form: str, tmp_path: Path) -> None:
    code, told = FORMS[form]
    script = tmp_path / "train.py"
    script.write_text(f"{BEGIN}\n{form}\n")
    environ = {**os.environ, "FALLOW_WORKER": "n0"}
    done = subprocess.run(
        [sys.executable, script], env=environ, capture_output=True, text=True, timeout=180, check=False
    )
    assert (done.returncode, done.stdout.split("\n")) == (code, [*told.split("/"), ""]), done.stderr


def test_a_worker_whose_agent_is_killed_is_killed_also_behind_a_shell() -> None:
    """It holds a GPU, and nobody else would end it: the kernel kills direct children only."""
    ours, theirs = socket.socketpair()
    code = """
import os, sys
from fallow.worker.api.process import session_with_agent
from fallow.worker.session.session import Session
Session._on_end = lambda *_: os._exit(1)  # as a script that hears of it and fails
session_with_agent(sys.argv[1]).open()
"""
    with theirs:
        command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", code, str(theirs.fileno())]
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    ours.close()
    assert worker.wait(180.0) == 128 + signal.SIGKILL


def test_a_launcher_between_the_agent_and_the_script_is_named_as_what_may_be_wrong() -> None:
    """torchrun closes what its workers inherit."""
    with pytest.raises(FallowError, match="If torchrun or the like stands between"):
        session_with_agent("999")
