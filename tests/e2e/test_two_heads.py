"""Two hosts: the second head is refused, and one that stood still gives way."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fallow.control.client import call
from fallow.files import read_struct
from fallow.model import Exit, HeadFile, RunSpec, Snapshot
from waiting import wait_for

PATIENCE_S = 120.0

# Whoever stood still looks at its lease late: nothing may have happened before.
HEAD = """
import sys
import time
from fallow.head.state import lease
from fallow.head import main
lease.this_place = lambda: sys.argv[1]
renew, looked_at = lease.Lease.renew, time.monotonic()
def renew_late(self):
    global looked_at
    if time.monotonic() - looked_at > lease.VALID_S:
        time.sleep(3)
    looked_at = time.monotonic()
    renew(self)
lease.Lease.renew = renew_late
from fallow.model import FallowError
try:
    sys.exit(main.main())
except FallowError as error:
    sys.stderr.write(f"fallow daemon: {error.message}\\n")
    sys.exit(error.code)
"""

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts heads of one state folder, each with the runtime folder of the host that is named."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FALLOW_", "SLURM_"))}
    ours = {"FALLOW_STATE_DIR": str(tmp_path), "FALLOW_SLURM__CLIENT": "none", "FALLOW_HEAD__ADDRESS": "127.0.0.1"}
    heads: list[subprocess.Popen[str]] = []

    def start(host: str) -> subprocess.Popen[str]:
        own = Path(runtime, host)
        own.mkdir(mode=0o700, exist_ok=True)
        environ = {**kept, **ours, "XDG_RUNTIME_DIR": str(own), "XDG_CONFIG_HOME": str(own)}
        words = [sys.executable, "-c", HEAD, host]
        heads.append(subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True))
        return heads[-1]

    # Short: sockets are in it.
    with tempfile.TemporaryDirectory(prefix="fh-", dir="/tmp", ignore_cleanup_errors=True) as runtime:
        yield start
        for head in heads:
            if head.poll() is None:
                head.kill()
                head.communicate(timeout=PATIENCE_S)


def test_a_second_head_is_refused_by_name_and_one_that_was_replaced_ends(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "head.json"

    def serving(host: str) -> subprocess.Popen[str]:
        head = start(host)
        wait_for(f"{host} serves", lambda: file.exists() and read_struct(file, HeadFile).pid == head.pid)
        return head

    first = serving("login1")
    second = start("login2")
    said = second.communicate(timeout=PATIENCE_S)[1]
    assert second.returncode == Exit.CANTCREAT
    assert f"another head (pid {first.pid} on {os.uname().nodename}) serves {tmp_path}" in said

    first.send_signal(signal.SIGSTOP)
    third = serving("login2")
    call(file, "create_run", spec=RunSpec(run="", name="kept", min_nodes=1, max_nodes=1))
    first.send_signal(signal.SIGCONT)
    said = first.communicate(timeout=PATIENCE_S)[1]
    assert first.returncode == Exit.CANTCREAT, said
    assert f"(pid {third.pid}) has taken over" in said
    third.send_signal(signal.SIGTERM)
    third.communicate(timeout=PATIENCE_S)
    assert third.returncode == 0

    serving("login1")
    snapshot = call(file, "status", Snapshot)
    assert [run.name for run in snapshot.runs] == ["kept"]
    assert snapshot.head.term == 3
