"""`--restart`: a script that knows nothing of Fallow under torchrun, with a real head, store and processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

SCRIPT = str(Path(__file__).with_name("restarted_training.py"))


def left_over(folder: Path) -> list[str]:
    """Living processes whose command line has the folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.parametrize(
    ("options", "scale"), [([], 1), pytest.param(["--ddp"], 12, marks=pytest.mark.soak)], ids=["plain", "ddp"]
)
def test_e1_a_plain_script_goes_on_from_what_it_saved_in_every_membership(
    tmp_path: Path, options: list[str], scale: int
) -> None:
    schedule = f"+1@{scale},-m1@{2 * scale},kill:0@{3 * scale}"
    words = ["local", "--members", "2", "--schedule", schedule, "--restart", "--json", "--", SCRIPT, str(tmp_path)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FALLOW_", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-m", "fallow.cli.main", *words, *options],
        env={**kept, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [generation["kind"] for generation in report["generations"]] == ["start", "absorb", "release", "eject"]
    members = [generation["members"] for generation in report["generations"]]
    assert members == [["n0", "n1"], ["n0", "n1", "n2"], ["n0", "n2"], ["n2"]]
    starts = [tuple(map(int, line.split())) for line in (tmp_path / "starts").read_text().splitlines()]
    assert {(0, 2), (1, 2), (0, 1)} <= {start[:2] for start in starts}
    begun = [step for rank, _, step in starts if rank == 0]
    assert begun == sorted(begun)
    assert begun[-1] > begun[0] == 0
    assert int((tmp_path / "step").read_text()) == begun[-1] + 20
    end = time.monotonic() + 120
    while left := left_over(tmp_path):
        assert time.monotonic() < end, left
        time.sleep(0.05)
