"""Two hosts whose locks do not meet: the second head is refused, and one that stood still gives way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fallow.control.client import call
from fallow.files import Paths, read_struct
from fallow.model import Exit, HeadFile, RunSpec, Snapshot

PATIENCE_S = 120.0

HEAD = """
import errno, fcntl, os, sys
from fallow.head.state import lease
from fallow.head import main
if sys.argv[2] == "none":
    def flock(*_): raise OSError(errno.ENOTSUP, "Operation not supported")
else:
    def flock(*_): pass
fcntl.flock = flock
lease.this_place = lambda: sys.argv[1]
from fallow.model import FallowError
try:
    sys.exit(main.main())
except FallowError as error:
    sys.stderr.write(f"fallow daemon: {error.message}\\n")
    sys.exit(error.code)
"""


class Hosts:
    """Heads of one state folder, each with the runtime folder of a host of its own."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.folder, self._runtime = folder, runtime
        self.heads: list[subprocess.Popen[str]] = []

    def paths(self, host: str) -> Paths:
        return Paths.default(self.environ(host))

    def environ(self, host: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FALLOW_", "SLURM_"))}
        runtime = self._runtime / host
        runtime.mkdir(mode=0o700, exist_ok=True)
        return {
            **kept,
            "FALLOW_STATE_DIR": str(self.folder / "state"),
            "XDG_RUNTIME_DIR": str(runtime),
            "XDG_CONFIG_HOME": str(runtime),
            "FALLOW_SLURM__CLIENT": "none",
            "FALLOW_HEAD__ADDRESS": "127.0.0.1",
        }

    def start(self, host: str, locks: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HEAD, host, locks]
        head = subprocess.Popen(words, env=self.environ(host), stderr=subprocess.PIPE, text=True)
        self.heads.append(head)
        return head

    def serves(self, head: subprocess.Popen[str]) -> bool:
        try:
            return read_struct(self.folder / "state" / "head.json", HeadFile).pid == head.pid
        except FileNotFoundError:
            return False


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    # Short: sockets are in it.
    with tempfile.TemporaryDirectory(prefix="fh-", dir="/tmp", ignore_cleanup_errors=True) as runtime:
        made = Hosts(tmp_path, Path(runtime))
        yield made
        for head in made.heads:
            if head.poll() is None:
                head.send_signal(signal.SIGCONT)
                head.kill()
                head.communicate(timeout=PATIENCE_S)


def until(fulfilled: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not fulfilled():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


def test_a_second_head_is_refused_by_name_and_one_that_was_replaced_ends(hosts: Hosts) -> None:
    """The file system's locks are each host's own on one, and none at all on the other."""
    first = hosts.start("login1", "unshared")
    until(lambda: hosts.serves(first), "the first head serves")
    second = hosts.start("login2", "none")
    said = second.communicate(timeout=PATIENCE_S)[1]
    assert second.returncode == Exit.CANTCREAT
    assert f"another head (pid {first.pid} on {os.uname().nodename}) serves {hosts.folder}/state" in said
    assert not (hosts.paths("login2").runtime / "redis.sock").exists(), "its store was never started"

    first.send_signal(signal.SIGSTOP)
    third = hosts.start("login2", "none")
    until(lambda: hosts.serves(third), "the head of the other host takes over")
    spec = RunSpec(run="", name="kept", min_nodes=1, max_nodes=1)
    call(hosts.folder / "state" / "head.json", "create_run", spec=spec)
    first.send_signal(signal.SIGCONT)
    said = first.communicate(timeout=PATIENCE_S)[1]
    assert first.returncode == Exit.CANTCREAT
    assert f"(pid {third.pid}) has taken over" in said
    third.send_signal(signal.SIGTERM)
    third.communicate(timeout=PATIENCE_S)
    assert third.returncode == 0

    last = hosts.start("login1", "unshared")
    until(lambda: hosts.serves(last), "a head serves again")
    snapshot = call(hosts.folder / "state" / "head.json", "status", Snapshot)
    assert [run.name for run in snapshot.runs] == ["kept"]
    assert snapshot.head.term == 3
