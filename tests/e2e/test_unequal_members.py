"""Members of different speed on real processes: who computed how much stands in their ledgers."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fallow.core.submission.schedule import parse_schedule
from fallow.core.training.audit import Fed
from fallow.local.driver import Driver
from fallow.model import RunReport, RunStatus
from fallow.worker.data.ledger import read_ledger

TRAINING = str(Path(__file__).parent / "local_training.py")
SHARDS, BATCH = 20, 3


class Trained:
    """A finished run."""

    def __init__(self, report: RunReport, folder: Path) -> None:
        self.report = report
        self._counts: dict[tuple[int, int], Counter[str]] = {}
        for path in folder.glob("**/ledger/*.ledger"):
            for record in read_ledger(path):
                if isinstance(record, Fed):
                    self._counts.setdefault((record.generation, record.step), Counter())[path.stem] += 1

    def shares(self, generation: int) -> dict[int, dict[str, int]]:
        """Shards of each worker, by step, for the full steps that a generation finished."""
        found = {step: dict(counts) for (by, step), counts in self._counts.items() if by == generation}
        return {step: counts for step, counts in sorted(found.items()) if sum(counts.values()) == SHARDS}


def train(folder: Path, steps: int, members: int, *options: str, schedule: str = "") -> Trained:
    folder.mkdir(mode=0o700)
    words = ["--steps", steps, "--samples", SHARDS * BATCH * 7 + 5, "--batch-size", BATCH, "--pace", 0]
    command = [sys.executable, TRAINING, *map(str, words), "--global-batch", str(SHARDS * BATCH), *options]
    with (folder / "output.log").open("wb") as log:
        # A short path, because Unix sockets live under it.
        environ = {**os.environ, "XDG_RUNTIME_DIR": ""}
        items = parse_schedule(schedule, members)
        driver = Driver(folder, command, members, items, output=log, environ=environ)
        report = asyncio.run(driver.train())
    assert report.status is RunStatus.FINISHED, report.message
    assert report.steps == steps
    assert not driver.due
    full, partial = divmod(steps, 8)
    assert report.samples.consumed == full * (SHARDS * BATCH * 7 + 5) + partial * SHARDS * BATCH
    assert (report.samples.lost, report.samples.duplicated) == (0, 0)
    return Trained(report, folder)


def test_shares_follow_the_speeds(tmp_path: Path) -> None:
    """One of four is three times slower for a while; loader processes follow every division."""
    done = train(tmp_path / "run", 67, 4, "--num-workers", "2", "--told-s", "1000", "--slow", "n1:3:8:39")
    shares = done.shares(done.report.generations[0].generation)
    assert len(shares) == 67 - 8
    alike = dict.fromkeys(("n0", "n1", "n2", "n3"), 5)
    told = [shares[step] for step in (0, 24, 38, 66)]
    assert told == [alike, {**dict.fromkeys(alike, 6), "n1": 2}, {**dict.fromkeys(alike, 6), "n1": 2}, alike], shares
    assert sum(one != two for one, two in itertools.pairwise(shares.values())) == 2, "no flapping"


@pytest.mark.soak
def test_a_slow_newcomer_is_found_out_and_survivors_remember(tmp_path: Path) -> None:
    done = train(tmp_path / "run", 60, 3, "--shard-s", "0.02", "--slow", "n3:3:0:60", schedule="+1@8,kill:0@30")
    joined, survived = (done.shares(one.generation) for one in done.report.generations[1:])
    assert set(next(iter(joined.values())).values()) == {5}, "it is taken for one like the others"
    last = list(joined.values())[-2]
    assert last["n3"] in (1, 2, 3), joined
    first = next(iter(survived.values()))
    assert set(first) == {"n1", "n2", "n3"}
    assert first["n3"] in (2, 3, 4), survived
