"""The stand-in head: a head that an agent starts on its node when the run's head is silent.

Without a head, a run that loses a member cannot go on, and a run that has finished does not end. The stand-in head uses
the state folder and the configuration of the silent head. The lease of the state folder and the store's term make sure
that only one head serves: if the other head lives, the stand-in head ends at once and the agent retries later.
"""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from fallow.files import append_private, last_words
from fallow.text import clean

log = logging.getLogger("fallow.agent")

TURN_S = 60.0
"""Time that each node of a job has to start a head before the next node tries."""
RETRY_S = (5.0, 60.0)
"""Wait after the first failed start, and the maximum wait."""
STOP_S = 25.0
"""Time from the request to end until the head is killed. The head first tells all agents of the job to end."""
_SITE_VARIABLES = ("SLURM_CONF",)
_JOB_PREFIXES = ("SLURM", "SBATCH_", "SRUN_", "FALLOW_", "CUDA_", "NOTIFY_SOCKET")


class StandIn:
    """Starts and ends the stand-in head of one agent.

    Args:
        state: state folder.
        address: address of this node, on which the head listens.
        after_s: start the head when no head was heard for this many seconds.
        log_file: path of the head's log.
        environ: environment of the agent.
        command: argv that starts a head, without the address.
    """

    def __init__(
        self,
        state: Path,
        address: str,
        after_s: float,
        log_file: Path,
        environ: Mapping[str, str] = os.environ,
        command: tuple[str, ...] = (sys.executable, "-Pm", "fallow.head", "--stand-in"),
    ) -> None:
        self._after_s = after_s + TURN_S * _place_in_job(environ)
        self._log_file = log_file
        self._argv = (*command, address)
        self._environ = {**head_environment(environ), "FALLOW_STATE_DIR": str(state)}
        self._process: subprocess.Popen[bytes] | None = None
        self._retry_s = RETRY_S[0]
        self._not_before = 0.0
        self._last_warning = ""

    @property
    def pid(self) -> int:
        """Process id of the head; 0: no head runs, as of the last `tend`."""
        return 0 if self._process is None else self._process.pid

    def tend(self, now: float, silent_s: float) -> None:
        """Start the head when no head was heard for `after_s` seconds, and notice its end.

        Args:
            now: monotonic time in seconds.
            silent_s: seconds since the last message from a head.
        """
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._note_end(now, self._process)
        if silent_s < self._after_s:
            self._retry_s, self._not_before = RETRY_S[0], 0.0
        elif now >= self._not_before:
            log.warning("no head was heard for %.0f s; a stand-in head is started on this node", silent_s)
            self._start(now)

    def _start(self, now: float) -> None:
        errors: BinaryIO | int = subprocess.DEVNULL
        with contextlib.ExitStack() as files:
            with contextlib.suppress(OSError):
                errors = files.enter_context(open(append_private(self._log_file), "ab"))
            # The head ends when its standard input is closed, so it ends with this agent in every case.
            try:
                self._process = subprocess.Popen(
                    self._argv,
                    env=self._environ,
                    stdin=subprocess.PIPE,
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                log.warning("%s", clean(f"the stand-in head cannot be started: {error}; retrying"))
                self._try_later(now)

    def _note_end(self, now: float, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            process.stdin.close()
        self._process = None
        self._try_later(now)
        last = clean(last_words(self._log_file))
        words = f"the stand-in head has ended with {process.returncode}: {last}; its log: {self._log_file}"
        if process.returncode and words != self._last_warning:
            log.warning("%s", words)
        self._last_warning = words

    def _try_later(self, now: float) -> None:
        self._not_before = now + self._retry_s
        self._retry_s = min(RETRY_S[1], 2 * self._retry_s)

    def stop(self) -> None:
        """Ask the head to end. It leaves its runs to the next head."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def head_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment for a head that is started inside a job: without the variables of the job."""
    return {
        name: value for name, value in environ.items() if name in _SITE_VARIABLES or not name.startswith(_JOB_PREFIXES)
    }


def _place_in_job(environ: Mapping[str, str]) -> int:
    text = environ.get("SLURM_PROCID", "")
    return int(text) if text.isdecimal() else 0
