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
from fallow.processes import living

EXEC_FAILED = 127
_OF_SIGTERM = (signal.SIGTERM, 128 + signal.SIGTERM)
"Status of a process that has died of it, and of a shell whose command has."
_TOLD_BY_SHELLS = CRASHES | {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGKILL,
    signal.SIGPIPE,
    signal.SIGTERM,
}
"""Signals that an exit code above 128 stands for. Other such codes are the script's own choice."""
_PR_SET_CHILD_SUBREAPER = 36


def inherit_orphans() -> None:
    """Become the parent of descendants whose parent ends: how a worker ends is told to its parent alone."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(others: Collection[int]) -> None:
    """Let inherited processes that have ended go, up to the first one of `others`, whose end somebody else asks for."""
    with contextlib.suppress(ChildProcessError):
        while end := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if end.si_pid in others:
                return
            os.waitpid(end.si_pid, 0)


class WorkerProcess:
    """A started worker. Made in the main thread: the kernel kills a direct child with the *thread* that made it.

    It may be a shell, and the worker behind it. Slurm's SIGTERM goes to all processes of a step, and the shell dies of
    it at once. The worker does not: it leaves at the next step boundary, and only then has this process ended. The
    worker's end is the agent's to see then (`inherit_orphans`).

    Args:
        command: argv.
        environment: all of it but what names the descriptors.
        channel: its end of the socket; closed here.
        output: takes what it writes.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], channel: int, output: Pump) -> None:
        self.has_ended = False
        "and that was noticed (`poll`)"
        self.error = ""
        "why it could not be started"
        self._speaker, self._speaker_began = 0, ""
        "process that speaks for the worker, and when it began"
        self._status: int | None = None
        "exit code, or minus the signal, of the process that was started"
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
        """A process has spoken as this worker. As long as it lives, others that do are children of the script."""
        if pid != self._speaker and not self.speaker:
            found = living(pid)
            self._speaker, self._speaker_began = pid, "" if found is None else found.started

    @property
    def speaker(self) -> int:
        """The process that has spoken as this worker; 0: none has, or it has ended."""
        found = living(self._speaker)
        return self._speaker if found is not None and found.started == self._speaker_began else 0

    @property
    def pid(self) -> int:
        """0: it has none any more."""
        return 0 if self._process is None or self.has_ended else self._process.pid

    def poll(self) -> bool:
        """True when it has ended, once; then what it left behind in its session's group is killed, too."""
        if self.has_ended:
            return False
        if self._process is not None:
            # Looked at without reaping: while the zombie is there its number names nobody else's group.
            end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                return False
            status = None
            if end.si_status in _OF_SIGTERM and self._is_behind_shell:
                try:
                    ended, how = os.waitpid(self._speaker, os.WNOHANG)
                except ChildProcessError:  # the shell has seen its end, or another process has inherited it
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
    def waited_for(self) -> set[int]:
        """Processes whose end `poll` has not asked for yet."""
        return set() if self._process is None or self.has_ended else {self._process.pid, self._speaker}

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended; None: a signal has ended it."""
        return self._status if self.ended_by is None else None

    @property
    def ended_by(self) -> int | None:
        """The signal that has ended it, or the shell before it, whose exit code tells of the worker's signal."""
        status = self._status
        if status is None:
            return None
        if self._is_behind_shell and status - 128 in _TOLD_BY_SHELLS:
            return status - 128
        return -status if status < 0 else None

    @property
    def _is_behind_shell(self) -> bool:
        return self._process is not None and self._speaker not in (0, self._process.pid)

    def give_up(self, error: str) -> None:
        """Kill the process at its start. It counts as one that could not be started, for this reason."""
        self.error = self.error or error
        self.kill()

    @property
    def stopped(self) -> bool:
        """True while it is stopped (SIGSTOP); one that a debugger holds for a moment is not."""
        found = living(self.speaker or self.pid)
        return found is not None and found.state == "T"

    def kill(self) -> None:
        """SIGKILL to the worker and all that it started in its group."""
        if self._process is not None and not self.has_ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.send_signal(signal.SIGKILL)  # a shell may have given it a group of its own

    def send_signal(self, number: int) -> None:
        """Send a signal to the worker alone."""
        if pid := self.speaker or self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
