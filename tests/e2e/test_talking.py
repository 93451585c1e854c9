"""What a script prints, and what its main member writes: each line once, from the first one on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from local_rig import Box
from talking_training import Net

SCRIPT = str(Path(__file__).parent / "talking_training.py")
STEPS = 60


def talk(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("TALK")]


WHOLE = [
    "TALK all: the first line",
    "TALK before the loop: True",
    *(line for step in range(STEPS) for line in (f"TALK all: step {step}", f"TALK main: step {step}")),
    "TALK behind the loop",
]


def test_each_line_is_shown_once_whoever_is_main_and_what_it_saves_loads_without_fallow(box: Box) -> None:
    """Absorbed, rank 0 released, the next rank 0 killed, and an absorb again; extra state came with the rest."""
    file = box.folder / "saved.pt"
    words = [SCRIPT, "--kill", "n1", "--pace", "0.05", "--save", str(file)]
    done = box.finish(box.local(*words, schedule="+1@4,-m0@10,+1@30")).trained(STEPS, 480)
    assert done.members == [["n0", "n1"], ["n0", "n1", "n2"], ["n1", "n2"], ["n2"], ["n2", "n3"]]
    # Two agents write to one output: the order of their lines may change where one takes over from the other.
    assert sorted(talk(done.stderr)) == sorted(WHOLE)
    assert talk(done.stderr)[:4] == WHOLE[:4]
    saved: Any = torch.load(file, weights_only=True)
    model = Net()
    model.load_state_dict(saved["model"], strict=True)
    torch.optim.SGD(model.parameters(), lr=0.01).load_state_dict(saved["optimizer"])
    assert model.inner.scale["history"] == [STEPS - 1.0]


def test_in_a_fixed_world_rank_0_is_main_from_the_start(box: Box) -> None:
    done = box.fixed(2, SCRIPT)
    assert done.code == 0, done.stderr
    assert talk(done.stdout) == WHOLE


@pytest.mark.parametrize(
    ("fail", "error"),
    [("import", "ModuleNotFoundError: No module named 'no_such_module_of_mine'"), ("init", "ValueError: no data in")],
)
def test_a_script_that_fails_before_its_loop_shows_its_traceback(box: Box, fail: str, error: str) -> None:
    done = box.finish(box.local(SCRIPT, "--fail", fail, members=2))
    assert done.code != 0
    # Twice where the first one has ended before the other one, whose turn it is then, has come so far.
    assert talk(done.stderr) in (WHOLE[:1], 2 * WHOLE[:1])
    assert error in done.stderr
    assert f'File "{SCRIPT}", line' in done.stderr
