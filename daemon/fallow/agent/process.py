"""One worker's process: started with its secret in an inherited pipe, killed with everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fallow.agent.output import LogFile, Pump
from fallow.model import OUTPUT_PIPES, STACK_SIGNAL, WorkerSecret

EXEC_FAILED = 127


def with_python(program: str) -> str:
    """What to do where it cannot be started, to be added to the reason: a Python script is no program by itself."""
    return f"; for a Python script: python {program}" if program.endswith(".py") else ""


class WorkerProcess:
    """A started worker. Made in the main thread: a worker asks the kernel to die with the *thread* that made it."""

    def __init__(
        self,
        worker: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        secret: WorkerSecret,
        log: Path,
        *,
        shown: bool,
        relays: bool = False,
    ) -> None:
        self.worker = worker
        self.code: int | None = None
        self.signal: int | None = None
        self.ended = False
        self._error = ""
        self._pump: Pump | None = None
        self._process: subprocess.Popen[bytes] | None = None
        channel = _pipe_with(msgspec.msgpack.encode(secret))
        out_read, out_write = os.pipe()
        error_read, error_write = os.pipe()
        pipes = " ".join(str(os.fstat(end).st_ino) for end in (out_write, error_write))
        try:
            self._process = subprocess.Popen(
                list(command),
                env={**environment, "FALLOW_CHANNEL_FD": str(channel), OUTPUT_PIPES: pipes},
                pass_fds=(channel,),
                stdin=subprocess.DEVNULL,
                stdout=out_write,
                stderr=error_write,
                start_new_session=True,
            )
        except OSError as error:
            self.ended, self.code = True, EXEC_FAILED
            self._error = f"{command[0]}: cannot be started ({error.strerror}){with_python(command[0])}"
        finally:
            for descriptor in (channel, out_write, error_write):
                os.close(descriptor)
        self._pump = Pump(worker, out_read, error_read, LogFile(log), shown=shown)
        self._pump.relays = relays
        self._pump.start()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def poll(self) -> bool:
        """True when it has ended; then what it left behind in its session's group is killed, too."""
        if self._process is None or self.ended:
            return self.ended
        # Looked at without reaping: while the zombie is there its number names nobody else's group.
        if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.kill()
        status = self._process.wait()
        self.ended = True
        self.code, self.signal = (status, None) if status >= 0 else (None, -status)
        return True

    @property
    def stopped(self) -> bool:
        """True while it is stopped (SIGSTOP); one that a debugger holds for a moment is not."""
        if self._process is None or self.ended:
            return False
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text(errors="replace")
        except OSError:
            return False
        # The name may hold spaces and parentheses; the state follows the last one.
        return text.rpartition(")")[2].split()[:1] == ["T"]

    def tell_stack(self) -> None:
        """Have it write its training thread's stack to its standard error, if it still can."""
        if self._process is not None and not self.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._process.pid, STACK_SIGNAL)

    def warn(self) -> None:
        """SIGTERM: Slurm takes this node, and no head is there to release the worker."""
        if self._process is not None and not self.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the worker and all that it started in its group."""
        if self._process is not None and not self.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def show(self, shown: bool) -> None:
        """Copy its output to ours from now on, or no more."""
        if self._pump is not None:
            self._pump.shown = shown

    def drain(self, within_s: float) -> None:
        """After its end: wait until its output is read."""
        if self._pump is not None:
            self._pump.finish()
            self._pump.join(within_s)

    def tail(self) -> str:
        """The last lines of its standard error, or why it could not be started."""
        return self._error or (self._pump.tail() if self._pump is not None else "")


def _pipe_with(data: bytes) -> int:
    """Read end of a pipe that holds `data` and then its end. Far below a pipe's capacity, so writing never waits."""
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, data)
    finally:
        os.close(write_end)
    return read_end
