"""One worker's process: started with an inherited socket to its agent, killed with everything it started."""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence

from fallow.agent.launch import CHANNEL, with_python
from fallow.agent.output import Pump
from fallow.core.membership.failures import CRASHES
from fallow.model import OUTPUT_PIPES
from fallow.processes import find_process

EXEC_FAILED = 127
_OF_SIGTERM = (signal.SIGTERM, 128 + signal.SIGTERM)
"Status of a process that died of SIGTERM, and of a shell whose command did."
_SHELL_SIGNALS = CRASHES | {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGKILL,
    signal.SIGPIPE,
    signal.SIGTERM,
}
"""Signals for which a shell exits with 128 + signal. Other codes above 128 are the script's own."""
_PR_SET_CHILD_SUBREAPER = 36


def inherit_orphans() -> None:
    """Become the parent of orphaned descendants. Only its parent learns the exit status of a worker."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(awaited_pids: Collection[int]) -> None:
    """Reap inherited processes that have ended, up to the first of `awaited_pids`: other code asks for those ends."""
    with contextlib.suppress(ChildProcessError):
        while end := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if end.si_pid in awaited_pids:
                return
            os.waitpid(end.si_pid, 0)


class WorkerProcess:
    """The process of a worker. Create it in the main thread: the kernel kills a child with the *thread* that made it.

    The process may be a shell with the worker as its child. Slurm's SIGTERM goes to all processes of a step, and the
    shell dies of it at once. The worker goes on until the next step boundary, and only then does this class report the
    end. The agent then reaps the worker itself (`inherit_orphans`).

    Args:
        command: argv.
        environment: environment, without the variables that name the descriptors.
        channel: descriptor of the worker's end of the socket; closed here.
        output: reads the output of the process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], channel: int, output: Pump) -> None:
        self.has_ended = False
        "the process has ended and `poll` has noticed it"
        self.error = ""
        "reason why the process could not be started; empty: it was started"
        self._speaker, self._speaker_began = 0, ""
        "process that sends the worker's messages, and its start time"
        self._status: int | None = None
        "exit code, or minus the signal, of the process; None: it runs"
        self._process: subprocess.Popen[bytes] | None = None
        pipes = " ".join(str(os.fstat(end).st_ino) for end in output.ends)
        try:
            self._process = subprocess.Popen(
                list(command),
                env={**environment, CHANNEL: str(channel), OUTPUT_PIPES: pipes},
                pass_fds=(channel,),
                stdin=subprocess.DEVNULL,
                stdout=output.ends[0],
                stderr=output.ends[1],
                start_new_session=True,
            )
        except OSError as error:
            self._status = EXEC_FAILED
            self.error = f"{command[0]}: cannot be started ({error.strerror}){with_python(command[0])}"
        finally:
            os.close(channel)

    def note_speaker(self, pid: int) -> None:
        """Note the sender of the worker's messages. While it lives, other senders are children of the script."""
        if pid != self._speaker and not self.speaker:
            process = find_process(pid)
            self._speaker, self._speaker_began = pid, "" if process is None else process.started

    @property
    def speaker(self) -> int:
        """Id of the process that sends the worker's messages; 0: no message yet, or the process has ended."""
        process = find_process(self._speaker)
        return self._speaker if process is not None and process.started == self._speaker_began else 0

    @property
    def pid(self) -> int:
        """Process id; 0: the process has ended."""
        return 0 if self._process is None or self.has_ended else self._process.pid

    def poll(self) -> bool:
        """Return True once, when the worker has ended. Also kill what remains of its process group."""
        if self.has_ended:
            return False
        if self._process is not None:
            # Look without reaping: while the zombie exists, no other process group can have its number.
            end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                return False
            status = None
            if end.si_status in _OF_SIGTERM and self._is_behind_shell:
                try:
                    ended, how = os.waitpid(self._speaker, os.WNOHANG)
                except ChildProcessError:  # the shell or another process has reaped it
                    if self.speaker:
                        return False
                else:
                    if not ended:
                        return False
                    status = os.waitstatus_to_exitcode(how)
            self.kill()
            own = self._process.wait()
            self._status = EXEC_FAILED if self.error else own if status is None else status
        self.has_ended = True
        return True

    @property
    def awaited_pids(self) -> set[int]:
        """Ids of the processes that `poll` has still to reap."""
        return set() if self._process is None or self.has_ended else {self._process.pid, self._speaker}

    @property
    def code(self) -> int | None:
        """Exit code; None: the worker runs, or a signal has ended it."""
        return self._status if self.ended_by is None else None

    @property
    def ended_by(self) -> int | None:
        """Signal that ended the worker, also if a shell reports it as 128 + signal; None: no signal."""
        status = self._status
        if status is None:
            return None
        if self._is_behind_shell and status - 128 in _SHELL_SIGNALS:
            return status - 128
        return -status if status < 0 else None

    @property
    def _is_behind_shell(self) -> bool:
        return self._process is not None and self._speaker not in (0, self._process.pid)

    def give_up(self, error: str) -> None:
        """Kill the process at its start. It counts as a process that could not be started because of `error`."""
        self.error = self.error or error
        self.kill()

    @property
    def is_stopped(self) -> bool:
        """True while the process is stopped (SIGSTOP). A process that a debugger traces is not."""
        process = find_process(self.speaker or self.pid)
        return process is not None and process.state == "T"

    def kill(self) -> None:
        """Send SIGKILL to the worker and its process group."""
        if self._process is not None and not self.has_ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.send_signal(signal.SIGKILL)  # a shell may have given it a group of its own

    def send_signal(self, number: int) -> None:
        """Send a signal to the worker alone."""
        if pid := self.speaker or self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
