"""A real Slurm that puts idle nodes to sleep: nothing that is asked for wakes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
from slurm_rig import REACT_S, START_S, Rig, telling, wait_for

pytestmark = pytest.mark.slurm

_CONF = """
SuspendProgram=/bin/true
ResumeProgram={resume}
SuspendTime=86400
SuspendTimeout=2
ResumeTimeout=60
"""


@pytest.fixture
def rig(slurm_installed: None) -> Iterator[Rig]:
    with Rig("preempt", nodes=4) as rig, telling(rig):
        yield rig


def test_sleeping_nodes_are_not_woken(rig: Rig) -> None:
    folder = rig.testbed.folder
    resume = folder / "resume"
    resume.write_text(f'#!/bin/sh\necho "$1" >> {folder}/resumed\n')
    resume.chmod(0o755)
    with rig.testbed.conf.open("a") as conf:
        conf.write(_CONF.format(resume=resume))
    rig.testbed.slurm("scontrol", "reconfigure")
    rig.testbed.slurm("scontrol", "update", "NodeName=n[3-4]", "State=POWER_DOWN")
    wait_for("two nodes sleep", lambda: _asleep(rig) == {"n3", "n4"}, REACT_S, rig.story)
    stranger = rig.others(1)
    rig.wait_job(stranger, "RUNNING")
    training = rig.submit("--nodes=1:4")
    training.wait_members(1)
    # No node is idle and awake, so it waits for the stranger's.
    job = training.wait_for("a request waits", training.harvest_jobs)[0]
    shown = rig.testbed.slurm("scontrol", "show", "job", job)
    assert "JobState=PENDING" in shown and "ExcNodeList=n[3-4]" in shown, shown
    training.wait_steps(30)
    assert _asleep(rig) == {"n3", "n4"}
    assert not (folder / "resumed").exists(), (folder / "resumed").read_text()
    rig.scancel(stranger)
    training.wait_members(2, START_S)
    assert _asleep(rig) == {"n3", "n4"}
    training.finish()


def _asleep(rig: Rig) -> set[str]:
    rows = rig.testbed.slurm("scontrol", "-o", "show", "node").splitlines()
    return {row.split()[0].removeprefix("NodeName=") for row in rows if "State=IDLE+POWERED_DOWN" in row}
