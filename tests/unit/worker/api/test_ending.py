"""How a script ends, and what is told of it whatever its texts hold."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fallow.core.membership.messages import Unreadable
from fallow.core.protocol import FromWorker, Status
from fallow.model import FallowError
from fallow.wire.codec import Decoder, encode
from fallow.worker.api.process import session_with_agent
from fallow.worker.api.run import Run
from scripted_agent import Agent

BEGIN = """
import atexit
import sys
from fallow.worker.api.process import Ending
def tell(*words):
    print(*words, flush=True)
class Run:
    def __init__(self, thing, released):
        self.thing, self.released = thing, released
    def _finish(self):
        tell("finished")
        return 0 if self.released else None
    def _report_failure(self, code, text, trace, signature):
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
    with pytest.raises(FallowError, match="without torchrun or another launcher"):
        session_with_agent("999")


def test_what_a_script_logs_and_how_it_fails_is_told_whatever_its_texts_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the run's folder
    agent = Agent()
    run = Run(agent.session, None)
    agent.order(is_main=True)
    run.log(**{"loss/caf\udce9": 1.0, "a\0b": 2.0, "n" * 10_000: 3.0})
    run._report_failure(
        1, "no file 'caf\udce9.txt'", "line\n\x1b[31mno file 'caf\udce9.txt'\x1b[0m\n", "OSError at caf\udce9.py:3"
    )
    told = Decoder[FromWorker](FromWorker).decode(encode(agent.status))
    assert isinstance(told, Status)
    assert list(told.progress.scalars) == ["loss/caf\\xe9", "a\\x00b", "n" * 199 + "…"]
    assert told.fault is not None
    assert told.fault.message == "no file 'caf\\xe9.txt'"
    assert told.fault.traceback == "line\nno file 'caf\\xe9.txt'\n"
    assert told.fault.signature == "OSError at caf\\xe9.py:3"


def test_a_message_that_is_not_unicode_cannot_be_sent() -> None:
    with pytest.raises(Unreadable, match="Status cannot be sent"):
        encode(Status(break_reason="caf\udce9"))


def test_a_worker_goes_on_to_speak_after_a_status_that_could_not_be_sent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = Agent(beat_s=0.02)
    send, refused = agent.send, list[object]()

    def refuse_once(message: FromWorker) -> None:
        if not refused:
            refused.append(message)
            raise Unreadable("Status cannot be sent")
        send(message)

    monkeypatch.setattr(agent, "send", refuse_once)
    agent.until(lambda _: bool(refused))
    beats = len(agent.statuses) + 2
    agent.until(lambda _: len(agent.statuses) >= beats)
    agent.session.close()
    assert "n0: Status cannot be sent" in capfd.readouterr().err
