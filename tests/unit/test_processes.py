"""What the kernel says of processes, whatever their names."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fallow.processes import find_process
from waiting import wait_for


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program with a name that looks like the end of its own name in proc(5)."""
    program = tmp_path / "a) Z 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "600"]) as process:
        yield process
        process.kill()


def test_a_process_is_known_by_its_parent_and_its_start(odd: subprocess.Popen[bytes]) -> None:
    found = find_process(odd.pid)
    assert found is not None
    assert (found.name, found.parent) == ("a) Z 1 (b", os.getpid())
    assert found.state in "RS"
    again = find_process(odd.pid)
    assert again is not None
    assert int(again.started) == int(found.started) > 0


def test_one_that_is_stopped_lives_and_one_that_nobody_has_waited_for_does_not(odd: subprocess.Popen[bytes]) -> None:
    odd.send_signal(signal.SIGSTOP)
    wait_for("it is stopped", lambda: (found := find_process(odd.pid)) is not None and found.state == "T")
    odd.kill()
    wait_for("it has ended", lambda: find_process(odd.pid) is None)
    assert odd.returncode is None, "nobody has"
    odd.wait()
    assert find_process(odd.pid) is None
