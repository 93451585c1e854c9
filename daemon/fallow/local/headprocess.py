"""A head as a child process: started, killed on purpose, started again, stopped."""

import asyncio
import contextlib
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from fallow.control.client import ControlClient
from fallow.files import Paths
from fallow.model import Exit, FallowError

START_S = 120.0
STOP_S = 60.0
"""A head that is killed leaves its store behind."""
_PR_SET_PDEATHSIG = 1

_prctl = ctypes.CDLL(None).prctl
"""Looked up here, since between fork and exec nothing should be loaded."""


class HeadProcess:
    """One head over one state folder.

    Args:
        paths: of the state folder.
        environ: its environment; FALLOW_STATE_DIR is set here.
        log: file that takes its standard error.
    """

    def __init__(self, paths: Paths, environ: Mapping[str, str], log: Path) -> None:
        self.paths = paths
        self.log = log
        self.environ = {**environ, "FALLOW_STATE_DIR": str(paths.state)}
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    def private(cls, folder: Path, environ: Mapping[str, str]) -> "HeadProcess":
        """One that keeps all that it has in a private folder, is found on this host only, and follows no settings but
        those of its environment."""
        config = folder / "config.toml"
        config.touch(mode=0o600)
        own = {"FALLOW_STATE_DIR": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder), "FALLOW_CONFIG": str(config)}
        environ = {**environ, **own, "FALLOW_HEAD__ADDRESS": "127.0.0.1"}
        return cls(Paths.default(environ).create(), environ, folder / "head.log")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> ControlClient:
        """Start it and wait until it answers.

        Raises:
            FallowError: it ended, or did not answer in time; its last words are in the message.
        """
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-Pm", "fallow.head"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environ,
                start_new_session=True,
                # However the process that started it ends, the head ends in order, and its store with it.
                preexec_fn=functools.partial(_prctl, _PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        try:
            return await self._wait_for_answer(self._process)
        except BaseException:
            await self.stop()
            raise

    async def _wait_for_answer(self, process: asyncio.subprocess.Process) -> ControlClient:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while process.returncode is None:
                    with contextlib.suppress(FallowError):
                        client = await ControlClient.connect(self.paths.head_file)
                        snapshot = await client.call("status")
                        if snapshot["head"]["pid"] == process.pid:
                            return client
                        await client.aclose()
                    await asyncio.sleep(0.05)
        last = self.log.read_text(errors="replace").strip().splitlines()[-3:]
        raise FallowError("the head did not start: " + " | ".join(last), Exit.UNAVAILABLE)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self.running:
            os.kill(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after a deadline."""
        if self._process is None:
            return
        if self.running:
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
