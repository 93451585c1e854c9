"""`--restart`: a script that knows nothing of Fallow under torchrun, with a real head, store and processes."""

import os
import signal
import sys
from pathlib import Path

from local_rig import Box, ranked

from fallow.control.client import call
from fallow.model import RunView
from waiting import wait_for

SCRIPT = str(Path(__file__).with_name("restarted_training.py"))


def test_e1_a_plain_script_goes_on_from_what_it_saved_in_every_membership(box: Box) -> None:
    """One comes; when the script has made a step with it, one leaves, and after another step one is killed."""
    options = ["--members", "2", "--schedule", "+1@1", "--restart", "--json"]
    words = [sys.executable, "-m", "fallow.cli.main", "local", *options, "--", SCRIPT, str(box.folder)]
    process = box.start(*words)
    view = train(box, "n0", "n1", "n2")
    (head_file,) = box.folder.glob("fallow-local-*/state/head.json")
    call(head_file, "release", run=view.run, members=["n1"])
    view = train(box, "n0", "n2")
    for pid in next(member.pids for member in view.members if member.member == "n0"):
        os.kill(pid, signal.SIGKILL)
    done = box.finish(process)
    assert done.code == 0, done.stderr
    assert done.kinds == ["start", "absorb", "release", "eject"]
    assert done.members == [["n0", "n1"], ["n0", "n1", "n2"], ["n0", "n2"], ["n2"]]
    begun = [step for rank, _, step in starts(box) if rank == 0]
    assert begun == sorted(begun)
    assert begun[-1] > begun[0] == 0
    assert step(box) == begun[-1] + 20


def train(box: Box, *members: str) -> RunView:
    """Wait until these are the members, and their scripts have started together and made a step."""
    view = box.until(lambda view: view.change is None and ranked(view) == list(members))
    size = len(members)

    def trains() -> bool:
        last = starts(box)[-size:]
        return {one[:2] for one in last} == {(rank, size) for rank in range(size)} and step(box) > max(last)[2]

    wait_for(f"{members} have made a step together", trains)
    return view


def starts(box: Box) -> list[tuple[int, ...]]:
    """Rank, size and first step of each start."""
    file = box.folder / "starts"
    return [tuple(map(int, line.split())) for line in file.read_text().splitlines()] if file.exists() else []


def step(box: Box) -> int:
    """The one that is saved."""
    file = box.folder / "step"
    return int(file.read_text()) if file.exists() else 0
