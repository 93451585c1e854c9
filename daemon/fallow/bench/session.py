"""Starts the benchmarks' training under a private head on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fallow.bench import steplog
from fallow.bench.steplog import Finished
from fallow.core.schedule import Action, Item
from fallow.local.driver import Driver
from fallow.model import Exit, FallowError, RunReport, RunStatus


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came out of one training."""

    report: RunReport
    happened: list[tuple[Item, float]]
    "items of the schedule and when they began, in seconds of CLOCK_MONOTONIC"
    sums: str = ""
    "on a device: how gradients were summed, in words"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A private scratch folder, removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="fallow-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def train(
    scratch: Path,
    params: int,
    steps: int,
    members: int,
    schedule: Sequence[Item] = (),
    *,
    most: int,
    device: str = "cpu",
    options: Sequence[str] = (),
) -> Trained:
    """One run of `fallow.bench.training` with as many shards as there are members at most.

    Args:
        scratch: empty folder; takes the head's state.
        params: of the model.
        steps: optimizer steps.
        members: nodes at the start, with one worker each.
        schedule: what happens to the membership.
        most: members at most, and shards in a step.
        device: to train on, as torch names its kind.
        options: further words for the training.

    Raises:
        FallowError: it did not finish, or samples were lost or repeated: then no figure is worth anything.
    """
    workers = members + sum(item.count for item in schedule if item.action is Action.ADD)
    argv = command(params, steps, most, ["--device", device, "--workers", str(workers), *options])
    done = trained(Driver(scratch, argv, members, schedule, max_members=most, output=sys.stderr.fileno()))
    if device == "cpu":
        return done
    from fallow.bench.device import describe

    return replace(done, sums=describe(device, workers))


def command(params: int, steps: int, shards: int, options: Sequence[str] = ()) -> list[str]:
    """The training's argv."""
    argv = [sys.executable, "-m", "fallow.bench.training", "--params", str(params), "--steps", str(steps)]
    return [*argv, "--global-batch", str(shards), *options]


def trained(driver: Driver) -> Trained:
    """Have it train to the end.

    Raises:
        FallowError: as for `train`.
    """
    report = asyncio.run(driver.train())
    samples = report.samples
    if report.status is not RunStatus.FINISHED or samples.lost or samples.duplicated:
        raise FallowError(
            f"the measured training is {report.status} with {samples.lost} samples lost and {samples.duplicated} "
            f"repeated: {report.message or 'no reason known'}",
            Exit.SOFTWARE,
        )
    return Trained(report=report, happened=driver.happened)


def train_noting(
    params: int,
    steps: int,
    members: int,
    schedule: Sequence[Item] = (),
    *,
    most: int,
    device: str = "cpu",
    options: Sequence[str] = (),
) -> tuple[Trained, list[Finished]]:
    """`train` in a folder of its own; also returns the finished steps as the training noted them."""
    with folder() as scratch:
        log = scratch / "steps"
        log.mkdir()
        options = ["--log", str(log), *options]
        done = train(scratch / "run", params, steps, members, schedule, most=most, device=device, options=options)
        return done, steplog.read(log)
