"""Train under a private head on this machine, as `fallow local` does, and read the results."""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fallow.core.submission.schedule import Action, Item, parse_schedule
from fallow.local.driver import Driver
from fallow.model import Exit, FallowError, RunReport


class FinishedStep(NamedTuple):
    """One optimizer step that one worker finished."""

    worker: str
    step: int
    generation: int
    at: float
    "seconds of CLOCK_MONOTONIC"


@dataclass(frozen=True, kw_only=True)
class Training:
    """One finished training."""

    report: RunReport
    schedule_starts: list[tuple[Item, float]]
    "items of the schedule, each with its start (seconds of CLOCK_MONOTONIC)"
    steps: list[FinishedStep]
    "finished steps of all workers, by time"
    workers: int
    "number of workers from the start to the end"
    result: bytes
    "content of the script's `result.json`"


def command(params: int, log: Path, **options: object) -> list[str]:
    """The command of a training.

    Args:
        params: parameters of the model.
        log: folder that all workers share.
        options: further options of `bench.training` by name. True makes a flag, False leaves the option out.
    """
    argv = [sys.executable, "-m", "bench.training", "--params", str(params), "--notes", str(log)]
    for name, value in options.items():
        if value is not False:
            argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return argv


def train(params: int, members: int, schedule: str = "", /, **options: object) -> Training:
    """Train with one worker on each member, and wait for the end.

    Args:
        params: parameters of the model.
        members: number of members at the start.
        schedule: membership changes, in the syntax of `fallow local`.
        options: further options of `bench.training`, see `command`.

    Raises:
        FallowError: the training did not finish, or samples were lost or repeated.
    """
    items = parse_schedule(schedule, members)
    workers = members + sum(item.count for item in items if item.action is Action.ADD)
    with tempfile.TemporaryDirectory(prefix="fallow-bench-", ignore_cleanup_errors=True) as scratch:
        folder, log = Path(scratch, "run"), Path(scratch, "log")
        folder.mkdir(mode=0o700)
        log.mkdir()
        argv = command(params, log, workers=workers, **options)
        driver = Driver(folder, argv, members, items, output=2)
        report = asyncio.run(driver.train())
        samples, result = report.samples, log / "result.json"
        if not report.sound:
            text = f"{report.status}, {samples.lost} samples lost, {samples.duplicated} repeated; {report.message}"
            raise FallowError(f"the measured training is {text}", Exit.SOFTWARE)
        return Training(
            report=report,
            schedule_starts=driver.performed_items,
            steps=read_steps(log),
            workers=workers,
            result=result.read_bytes() if result.exists() else b"",
        )


def read_steps(folder: Path) -> list[FinishedStep]:
    """All finished steps of all workers, by time. An incomplete last line is ignored."""
    steps: list[FinishedStep] = []
    for path in folder.glob("*.steps"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 3 and "." in words[2]:
                steps.append(FinishedStep(path.stem, int(words[0]), int(words[1]), float(words[2])))
    return sorted(steps, key=lambda finished: finished.at)


def new_steps(log: Sequence[FinishedStep]) -> list[FinishedStep]:
    """The steps that were new when they were finished, by time. Of each step only the first worker counts."""
    highest, steps = -1, []
    for finished in log:
        if finished.step > highest:
            highest = finished.step
            steps.append(finished)
    return steps


def usual_gap(log: Sequence[FinishedStep]) -> float:
    """Median time between two new steps, in seconds."""
    return median(new.at - old.at for old, new in pairwise(new_steps(log)))


def standstill(log: Sequence[FinishedStep], since: float, until: float) -> float:
    """Seconds without progress in [since, until): the longest gap between two new steps minus the usual gap.

    A repeated step is no progress, so the steps that a restart loses count, too. Gaps that end in the interval count.
    """
    gaps = [new.at - old.at for old, new in pairwise(new_steps(log)) if since <= new.at < until]
    return max(0.0, max(gaps) - usual_gap(log)) if gaps else 0.0
