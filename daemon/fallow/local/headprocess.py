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
"""Seconds for the head to stop in order. A head that is killed leaves its store running."""
_PR_SET_PDEATHSIG = 1

_prctl = ctypes.CDLL(None).prctl
"""Loaded at import, since nothing should be loaded between fork and exec."""


class HeadProcess:
    """One head over one state folder.

    Args:
        paths: paths of the state folder.
        environ: environment of the head. FALLOW_STATE_DIR is added.
        log: file for the head's output.
    """

    def __init__(self, paths: Paths, environ: Mapping[str, str], log: Path) -> None:
        self.paths = paths
        self.log = log
        self.environ = {**environ, "FALLOW_STATE_DIR": str(paths.state)}
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    def private(cls, folder: Path, environ: Mapping[str, str]) -> "HeadProcess":
        """A head that keeps all its files in `folder`, serves this host only, and has no settings but `environ`."""
        config = folder / "config.toml"
        config.touch(mode=0o600)
        private_settings = {
            "FALLOW_STATE_DIR": str(folder / "state"),
            "XDG_RUNTIME_DIR": str(folder),
            "FALLOW_CONFIG": str(config),
        }
        environ = {**environ, **private_settings, "FALLOW_HEAD__ADDRESS": "127.0.0.1"}
        return cls(Paths.default(environ).create(), environ, folder / "head.log")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> ControlClient:
        """Start the head and wait until it answers.

        Raises:
            FallowError: the head ended or did not answer in time. The message has the last lines of its log.
        """
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-Pm", "fallow.head"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environ,
                start_new_session=True,
                # When this process ends, in whatever way, the head gets SIGTERM and ends in order, with its store.
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
        last_lines = self.log.read_text(errors="replace").strip().splitlines()[-3:]
        raise FallowError("the head did not start: " + " | ".join(last_lines), Exit.UNAVAILABLE)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self.is_running:
            os.kill(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after a deadline."""
        if self._process is None:
            return
        if self.is_running:
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
