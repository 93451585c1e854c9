"""Run one of Slurm's commands: argument list, clean environment, and a deadline."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fallow.core.checks.devices import VARIABLES
from fallow.model import FallowError
from fallow.threads import FILES_S, FileCalls

# Everything of an outer job or of the user's defaults for these commands: SLURM_*, SLURMD_*, SQUEUE_FORMAT ...
_FOREIGN = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SQUEUE", "SINFO", "SCANCEL", "SCONTROL", "PMI")

NO_FOLDER = 125
"Exit code of env(1) if env itself fails."

NOT_BEGUN = 126
"Exit code of shells for a command that cannot be run; here for a command that did not begin in time."


_programs = FileCalls()  # not a head's: commands without a head call Slurm, too


@dataclass(frozen=True)
class CommandResult:
    """How a command ended. `code` is None if the command was killed at the deadline."""

    code: int | None
    stdout: str
    stderr: str


def job_environment(captured: Mapping[str, str], conf: str | None) -> dict[str, str]:
    """Environment that a job starts from: the captured one, without the variables of another job.

    A leaking SLURM_NTASKS or SLURM_MEM_PER_NODE makes the job's own srun fail.
    """
    environment = {
        name: value for name, value in captured.items() if not name.startswith(_FOREIGN) and name not in VARIABLES
    }
    return environment | ({"SLURM_CONF": conf} if conf else {})


def query_environment(conf: str | None) -> dict[str, str]:
    """Environment for commands whose output we read: no locale, times as Unix seconds.

    TZ is for a version that ignores SLURM_TIME_FORMAT: its ISO times are then in UTC, and unambiguous when clocks are
    set back.
    """
    return job_environment(os.environ, conf) | {"LC_ALL": "C", "TZ": "UTC", "SLURM_TIME_FORMAT": "%s"}


async def run(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    stdin: str = "",
    cwd: Path | None = None,
    umask: int = -1,
    begin_s: float | None = None,
) -> CommandResult:
    """Run a command to its end, or kill it with all its children at the deadline or when this task is cancelled.

    Args:
        begin_s: seconds within which the command must write a line, which is discarded; None: no such line.

    Returns:
        The result. Its code is `NO_FOLDER` if `cwd` cannot be entered, and `NOT_BEGUN` if the first line is late.

    Raises:
        OSError: the command cannot be started.
    """
    # Search *our* PATH: exec would search the PATH that was captured for the job.
    try:
        command = await _programs.call("a folder of PATH", partial(shutil.which, argv[0]), FILES_S)
    except FallowError as error:
        raise OSError(errno.ETIMEDOUT, "a folder of PATH does not answer") from error
    if command is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    process = await asyncio.create_subprocess_exec(
        # env(1) enters the folder. Our own child must not: we wait until it runs its program, and a user's file system
        # may hang. A shell may drop the functions among the variables.
        *([] if cwd is None else ["/usr/bin/env", f"--chdir={cwd}"]),
        command,
        *argv[1:],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment),
        umask=umask,
        start_new_session=True,  # a group of its own: sites wrap Slurm's commands in scripts
    )
    try:
        async with asyncio.timeout(timeout_s):
            if begin_s is not None and not await _begins(process, begin_s):
                return CommandResult(NOT_BEGUN, "", f"it did not begin within {begin_s:g} s")
            output, errors = await process.communicate(stdin.encode())
    except TimeoutError:
        return CommandResult(None, "", f"no answer within {timeout_s:g} s")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return CommandResult(process.returncode, output.decode(errors="replace"), errors.decode(errors="replace"))


async def _begins(process: asyncio.subprocess.Process, within_s: float) -> bool:
    """Read the first line of a process. False: it has written none in time, and has not ended."""
    assert process.stdout is not None
    try:
        await asyncio.wait_for(process.stdout.readline(), within_s)
    except TimeoutError:
        return False
    return True
