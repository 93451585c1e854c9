"""The tests' end of the nursery, see `elastic/nursery.py`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

LONGEST = 1 << 20
MARK = "FALLOW_TEST_MARK"
OWN_MARK = f"tests-{os.getpid()}"
"""By this in their environment the processes that are started by this one's tests are found."""


class NurseryClient:
    """The tests' end of the nursery."""

    def __init__(self, log: Path) -> None:
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(60)
        with its, log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "elastic" / "nursery.py"), str(its.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: OWN_MARK},
                pass_fds=(its.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=errors,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(
        self, argv: list[str], environ: dict[str, str], log: Path, eggs: int = 1, namespace: str | None = None
    ) -> int:
        """Start an agent, in another network namespace than this process's if one is named; returns its process id."""
        request = {"argv": argv, "environ": environ, "log": str(log), "eggs": eggs, "namespace": namespace}
        pid: int = self._ask(request)["pid"]
        return pid

    def start_local(self, argv: list[str], environ: dict[str, str], folder: Path, out: Path, error: Path) -> int:
        """Start `fallow ARGV` in that folder, with those files for its output; returns its process id."""
        paths = {"folder": str(folder), "out": str(out), "error": str(error)}
        pid: int = self._ask({"argv": argv, "environ": environ, **paths})["pid"]
        return pid

    def exit_code(self, pid: int) -> int | None:
        """How that agent ended (a signal as a negative number); None: it has not."""
        status = self._ask({})["ended"].get(str(pid))
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._socket.send(json.dumps(request).encode())
        answer: dict[str, Any] = json.loads(self._socket.recv(LONGEST))
        return answer

    def close(self) -> None:
        """End it, and with it whatever it started."""
        with contextlib.suppress(OSError):
            # Forks of this process (loader workers) may hold the socket too: closing it alone would tell nobody.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._process.wait(30)
