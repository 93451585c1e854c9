"""The log of finished steps: one small file per worker, with the clock that all processes of a machine share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple


class Finished(NamedTuple):
    """One worker finished one optimizer step."""

    worker: str
    step: int
    generation: int
    at: float
    "seconds of CLOCK_MONOTONIC"


class StepLog:
    """Writes one worker's file into a folder that all workers of the run share."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._file = (folder / f"{worker}.steps").open("ab", buffering=0)

    def finished(self, step: int, generation: int) -> None:
        """Note that `step` (0-based) is finished now."""
        self._file.write(f"{step} {generation} {time.monotonic():.6f}\n".encode())


def read(folder: Path) -> list[Finished]:
    """All finished steps of all workers, by time. A torn last line is left out."""
    found: list[Finished] = []
    for path in folder.glob("*.steps"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 3 and "." in words[2]:
                found.append(Finished(path.stem, int(words[0]), int(words[1]), float(words[2])))
    return sorted(found, key=lambda one: one.at)


def progress(log: Sequence[Finished]) -> list[Finished]:
    """The steps that went beyond all before them, each as it was first finished by anybody, by time."""
    highest, found = -1, []
    for one in log:
        if one.step > highest:
            highest = one.step
            found.append(one)
    return found


def usual_gap(log: Sequence[Finished]) -> float:
    """Median time between two new steps, in seconds."""
    return median(new.at - old.at for old, new in pairwise(progress(log)))


def standstill(log: Sequence[Finished], since: float, until: float) -> float:
    """How long progress stood still in [since, until): the longest gap between two new steps, minus the usual one.

    A step that is done again is no progress, so what a restart loses counts, too. Gaps count that end in the time
    span.
    """
    gaps = [new.at - old.at for old, new in pairwise(progress(log)) if since <= new.at < until]
    return max(0.0, max(gaps) - usual_gap(log)) if gaps else 0.0
