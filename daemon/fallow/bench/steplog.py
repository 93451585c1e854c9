"""Finished steps as the training itself saw them: one small file per process, one clock for all of a machine."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


class Finished(NamedTuple):
    """One process finished one optimizer step."""

    process: str
    step: int
    generation: int
    at: float
    "seconds of CLOCK_MONOTONIC, which all processes of a machine share"


class StepLog:
    """Writes one process's file.

    Args:
        folder: exists; shared by all processes of the run.
        process: a name of its own.
    """

    def __init__(self, folder: Path, process: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(folder / f"{process}.steps", flags, 0o600)

    def finished(self, step: int, generation: int) -> None:
        """Note that `step` (0-based) is finished now."""
        os.write(self._descriptor, f"{step} {generation} {time.monotonic():.6f}\n".encode())


def read(folder: Path) -> list[Finished]:
    """All finished steps of all processes, by time. A torn last line is left out."""
    found: list[Finished] = []
    for path in folder.glob("*.steps"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 3 and "." in words[2]:
                found.append(Finished(path.stem, int(words[0]), int(words[1]), float(words[2])))
    return sorted(found, key=lambda done: done.at)


def progress(done: list[Finished]) -> list[Finished]:
    """Those steps that went beyond all before them, each as it was first finished by anybody, by time."""
    highest, found = -1, []
    for one in done:
        if one.step > highest:
            highest = one.step
            found.append(one)
    return found


def usual_gap(done: list[Finished]) -> float:
    """Median time between two new steps, in seconds."""
    gaps = sorted(later.at - earlier.at for earlier, later in pairwise(progress(done)))
    return gaps[len(gaps) // 2]


def standstill(done: list[Finished], since: float, until: float) -> float:
    """How long progress stood still in [since, until): the longest gap between two new steps, minus the usual one.

    A step that is done again is no progress, so what a restart loses counts, too. Gaps are those that end in the time
    span.
    """
    gaps = [new.at - old.at for old, new in pairwise(progress(done)) if since <= new.at < until]
    return max(0.0, max(gaps) - usual_gap(done)) if gaps else 0.0
