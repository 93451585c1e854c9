"""One call of sbatch whose outcome must not be guessed."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

import msgspec

from fallow.core.allocations import SUBMIT_S
from fallow.model import Exit
from fallow.text import clean_output

LOOK_UP_S = 12.0
"""For how long Slurm is asked for a job whose submission gave no answer. The head goes on looking for it."""

_JOB = re.compile(r"\s*(\d+(?:;\S+)?)\s*")


class Outcome(msgspec.Struct, frozen=True):
    code: int
    job: str | None
    "`JOBID` or `JOBID;CLUSTER`"
    refused: bool
    "sbatch or Slurm said no: there is no job. Without a job and not refused: nobody knows"
    reason: str


class Call:
    """sbatch with --parsable; what it prints on standard error is passed on at once."""

    def __init__(
        self, argv: list[str], environment: dict[str, str], stdin: str | None = None, timeout_s: float | None = None
    ) -> None:
        self._argv = argv
        self._environment = environment
        self._stdin = stdin
        self._timeout_s = SUBMIT_S if timeout_s is None else timeout_s
        self._errors: list[str] = []

    def run(self, taken: Callable[[str], None]) -> Outcome:
        """Calls `taken` with the job as soon as it is known; sbatch --wait goes on for as long as the job does."""
        from fallow.slurm.parse import complaint, is_refusal

        try:
            process = subprocess.Popen(
                self._argv,
                env=self._environment,
                stdin=subprocess.PIPE if self._stdin is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except OSError as error:
            reason = f"sbatch cannot be started ({error.strerror}); install Slurm's client commands or set PATH"
            sys.stderr.write(f"fallow: {reason}\n")
            return Outcome(Exit.UNAVAILABLE, None, True, reason)
        assert process.stdout is not None
        assert process.stderr is not None
        # The deadline is for Slurm's answer. Once the job is known, how long sbatch goes on (--wait) is the user's.
        late = threading.Timer(self._timeout_s, process.kill)
        late.daemon = True
        late.start()
        passing = threading.Thread(target=self._pass_on, args=(process.stderr,), daemon=True)
        passing.start()
        job: str | None = None
        try:
            self._feed(process)
            for line in process.stdout:
                found = _JOB.fullmatch(line)
                if found is not None and job is None:
                    job = found[1]
                    late.cancel()
                    taken(job)
                elif found is None:
                    # A site's banner; it is the user's to read, but not a result.
                    sys.stderr.write(clean_output(line))
            code = process.wait()
        except KeyboardInterrupt:
            process.kill()
            code = process.wait()
            if job is not None:
                raise
            return Outcome(130, None, False, "interrupted")
        finally:
            late.cancel()
        passing.join(timeout=5.0)
        text = "".join(self._errors)
        if job is None and code < 0:
            return Outcome(Exit.TEMPFAIL, None, False, f"no answer within {self._timeout_s:g} s")
        refused = job is None and code > 0 and is_refusal(text)
        return Outcome(code, job, refused, complaint(text))

    def _feed(self, process: subprocess.Popen[str]) -> None:
        if process.stdin is None:
            return
        try:
            with process.stdin as pipe:
                pipe.write(self._stdin or "")
        except BrokenPipeError:
            # sbatch ended without reading its script; why is on its standard error.
            return

    def _pass_on(self, stream: IO[str]) -> None:
        for line in stream:
            self._errors.append(line)
            sys.stderr.write(clean_output(line))
            sys.stderr.flush()


def look_up(token: str, timeout_s: float = LOOK_UP_S) -> str | None:
    """The job whose comment holds `token`, as `JOBID`; None if Slurm shows none, or does not answer in time."""
    return asyncio.run(_find(token, timeout_s))


async def _find(token: str, timeout_s: float) -> str | None:
    from fallow.slurm.parse import JobFormat, jobs
    from fallow.slurm.process import query_environment, run

    layout = JobFormat.fresh(token)
    argv = ["squeue", "-h", "-t", "all", f"--user={os.getuid()}", "-O", layout.option]
    try:
        done = await run(argv, environment=query_environment(os.environ.get("SLURM_CONF")), timeout_s=timeout_s)
    except OSError:
        return None
    if done.code != 0:
        return None
    found = [job for job in jobs(done.stdout, layout) if token in job.comment.split()]
    # Of a heterogeneous job every component has the comment; the leader comes first and has the smallest number.
    ids = [job.het_job_id or job.job_id for job in found]
    return min(ids, key=lambda text: int(re.sub(r"\D.*", "", text) or 0), default=None)
