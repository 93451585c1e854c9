"""Entry of `fallow local`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fallow.agent.process import with_python
from fallow.agent.restart import as_program, under_torchrun
from fallow.core.submission.schedule import parse_schedule
from fallow.local.driver import Driver, name_of
from fallow.model import Exit, FallowError, RunReport, RunStatus
from fallow.text import clean, clean_block, clean_output, harmless_json

_LONGEST = 1 << 20
"""Characters of a summary that are shown: a line for each generation."""


def main(
    command: Sequence[str],
    members: int,
    workers_per_node: int = 1,
    schedule: str = "",
    report: Path | None = None,
    json: bool = False,
    reproducible: bool = False,
    restart: bool = False,
) -> int:
    """Train `command` on this machine with a scripted membership; returns the exit code.

    Args:
        command: argv of the training.
        members: nodes at the start, at least 1.
        workers_per_node: workers of each, at least 1.
        schedule: see `fallow.core.submission.schedule`.
        report: file that takes the report as JSON.
        json: print the report, and nothing else, on standard output.
        reproducible: as if the script passed `reproducible=True` to `run.prepare`.
        restart: `command` knows nothing of Fallow; steps of the schedule are seconds of training.

    Raises:
        FallowError: bad arguments, or it could not start.
    """
    if members < 1:
        raise FallowError(f"--members {members}: at least 1", Exit.USAGE)
    if workers_per_node < 1:
        raise FallowError(f"--workers-per-node {workers_per_node}: at least 1", Exit.USAGE)
    if not command or (not restart and shutil.which(command[0]) is None):
        what = command[0] if command else ""
        raise FallowError(f"command {what!r}: not found or not executable{with_python(what)}", Exit.NOINPUT)
    name = name_of(as_program(command) if restart else command)
    argv = under_torchrun(command) if restart else list(command)
    items = parse_schedule(schedule, members, workers_per_node)
    folder = Path(tempfile.mkdtemp(prefix="fallow-local-"))
    environ = {**os.environ, "FALLOW_REPRODUCIBLE": "1"} if reproducible else os.environ
    output = sys.stderr.fileno() if json else None
    driver = Driver(
        folder,
        argv,
        members,
        items,
        workers_per_node=workers_per_node,
        name=name,
        output=output,
        environ=environ,
        by_seconds=restart,
    )
    try:
        result = asyncio.run(_train(driver))
    except asyncio.CancelledError:
        sys.stderr.write(f"fallow local: ended by SIGTERM; logs are kept in {folder}\n")
        return 128 + signal.SIGTERM
    except BaseException:
        sys.stderr.write(f"fallow local: logs are kept in {folder}\n")
        raise
    if driver.absent:
        sys.stderr.write(
            f"fallow local: {driver.absent} newcomer(s) did not take part: {clean(driver.absent_because)}\n"
        )
    for item in driver.missed:
        when = "before" if restart else f"at step {result.steps}"
        sys.stderr.write(f"fallow local: {item.text} did not happen: the run ended {when}\n")
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=2)
    written = report is None or _write(report, encoded + b"\n")
    if json:
        sys.stdout.write(harmless_json(encoded.decode(), sys.stdout.encoding or "utf-8") + "\n")
    else:
        sys.stdout.write(clean_block(summary(result, restart), _LONGEST) + "\n")
    good = result.status is RunStatus.FINISHED and not result.samples.lost and not result.samples.duplicated
    if good:
        if result.message:
            sys.stderr.write(f"fallow local: {clean(result.message)}\n")
        shutil.rmtree(folder, ignore_errors=True)
        return Exit.OK if written else Exit.IOERR
    if result.traceback:
        sys.stderr.write(clean_output(result.traceback, 20_000).rstrip() + "\n")
    why = clean(result.message) or "see the report"
    sys.stderr.write(f"fallow local: run is {result.status}: {why}; logs in {folder}\n")
    return Exit.SOFTWARE


async def _train(driver: Driver) -> RunReport:
    """Train; SIGTERM ends it as Ctrl-C does, so that nothing is left behind."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await driver.train()


def _write(report: Path, content: bytes) -> bool:
    """False: it could not be written. The training is done all the same, so what it came to is shown."""
    try:
        report.write_bytes(content)
    except OSError as error:
        sys.stderr.write(f"fallow local: --report {clean(str(report))}: cannot be written ({error.strerror})\n")
        return False
    return True


def summary(report: RunReport, restart: bool = False) -> str:
    """A few lines for people; a script that is restarted tells nothing of its steps and samples."""
    if restart:
        told = [f"run {report.run}: {report.status}, {len(report.generations)} generations"]
        return "\n".join(told + [f"  {generation.reason}" for generation in report.generations])
    changes = [g for g in report.generations if g.pause_s is not None]
    loss = report.final_loss
    planned = report.pause_s.planned
    lines = [
        f"run {report.run}: {report.status}, {report.steps} steps, {len(report.generations)} generations",
        f"samples: {report.samples.consumed} used, {report.samples.lost} lost, {report.samples.duplicated} repeated"
        + (f", {report.samples.unknown} unknown (the disk was full)" if report.samples.unknown else ""),
        f"final loss {'-' if loss is None else loss}, state {(report.final_digest or '-')[:16]}",
    ]
    if planned.p50 is not None:
        lines.append(f"planned pauses: p50 {planned.p50:.3f} s, p95 {planned.p95:.3f} s ({len(changes)} changes)")
    for generation in report.generations:
        pause = "-" if generation.pause_s is None else f"{generation.pause_s:.3f} s"
        lines.append(f"  step {generation.first_step}: {generation.reason} (pause {pause})")
    return "\n".join(lines)
