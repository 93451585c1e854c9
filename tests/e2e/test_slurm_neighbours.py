"""Others' jobs on a real Slurm that preempts nobody: they get our nodes at once. And slurmctld may go away."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator

import pytest
from slurm_rig import Rig

from slurm_training import REACT_S, START_S
from waiting import wait_for

pytestmark = pytest.mark.slurm

POLL_S = 5.0
"""At most between two polls while we hold nodes that Slurm takes from nobody."""
SOON_S = 60.0
"""Of half an hour that our jobs last. What it takes where the machine is not busy: `make bench ARGS=harvest`."""


@pytest.fixture(scope="module")
def shared(slurm_installed: None) -> Iterator[Rig]:
    # Harvest jobs last longer than a test.
    settings = {"FALLOW_HARVEST__ALLOW_WITHOUT_PREEMPTION": "true", "FALLOW_HARVEST__MAX_MINUTES": "30"}
    with Rig("plain", nodes=4, **settings) as rig:
        yield rig


def test_who_waits_gets_our_newest_node_and_keeps_it(rig: Rig) -> None:
    first, second = rig.others(1), rig.others(1)
    rig.wait_job(second, "RUNNING")
    training = rig.submit("--nodes=1:3")
    older = training.wait_members(2)[1]
    rig.scancel(second)
    newer = next(m for m in training.wait_members(3)[1:] if m.member != older.member)
    before = len(training.events("submit"))

    other = rig.others(1)
    rig.wait_job(other, "RUNNING")
    shown = rig.testbed.slurm("scontrol", "-o", "show", "job", other)
    assert f" NodeList={newer.node} " in shown, "the newest goes"
    assert _waited_s(shown) <= SOON_S
    assert {m.member for m in training.wait_members(2)} == {"n0", older.member}
    training.wait_steps()
    # Nothing was asked for in between, and nothing waits that could take the next node from others.
    assert len(training.events("submit")) == before
    assert not training.events("eject", "failed", "lost")
    assert [f"job {other} of " in e.text for e in training.changes("release")] == [True]
    delayed = wait_for("the delay is known", lambda: rig.head_view().others_delayed, REACT_S)
    assert delayed.jobs == 1
    assert 0.0 < delayed.max_s <= SOON_S
    assert json.loads(rig.command("fallow", "usage", "--json"))["others_delayed"]["jobs"] == 1
    assert rig.head_view().poll_interval_s <= POLL_S

    rig.scancel(first, other)
    training.wait_members(3)
    training.finish()


def _waited_s(shown: str) -> float:
    return _at(shown, "StartTime") - _at(shown, "SubmitTime")


def _at(shown: str, key: str) -> float:
    """Unix time, in whole seconds."""
    found = re.search(rf" {key}=(\S+)", shown)
    assert found is not None, shown
    return time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S"))


@pytest.mark.soak
def test_a_slurmctld_that_dies_or_hangs_ends_no_allocation(rig: Rig) -> None:
    training = rig.submit("--nodes=1:2", "--time=10", steps=1200)
    members = [(m.member, m.pids[0]) for m in training.wait_members(2)]
    # By then slurmctld has written down that the jobs run: one that is killed earlier comes back without knowing.
    training.wait_steps(80)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        slurmctld = rig.testbed.daemon_pid("slurmctld")
        os.kill(slurmctld, number)
        try:
            wait_for("the head has noticed", lambda: rig.head_view().slurm_error, REACT_S, rig.story)
            training.wait_steps(10)
            assert [a.state for a in training.view().allocations].count("running") == 2
        finally:
            if number == signal.SIGKILL:
                rig.testbed.restart_slurmctld()
            else:
                os.kill(slurmctld, signal.SIGCONT)
        wait_for("Slurm answers again", lambda: rig.head_view().slurm_error is None, START_S, rig.story)
        polls = rig.head_view().polls
        wait_for("three polls more", lambda: rig.head_view().polls >= polls + 3, START_S, rig.story)  # noqa: B023
        assert [a.state for a in training.view().allocations].count("running") == 2
        assert [(m.member, m.pids[0]) for m in training.members()] == members
    assert not training.events("eject", "failed", "lost", "orphan")
    training.finish()
