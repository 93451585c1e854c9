"""Members that die, stop, hang, crash or raise at named places of the training, which harm themselves there.

The places are in the script (`faulty_training.py`), so no test waits for a moment: inside the optimizer's step, while
a donor exports its state, while a newcomer loads it. The result has to be that of the same script under plain `python`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil")

sys.path.insert(0, str(Path(__file__).parent))
from test_local import RUN_S, Box, Done, box

__all__ = ["box"]

SCRIPT = str(Path(__file__).parent / "faulty_training.py")
STEPS, BATCH = 80, 32

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plain")
    words = [sys.executable, SCRIPT, "--folder", str(folder), "--pace", "0", "--steps", str(STEPS)]
    subprocess.run(words, check=True, timeout=RUN_S, capture_output=True)
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


def test_kills_inside_the_optimizer_of_a_donor_of_a_newcomer_and_of_two_at_once(
    box: Box, undisturbed: dict[str, Any]
) -> None:
    harms = ["kill:w0:opt10", "kill:w1:donate", "kill:w5:load", "kill:w2:60", "kill:w3:60"]
    done = train(box, *harms, members=4, schedule="+1@20,+1@40")
    same(done, undisturbed)
    assert {path.name for path in box.folder.glob("kill-*")} == {f"kill-w{i}" for i in (0, 1, 5, 2, 3)}
    assert done.members[-1] == ["w4"]
    for generation in done.report["generations"][1:]:
        assert generation["pause_s"] is None or generation["pause_s"] < 5
    assert done.report["steps_discarded"] <= 5, "at most one step for each"


def test_an_exception_a_crash_and_a_stopped_newcomer_cost_one_member_each(
    box: Box, undisturbed: dict[str, Any]
) -> None:
    done = train(box, "raise:w1:10", "segfault:w2:20", "stop:w4:load", members=4, schedule="+1@30")
    same(done, undisturbed)
    reasons = [generation["reason"] for generation in done.report["generations"]]
    assert any("w1" in reason and "ValueError: w1 raises on purpose" in reason for reason in reasons)
    assert any("w2" in reason and "killed by signal 11" in reason for reason in reasons)
    assert any("w4" in reason and "its process is stopped" in reason for reason in reasons)
    assert done.members[-1] == ["w0", "w3"]


def test_hangs_are_ended_at_their_deadlines_and_an_exception_on_every_member_ends_the_run(box: Box) -> None:
    done = train(
        box,
        *("hang:w1:10", "spin:w2:20", "raise:all:40"),
        members=4,
        FALLOW_MEMBERSHIP__PROGRESS_S="6",
        FALLOW_MEMBERSHIP__LEASE_S="4",
    )
    assert done.code == 70
    assert (done.report["status"], done.report["steps"]) == ("failed", 40)
    reasons = [generation["reason"] for generation in done.report["generations"]]
    assert any("w1" in reason and "no progress" in reason for reason in reasons)
    assert any("w2" in reason and "silent" in reason for reason in reasons)
    assert done.members[-1] == ["w0", "w3"]
    assert "raises on purpose (step 40, on w" in done.report["message"]
    assert 'raise ValueError(f"{WORKER} raises on purpose")' in done.report["traceback"]
    assert done.stderr.splitlines()[-1].startswith("fallow local: run is failed: ValueError: w")
    log = next(box.folder.glob("fallow-local-*/state/runs/*/logs/w1.log")).read_text()
    assert "most recent call first" in log, "where it hung is in its log"
    assert "threading.py" in log
    assert box.logs.count("raises on purpose\n") == 2, "each member tried the step once"
