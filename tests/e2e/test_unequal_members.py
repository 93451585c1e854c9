"""Members of different speed on real processes: who computed how much stands in their ledgers."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections import Counter
from pathlib import Path

from local_rig import TINY

from fallow.core.training.audit import Fed
from fallow.local.driver import Driver
from fallow.model import RunStatus
from fallow.worker.data.ledger import read_ledger
from nursery_client import NurseryClient

STEPS, SHARDS, BATCH = 67, 20, 3


def test_shares_follow_the_speeds(nursery: NurseryClient, tmp_path: Path) -> None:
    """One of four is three times slower for a while; loader processes follow every division."""
    epoch = SHARDS * BATCH * 7 + 5  # eight steps, the last of which is a small one
    words = ["--steps", STEPS, "--samples", epoch, "--batch-size", BATCH, "--global-batch", SHARDS * BATCH]
    words += ["--pace", 0, "--num-workers", 2, "--told-s", 1000, "--slow", "n1:3:8:39"]
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    with (folder / "output.log").open("wb") as log, nursery.forks_for_asyncio():
        environ = {**os.environ, "XDG_RUNTIME_DIR": ""}  # a short path, because Unix sockets live under it
        driver = Driver(folder, [sys.executable, TINY, *map(str, words)], 4, output=log, environ=environ)
        report = asyncio.run(driver.train())
    assert (report.status, report.steps) == (RunStatus.FINISHED, STEPS), report.message
    assert report.samples.consumed == STEPS // 8 * epoch + STEPS % 8 * SHARDS * BATCH
    assert (report.samples.lost, report.samples.duplicated) == (0, 0)

    counts: dict[int, Counter[str]] = {}
    for path in folder.glob("**/ledger/*.ledger"):
        for record in read_ledger(path):
            if isinstance(record, Fed):
                counts.setdefault(record.step, Counter())[path.stem] += 1
    shares = {step: dict(each) for step, each in sorted(counts.items()) if each.total() == SHARDS}
    assert len(shares) == STEPS - 8
    alike = dict.fromkeys(("n0", "n1", "n2", "n3"), 5)
    slow = {**dict.fromkeys(alike, 6), "n1": 2}
    assert [shares[step] for step in (0, 24, 38, 66)] == [alike, slow, slow, alike], shares
    assert sum(one != two for one, two in itertools.pairwise(shares.values())) == 2, "no flapping"
