"""`--restart`: a script that knows nothing of Fallow under torchrun, with a real head, store and processes."""

from __future__ import annotations

import sys
from pathlib import Path

from local_rig import Box

SCRIPT = str(Path(__file__).with_name("restarted_training.py"))


def test_e1_a_plain_script_goes_on_from_what_it_saved_in_every_membership(box: Box) -> None:
    options = ["--members", "2", "--schedule", "+1@1,-m1@2,kill:0@3", "--restart", "--json"]
    words = [sys.executable, "-m", "fallow.cli.main", "local", *options, "--", SCRIPT, str(box.folder)]
    done = box.finish(box.start(*words))
    assert done.code == 0, done.stderr
    assert done.kinds == ["start", "absorb", "release", "eject"]
    assert done.members == [["n0", "n1"], ["n0", "n1", "n2"], ["n0", "n2"], ["n2"]]
    starts = [tuple(map(int, line.split())) for line in (box.folder / "starts").read_text().splitlines()]
    assert {(0, 2), (1, 2), (0, 1)} <= {start[:2] for start in starts}
    begun = [step for rank, _, step in starts if rank == 0]
    assert begun == sorted(begun)
    assert begun[-1] > begun[0] == 0
    assert int((box.folder / "step").read_text()) == begun[-1] + 20
