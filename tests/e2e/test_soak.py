"""Long random histories of one training on real processes: `make soak`.

Each seed draws some forty joins, leaves and kills. Whatever came and went, every sample is used exactly once, and the
final loss is that of the undisturbed run to 1e-9 (the training computes in float64, so that the order of a sum does
not show).
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fallow.core.schedule import parse_schedule
from fallow.local.driver import Driver
from fallow.model import RunReport, RunStatus

TRAINING = str(Path(__file__).parent / "local_training.py")
STEPS, SAMPLES, BATCH = 900, 256, 32
FEWEST, MOST, START = 1, 6, 3

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


def history(seed: int, events: int = 40) -> str:
    """A random schedule that keeps between `FEWEST` and `MOST` members."""
    rng = random.Random(seed)
    members, born, step, items = list(range(START)), START, 20, []
    for _ in range(events):
        kinds = ["+1"] * (len(members) < MOST) + ["-1", "-m", "kill"] * (len(members) > FEWEST)
        match rng.choice(kinds):
            case "+1":
                items.append(f"+1@{step}")
                members.append(born)
                born += 1
            case "-1":
                items.append(f"-1@{step}")
                members.pop()
            case kind:
                gone = members.pop(rng.randrange(len(members)))
                items.append(f"{'-m' if kind == '-m' else 'kill:'}{gone}@{step}")
        step += rng.randint(5, 30)
    return ",".join(items)


def train(folder: Path, members: int, schedule: str) -> RunReport:
    folder.mkdir(mode=0o700)
    command = [sys.executable, TRAINING, "--steps", str(STEPS), "--samples", str(SAMPLES)]
    with (folder / "output.log").open("wb") as log:
        items = parse_schedule(schedule, members)
        # A short path, because Unix sockets live under it.
        environ = {**os.environ, "XDG_RUNTIME_DIR": ""}
        driver = Driver(folder, command, members, items, max_members=8, output=log, environ=environ)
        report = asyncio.run(driver.train())
    assert not driver.missed
    return report


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return train(tmp_path_factory.mktemp("still") / "run", 1, "")


@pytest.mark.parametrize("seed", range(5))
def test_any_history_uses_each_sample_once_and_gives_the_same_loss(
    seed: int, undisturbed: RunReport, tmp_path: Path
) -> None:
    report = train(tmp_path / "run", START, history(seed))
    assert report.status is RunStatus.FINISHED, report.message
    assert report.steps == STEPS
    assert (report.samples.consumed, report.samples.lost, report.samples.duplicated) == (STEPS * BATCH, 0, 0)
    assert len(report.generations) > 30
    assert report.final_loss == pytest.approx(undisturbed.final_loss, abs=1e-9)
