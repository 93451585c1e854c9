"""Members that die, stop, hang, crash or raise at named places of the training, which harm themselves there.

The places are in the script (`faulty_training.py`), so no test waits for a moment: inside the optimizer's step, while
a donor exports its state, while a newcomer loads it. The result has to be that of the same script under plain `python`,
to the last bit where it is reproducible.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil")

sys.path.insert(0, str(Path(__file__).parent))
from test_local import PLAIN, RUN_S, Box, Done, box

__all__ = ["box"]

SCRIPT = str(Path(__file__).parent / "faulty_training.py")
STEPS, BATCH = 80, 32
PROGRESS_S, LEASE_S = 4.0, 3.0
"""Deadlines of those who hang and of those who are silent besides, where hangs are tested."""

DEADLINES = {"FALLOW_MEMBERSHIP__PROGRESS_S": str(PROGRESS_S), "FALLOW_MEMBERSHIP__LEASE_S": str(LEASE_S)}

REDONE_S = 6.0
"""From such an end to the next finished step of the others, at most: 1 s, and what a busy machine adds."""

SOON_S = 0.5
"""What survivors finish by then needs nobody who hangs. Shorter than the deadlines by far, longer than a step."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plain")
    words = [sys.executable, SCRIPT, "--folder", str(folder), "--pace", "0", "--steps", str(STEPS)]
    environ = os.environ | PLAIN | {"FALLOW_REPRODUCIBLE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(words, check=True, timeout=RUN_S, capture_output=True, env=environ)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def train(box: Box, *harms: str, members: int, schedule: str = "", **environ: str) -> Done:
    words = [SCRIPT, "--folder", str(box.folder), "--steps", str(STEPS), *harms]
    return box.finish(box.local(*words, members=members, schedule=schedule, **environ))


def same(done: Done, undisturbed: dict[str, Any]) -> None:
    done.trained(STEPS, STEPS * BATCH)
    assert done.result["loss"] == pytest.approx(undisturbed["loss"], abs=1e-9)
    for name, value in undisturbed["weights"].items():
        flat = [pytest.approx(row, abs=1e-9) for row in value] if isinstance(value, list) else value
        assert done.result["weights"][name] == flat, name


def gone(done: Done, worker: str, words: str) -> bool:
    """A generation without this worker says so, and why."""
    reasons = [generation["reason"] for generation in done.report["generations"]]
    return any(f"{worker} (" in reason and words in reason for reason in reasons)


def held_up_s(box: Box, harm: str, survivor: str) -> float:
    """From a harm to the end of the survivor's next step. The one at work, which needs nobody any more, is none."""
    began = float((box.folder / harm).read_text())
    ends = [float(line.split()[1]) for line in (box.folder / f"steps-{survivor}").read_text().splitlines()]
    return next(end for end in ends if end > began + SOON_S) - began


def test_kills_inside_the_optimizer_of_a_donor_of_a_newcomer_and_of_two_at_once(
    box: Box, undisturbed: dict[str, Any]
) -> None:
    harms = ["kill:n0:opt10", "kill:n1:donate", "kill:n5:load", "kill:n2:60", "kill:n3:60"]
    done = train(box, *harms, members=4, schedule="+1@20,+1@40")
    same(done, undisturbed)
    assert {path.name for path in box.folder.glob("kill-*")} == {f"kill-n{i}" for i in (0, 1, 5, 2, 3)}
    assert done.members[-1] == ["n4"]
    for generation in done.report["generations"][1:]:
        assert generation["pause_s"] is None or generation["pause_s"] < 20
    assert done.report["steps_discarded"] <= 5, "at most one step for each"


def test_s23_exceptions_and_crashes_anywhere_cost_one_member_each(box: Box, undisturbed: dict[str, Any]) -> None:
    """Inside the optimizer's step, in a donor (rank 0), in a newcomer; and a newcomer that is stopped."""
    harms = ["raise:n1:opt10", "segfault:n2:opt20", "raise:n0:donate", "raise:n4:load", "stop:n5:load"]
    done = train(box, *harms, members=4, schedule="+1@30,+1@50")
    same(done, undisturbed)
    for worker in ("n0", "n1", "n4"):
        assert gone(done, worker, f"ValueError: {worker} raises on purpose"), worker
    assert gone(done, "n2", "killed by signal 11")
    assert gone(done, "n5", "one of its processes is stopped")
    assert done.members[-1] == ["n3"]
    assert done.report["steps_discarded"] <= len(harms), "at most one step for each"


@pytest.mark.soak
def test_s23_hangs_anywhere_hold_the_others_up_for_no_longer_than_the_deadline(
    box: Box, undisturbed: dict[str, Any]
) -> None:
    """Inside the optimizer's step of rank 0, in a donor, in a newcomer; with and without the GIL."""
    hangs = {
        "hang:n0:opt10": (PROGRESS_S, "no progress"),
        "spin:n1:donate": (LEASE_S, "silent"),
        "hang:n4:load": (PROGRESS_S, "no progress"),
    }
    done = train(box, *hangs, members=3, schedule="+1@20,+1@40", FALLOW_REPRODUCIBLE="1", **DEADLINES)
    done.trained(STEPS, STEPS * BATCH)
    assert done.result == undisturbed, "not the same bits"
    assert done.members[-1] == ["n2", "n3"]
    assert done.report["steps_discarded"] <= len(hangs), "at most one step for each"
    for hang, (deadline_s, words) in hangs.items():
        kind, worker, _ = hang.split(":")
        assert gone(done, worker, words), worker
        assert held_up_s(box, f"{kind}-{worker}", "n2") < deadline_s + REDONE_S, worker


def test_hangs_are_ended_at_their_deadlines_and_an_exception_on_every_member_ends_the_run(box: Box) -> None:
    done = train(
        box,
        *("hang:n1:10", "spin:n2:20", "raise:all:40"),
        members=4,
        **DEADLINES,
    )
    assert done.code == 70
    assert (done.report["status"], done.report["steps"]) == ("failed", 40)
    reasons = [generation["reason"] for generation in done.report["generations"]]
    assert any("n1" in reason and "no progress" in reason for reason in reasons)
    assert any("n2" in reason and "silent" in reason for reason in reasons)
    # Who raises first may be gone before the other one comes to that step, but not the other way round.
    raised_at = {path.name.removeprefix("raise-"): float(path.read_text()) for path in box.folder.glob("raise-*")}
    assert raised_at.keys() == {"n0", "n3"}
    assert done.members[-1] in (["n0", "n3"], [max(raised_at, key=raised_at.__getitem__)])
    assert "raises on purpose (step 40, on n" in done.report["message"]
    assert 'raise ValueError(f"{WORKER} raises on purpose")' in done.report["traceback"]
    assert done.stderr.splitlines()[-1].startswith("fallow: run is failed: ValueError: n")
    log = next(box.folder.glob("fallow-local-*/state/runs/*/logs/n1.log")).read_text()
    assert "most recent call first" in log, "where it hung is in its log"
    assert "threading.py" in log
    assert box.logs.count("raises on purpose\n") == 2, "each member tried the step once"
