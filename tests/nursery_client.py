"""The tests' end of the nursery, see `elastic/nursery.py`."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

LONGEST = 1 << 20
MARK = "FALLOW_TEST_MARK"
OWN_MARK = f"tests-{os.getpid()}"
"""By this in their environment the processes that are started by this one's tests are found."""


class NurseryClient:
    """The tests' end of the nursery."""

    def __init__(self, log: Path) -> None:
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(300)
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
        where = {"out": str(log), "error": str(log), "namespace": namespace}
        pid: int = self._ask({"argv": argv, "environ": environ, "eggs": eggs, **where})["pid"]
        return pid

    def start_command(
        self, argv: list[str], environ: dict[str, str], folder: Path, out: Path, error: Path, **how: bool
    ) -> int:
        """Start `fallow ARGV` in that folder, or `python ARGV` with `script=True`; returns its process id.

        `out` and `error` are files for its output.
        """
        paths = {"folder": str(folder), "out": str(out), "error": str(error)}
        pid: int = self._ask({"argv": argv, "environ": environ, **paths, **how})["pid"]
        return pid

    @contextlib.contextmanager
    def forks_for_asyncio(self) -> Iterator[None]:
        """Inside, agents and heads that this process starts by `asyncio.create_subprocess_exec` are forks."""
        usual = asyncio.create_subprocess_exec

        async def start(*command: Any, env: Any = None, stdout: Any = None, stderr: Any = None, **options: Any) -> Any:
            if command[1:3] not in (("-Pm", "fallow.agent"), ("-Pm", "fallow.head")):
                return await usual(*command, env=env, stdout=stdout, stderr=stderr, **options)
            out, error = (name_of(given, number) for given, number in ((stdout, 1), (stderr, 2)))
            kind: dict[str, Any] = {"head": True} if command[2] == "fallow.head" else {"eggs": 2}
            here = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"
            if os.readlink(here) != os.readlink(f"/proc/{self.pid}/ns/net"):
                kind["namespace"] = here
            request = {"argv": command[3:], "environ": dict(env), "out": out, "error": error, **kind}
            return Forked(self, self._ask(request)["pid"])

        with mock.patch("asyncio.create_subprocess_exec", start):
            yield

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
        self._process.wait(180)


def name_of(stream: Any, usual: int) -> str:
    """The path of an output: a file, a descriptor of this process, or None for its usual one."""
    if stream is not None and not isinstance(stream, int):
        return str(stream.name)  # it may be closed before the fork opens it
    return f"/proc/{os.getpid()}/fd/{usual if stream is None else stream}"


class Forked:
    """The part of `asyncio.subprocess.Process` that is used of heads and agents."""

    def __init__(self, nursery: NurseryClient, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery

    @property
    def returncode(self) -> int | None:
        return self._nursery.exit_code(self.pid)

    async def wait(self) -> int:
        while (code := self.returncode) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
