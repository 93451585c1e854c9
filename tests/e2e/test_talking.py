"""What a script prints, and what its main member writes: each line once, from the first one on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("psutil")

sys.path.insert(0, str(Path(__file__).parent))
import torch
from talking_training import Net
from test_local import Box, box

__all__ = ["box"]

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


def test_each_line_is_shown_once_whoever_is_main(box: Box) -> None:
    """Absorbed, rank 0 released, the next rank 0 killed; and an absorb again."""
    words = [SCRIPT, "--kill", "n1", "--pace", "0.05"]
    done = box.finish(box.local(*words, members=2, schedule="+1@4,-m0@10,+1@30")).trained(STEPS, 480)
    assert done.members == [["n0", "n1"], ["n0", "n1", "n2"], ["n1", "n2"], ["n2"], ["n2", "n3"]]
    # Two agents write to one output: the order of their lines may change where one takes over from the other.
    assert sorted(talk(done.stderr)) == sorted(WHOLE)
    assert talk(done.stderr)[:4] == WHOLE[:4]


def test_one_member_alone_is_heard(box: Box) -> None:
    done = box.finish(box.local(SCRIPT, members=1)).trained(STEPS, 480)
    assert talk(done.stderr) == WHOLE


@pytest.mark.parametrize("size", [1, 2])
def test_in_a_fixed_world_rank_0_is_main_from_the_start(box: Box, size: int) -> None:
    done = box.fixed(size, SCRIPT)
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


def test_what_the_main_member_saves_loads_strictly_without_fallow(box: Box) -> None:
    """The one that saves it has joined on the way; extra state came with the rest."""
    file = box.folder / "saved.pt"
    words = [SCRIPT, "--save", str(file), "--pace", "0.05"]
    done = box.finish(box.local(*words, members=1, schedule="+1@4,-m0@10")).trained(STEPS, 480)
    assert done.members[-1] == ["n1"]
    saved: Any = torch.load(file, weights_only=True)
    model = Net()
    model.load_state_dict(saved["model"], strict=True)
    torch.optim.SGD(model.parameters(), lr=0.01).load_state_dict(saved["optimizer"])
    assert model.inner.scale["history"] == [STEPS - 1.0]
