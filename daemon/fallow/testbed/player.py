"""Play other users' jobs on a testbed: the loop that submits what `load` made up.

The jobs are `sleep`; a testbed with load costs next to no CPU.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from fallow.model import Exit, FallowError
from fallow.testbed.cluster import Testbed
from fallow.testbed.host import clean_environment
from fallow.testbed.load import LoadJob

_SBATCH_TIMEOUT_S = 30.0


class Player:
    """Submits jobs at their times until they are all out, `seconds` have passed, or `stop` is set."""

    def __init__(
        self, testbed: Testbed, record: TextIO, *, as_user: str | None = None, partition: str = "normal"
    ) -> None:
        self._testbed = testbed
        self._record = record
        self._identity = _identity(as_user)
        self._partition = partition
        self._ids: list[str] = []
        self.stop = threading.Event()
        self.submitted = 0
        self.refused = 0

    def play(self, jobs: Sequence[LoadJob], seconds: float) -> None:
        """Play to the end, then cancel what of it is left."""
        began = time.monotonic()
        self._write("begin", jobs=len(jobs), seconds=seconds)
        try:
            for job in jobs:
                if self.stop.wait(max(0.0, began + job.at_s - time.monotonic())) or not self._testbed.conf.exists():
                    break  # told to, or the testbed was taken down under us
                self._submit(job)
            self.stop.wait(max(0.0, began + seconds - time.monotonic()))
        finally:
            self._cancel()
            self._write("end", submitted=self.submitted, refused=self.refused)

    def _submit(self, job: LoadJob) -> None:
        wanted = [f"--nodes={job.nodes}", f"--time={job.limit_minutes}", f"--partition={self._partition}"]
        node_gpus = self._testbed.layout.gpus
        if node_gpus and job.gpus:
            wanted.append(f"--gres=gpu:{job.gpus}")
        if job.gpus >= node_gpus:
            wanted.append("--exclusive")
        options = [f"--job-name={job.name}", "--no-requeue", "--output=/dev/null", "--chdir=/", "--parsable", *wanted]
        # exec: one process per job, and the signal at its end goes to it
        argv = ["sbatch", *options, f"--wrap=exec sleep {job.runs_s:.3f}"]
        try:
            done = subprocess.run(
                argv,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SBATCH_TIMEOUT_S,
                check=False,
                **self._identity,
            )
        except subprocess.TimeoutExpired:
            self.refused += 1
            self._write("refused", name=job.name, reason="sbatch did not answer")
            return
        if done.returncode != 0:
            self.refused += 1
            self._write("refused", name=job.name, reason=done.stderr.strip())
            return
        self.submitted += 1
        job_id = done.stdout.strip().partition(";")[0]
        self._ids.append(job_id)
        self._write(
            "submitted",
            job_id=job_id,
            name=job.name,
            nodes=job.nodes,
            gpus=job.gpus,
            runs_s=job.runs_s,
            limit_minutes=job.limit_minutes,
            planned_at_s=job.at_s,
        )

    def _cancel(self) -> None:
        # in portions: an argument list has its limits
        for first in range(0, len(self._ids), 500):
            try:
                self._testbed.slurm("scancel", "--quiet", *self._ids[first : first + 500])
            except FallowError as error:  # the testbed was taken down under us
                self._write("left", reason=error.message)
                return

    def _environment(self) -> dict[str, str]:
        return clean_environment(self._testbed.conf)

    def _write(self, kind: str, **values: Any) -> None:
        print(json.dumps({"at": round(time.time(), 3), "kind": kind, **values}), file=self._record, flush=True)


def _identity(as_user: str | None) -> dict[str, Any]:
    """Arguments of `subprocess.run` that make sbatch, and so the job, another user's."""
    if as_user is None:
        return {}
    try:
        entry = pwd.getpwnam(as_user)
    except KeyError:
        raise FallowError(
            f"load: there is no user {as_user!r} on this host; name one of /etc/passwd", Exit.USAGE
        ) from None
    if os.getuid() == entry.pw_uid:
        return {}
    if os.getuid() != 0:
        raise FallowError(f"load: only root can submit as {as_user}; leave the user out", Exit.NOPERM)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


@contextmanager
def stopped_by_signals(player: Player) -> Iterator[None]:
    """SIGTERM and SIGINT end the play in order. Only the main thread may set handlers; elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: player.stop.set()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def record_path(testbed: Testbed) -> Path:
    """Where a load's record is kept unless the caller says otherwise."""
    return testbed.folder / "load.jsonl"
