"""The asker's end of `pyslurm_child`: start it, ask it, and end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

import msgspec

from fallow import __version__
from fallow.model import ClusterState
from fallow.slurm.client import SlurmUnavailable
from fallow.slurm.process import query_environment
from fallow.slurm.pyslurm_child import LENGTH, REQUEST, Answer, Failed, Hello, Polled

_CHILD = (sys.executable, "-m", "fallow.slurm.pyslurm_child")

_STDERR_BYTES = 4096


class ChildDied(Exception):
    """The process has ended, or talks nonsense. The text says why, as far as it is known."""


class PyslurmProcess:
    """One child. Not to be used again after an error or when a call was broken off: its answers are out of step.

    Args:
        conf: the slurm.conf to use; None: what the environment says.
    """

    def __init__(self, conf: str | None) -> None:
        self._conf = conf
        self._process: asyncio.subprocess.Process | None = None
        self._errors: asyncio.Task[bytes] | None = None
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

    async def start(self) -> str:
        """Start it; returns pyslurm's version. The caller sets the deadline.

        Raises:
            ChildDied: it could not be started, pyslurm could not be imported, or it is of another version of Fallow.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *_CHILD,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=query_environment(self._conf),
                start_new_session=True,  # a Ctrl-C is for the head, which ends it in its own time
            )
        except OSError as error:
            raise ChildDied(f"{_CHILD[0]}: {error.strerror}") from error
        assert self._process.stderr is not None
        self._errors = asyncio.create_task(_tail(self._process.stderr))
        match await self._receive():
            case Hello(version, fallow) if fallow == __version__:
                return version
            case Hello(_, fallow):
                raise ChildDied(f"Fallow {fallow} is installed, and {__version__} runs here; restart the head")
            case other:
                raise ChildDied(f"began with {type(other).__name__}")

    async def poll(self) -> ClusterState:
        """One poll, on slurmctld's clock. The caller sets the deadline, and never asks twice at once.

        Raises:
            SlurmUnavailable: slurmctld did not answer, or said no.
            ChildDied: the process ended without an answer.
        """
        writer = self._running().stdin
        assert writer is not None
        # A broken pipe shows when the answer is read, with the reason.
        with contextlib.suppress(ConnectionError):
            writer.write(REQUEST)
            await writer.drain()
        match await self._receive():
            case Polled(state):
                return state
            case Failed(reason):
                raise SlurmUnavailable(f"pyslurm: {reason}; check slurmctld with `scontrol ping`")
            case other:
                raise ChildDied(f"answered with {type(other).__name__}")

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "start() comes first"
        return self._process

    async def _receive(self) -> Answer:
        reader = self._running().stdout
        assert reader is not None
        try:
            header = await reader.readexactly(LENGTH.size)
            return self._decoder.decode(await reader.readexactly(*LENGTH.unpack(header)))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ChildDied(await self._last_words()) from None
        except msgspec.MsgspecError as error:
            raise ChildDied(f"its answer cannot be read: {error}") from error

    async def _last_words(self) -> str:
        """Why it ended: what it said last, else how."""
        assert self._errors is not None
        code = await self._running().wait()
        lines = (await self._errors).decode(errors="replace").strip().splitlines()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{lines[-1].strip()} ({how})" if lines else how

    async def end(self) -> None:
        """Kill it and whatever it started; may be called at any time and again."""
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._errors is not None:
            self._errors.cancel()
        # asyncio closes the pipe only when its garbage is collected, which may be after the loop.
        if self._process.stdin is not None:
            self._process.stdin.close()


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end, so that its writer never blocks; returns the last of it."""
    kept = b""
    while part := await stream.read(_STDERR_BYTES):
        kept = (kept + part)[-_STDERR_BYTES:]
    return kept
