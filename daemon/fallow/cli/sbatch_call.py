"""Call sbatch once, and tell a job from a refusal and from an unknown outcome."""

import asyncio
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import IO

import msgspec

from fallow.cli.common import say
from fallow.core.allocations import SUBMIT_S
from fallow.model import Exit, FallowError
from fallow.text import clean_output

LOOK_UP_S = 12.0
"""Seconds to look for a job whose submission gave no answer. The head looks for the job afterwards."""

_JOB = re.compile(r"\s*(\d+(?:;\S+)?)\s*")


class Outcome(msgspec.Struct, frozen=True):
    code: int
    job: str | None
    "`JOBID` or `JOBID;CLUSTER`"
    is_refused: bool
    "True: sbatch or Slurm refused the job. False without a job: the outcome is unknown"
    reason: str


def call_sbatch(
    argv: list[str], environment: Mapping[str, str], on_job: Callable[[str], None], stdin: str | None = None
) -> Outcome:
    """Run `sbatch --parsable`, and pass its standard error on at once.

    Args:
        argv: sbatch and its arguments.
        environment: the complete environment of sbatch.
        on_job: called with the job as soon as it is known. `sbatch --wait` then runs for as long as the job.
        stdin: text of the script if no file holds it.
    """
    from fallow.slurm.parse import complaint, is_refusal

    # A file, not a pipe: sbatch may end without reading it.
    with tempfile.TemporaryFile() as script:
        script.write((stdin or "").encode())
        script.seek(0)
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                argv, env=environment, stdin=script, stdout=pipe, stderr=pipe, text=True, errors="replace"
            )
        except OSError as error:
            say(f"sbatch cannot be started ({error.strerror})")
            return Outcome(Exit.UNAVAILABLE, None, True, str(error))
    assert process.stdout is not None
    assert process.stderr is not None
    # The deadline is for Slurm's answer. Once the job is known, `sbatch --wait` may run for as long as the job.
    timer = threading.Timer(SUBMIT_S, process.kill)
    timer.daemon = True
    timer.start()
    error_lines: list[str] = []
    stderr_thread = threading.Thread(target=_pass_on, args=(process.stderr, error_lines), daemon=True)
    stderr_thread.start()
    job: str | None = None
    try:
        for line in process.stdout:
            match = _JOB.fullmatch(line)
            if match is not None and job is None:
                job = match[1]
                timer.cancel()
                on_job(job)
            elif match is None:
                # A banner of the site: for the user to read, but not a result.
                sys.stderr.write(clean_output(line))
        code = process.wait()
    except KeyboardInterrupt:
        process.kill()
        process.wait()
        if job is not None:
            raise
        return Outcome(130, None, False, "interrupted")
    finally:
        timer.cancel()
    stderr_thread.join(timeout=5.0)
    if job is None and code < 0:
        return Outcome(Exit.TEMPFAIL, None, False, f"no answer within {SUBMIT_S:g} s")
    text = "".join(error_lines)
    return Outcome(code, job, job is None and code > 0 and is_refusal(text), complaint(text))


def _pass_on(stream: IO[str], error_lines: list[str]) -> None:
    for line in stream:
        error_lines.append(line)
        sys.stderr.write(clean_output(line))
        sys.stderr.flush()


def look_up(token: str) -> str | None:
    """The job whose comment holds `token`, as `JOBID`; None if Slurm shows none, or does not answer in time."""
    from fallow.slurm.cli import CliClient

    try:
        jobs = asyncio.run(CliClient(query_timeout_s=LOOK_UP_S).own_jobs())
    except FallowError:
        return None
    # Of a heterogeneous job every component has the comment; the leader comes first and has the smallest number.
    ids = [job.het_job_id or job.job_id for job in jobs if token in job.comment.split()]
    return min(ids, key=lambda text: int(re.sub(r"\D.*", "", text) or 0), default=None)
