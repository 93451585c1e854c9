"""Train under a private head on this machine, as `fallow local` does, and read what came of it."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench import steplog
from bench.steplog import Finished
from fallow.core.submission.schedule import Action, Item, parse_schedule
from fallow.local.driver import Driver
from fallow.model import Exit, FallowError, RunReport, RunStatus


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One finished training."""

    report: RunReport
    happened: list[tuple[Item, float]]
    "items of the schedule, and when each began (seconds of CLOCK_MONOTONIC)"
    finished: list[Finished]
    "steps, as the training noted them"
    workers: int
    "that there were from the start to the end"
    result: bytes
    "what the script left in `result.json`"


def command(script: str, params: int, log: Path, **options: object) -> list[str]:
    """argv of a training.

    Args:
        script: module of this package.
        params: of the model.
        log: folder that all workers share.
        options: more options of the script, by name. One that is True is a flag, one that is False is left out.
    """
    argv = [sys.executable, "-m", f"bench.{script}", "--params", str(params), "--notes", str(log)]
    for name, value in options.items():
        if value is not False:
            argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return argv


def train(script: str, params: int, members: int, schedule: str = "", *, options: Mapping[str, object]) -> Trained:
    """Run a script in one worker a member, and wait for its end.

    Args:
        script: module of this package.
        params: of the model.
        members: nodes at the start.
        schedule: what happens to the membership, in the words of `fallow local`.
        options: more options of the script, which also gets `--workers`: that there are from the start to the end.

    Raises:
        FallowError: it did not finish, or samples were lost or repeated: then no figure is worth anything.
    """
    items = parse_schedule(schedule, members)
    workers = members + sum(item.count for item in items if item.action is Action.ADD)
    with tempfile.TemporaryDirectory(prefix="fallow-bench-", ignore_cleanup_errors=True) as scratch:
        folder, log = Path(scratch, "run"), Path(scratch, "log")
        folder.mkdir(mode=0o700)
        log.mkdir()
        argv = command(script, params, log, workers=workers, **options)
        driver = Driver(folder, argv, members, items, output=2)
        report = asyncio.run(driver.train())
        samples, result = report.samples, log / "result.json"
        if report.status is not RunStatus.FINISHED or samples.lost or samples.duplicated:
            text = f"{report.status}, {samples.lost} samples lost, {samples.duplicated} repeated; {report.message}"
            raise FallowError(f"the measured training is {text}", Exit.SOFTWARE)
        return Trained(
            report=report,
            happened=driver.happened,
            finished=steplog.read(log),
            workers=workers,
            result=result.read_bytes() if result.exists() else b"",
        )
