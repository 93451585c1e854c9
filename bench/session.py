"""Train under a private head on this machine, as `fallow local` does, and read what came of it."""

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


class Finished(NamedTuple):
    """One worker finished one optimizer step."""

    worker: str
    step: int
    generation: int
    at: float
    "seconds of CLOCK_MONOTONIC"


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


def command(params: int, log: Path, **options: object) -> list[str]:
    """argv of a training.

    Args:
        params: of the model.
        log: folder that all workers share.
        options: more of its options, by name. One that is True is a flag, one that is False is left out.
    """
    argv = [sys.executable, "-m", "bench.training", "--params", str(params), "--notes", str(log)]
    for name, value in options.items():
        if value is not False:
            argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return argv


def train(params: int, members: int, schedule: str = "", /, **options: object) -> Trained:
    """Train with one worker a member, and wait for the end.

    Args:
        params: of the model.
        members: nodes at the start.
        schedule: what happens to the membership, in the words of `fallow local`.
        options: more of the training, which also gets `--workers`: that there are from the start to the end.

    Raises:
        FallowError: it did not finish, or samples were lost or repeated: then no figure is worth anything.
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
        return Trained(
            report=report,
            happened=driver.performed_items,
            finished=read_steps(log),
            workers=workers,
            result=result.read_bytes() if result.exists() else b"",
        )


def read_steps(folder: Path) -> list[Finished]:
    """All finished steps of all workers, by time. A torn last line is left out."""
    found: list[Finished] = []
    for path in folder.glob("*.steps"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 3 and "." in words[2]:
                found.append(Finished(path.stem, int(words[0]), int(words[1]), float(words[2])))
    return sorted(found, key=lambda one: one.at)


def new_steps(log: Sequence[Finished]) -> list[Finished]:
    """The steps that went beyond all before them, each as it was first finished by anybody, by time."""
    highest, found = -1, []
    for one in log:
        if one.step > highest:
            highest = one.step
            found.append(one)
    return found


def usual_gap(log: Sequence[Finished]) -> float:
    """Median time between two new steps, in seconds."""
    return median(new.at - old.at for old, new in pairwise(new_steps(log)))


def standstill(log: Sequence[Finished], since: float, until: float) -> float:
    """How long progress stood still in [since, until): the longest gap between two new steps, minus the usual one.

    A step that is done again is no progress, so what a restart loses counts, too. Gaps count that end in the time
    span.
    """
    gaps = [new.at - old.at for old, new in pairwise(new_steps(log)) if since <= new.at < until]
    return max(0.0, max(gaps) - usual_gap(log)) if gaps else 0.0
