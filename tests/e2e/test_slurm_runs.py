"""Whole runs on a real Slurm: grown, released, preempted, cancelled, without their head; and never a sample is lost."""

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from slurm_rig import POLL_S, WHEN_TOLD, Rig, environment_of, telling

from fallow.model import RunStatus
from slurm_training import REACT_S, START_S
from waiting import wait_for

JOINED, LEFT = ("absorb", "mixed"), ("release", "mixed")
"""A node whose successor is ready leaves as that comes: one change, mixed."""
NODES = 6

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def shared(slurm_installed: None) -> Iterator[Rig]:
    with Rig("preempt", nodes=NODES) as rig:
        yield rig


@pytest.fixture(scope="module")
def short(slurm_installed: None) -> Iterator[Rig]:
    """Harvest jobs of two minutes: most of one may go by until a node trains."""
    # Ten: when the jobs of two minutes are asked for again, all at about the same time, no base job
    # of theirs finds the nodes taken and preempts a harvest node.
    with Rig("preempt", nodes=10, FALLOW_HARVEST__MAX_MINUTES="2") as rig:
        yield rig


class Begun:
    """Three runs whose jobs have a time limit of two minutes.

    They train while the tests of other runs are at it, which takes longer than that.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        submit = partial(rig.submit, pace_s=0.3, steps=800)
        self.harvested = submit("--nodes=1:2", "--time=60")
        "one base node with time enough, one harvest node at a time"
        self.ending = submit("--nodes=1:2", "--time=2")
        "its base job has two minutes, too"
        self.alone = submit("--nodes=1:1", "--time=2")
        "one node and no other: when it goes, nobody is left"
        self.trainings = (self.harvested, self.ending, self.alone)
        for training in self.trainings:
            training.wait_steps(seconds=START_S)

    def finish(self) -> None:
        """Let each be left by a node and go on, and then end."""
        before = self.rig.head_view()
        for training, kinds in ((self.harvested, LEFT), (self.ending, LEFT), (self.alone, ("suspend",))):
            training.wait_for("a node left before its walltime", partial(training.changes, *kinds), START_S)
        self.alone.wait_for("the run goes on", lambda: self.alone.changes("start")[1:], START_S)
        more = partial(self.harvested.changes, *JOINED)
        self.harvested.wait_for("another harvest node", lambda: len(more()) > 1, START_S)
        self.ending.wait_for("the base worker left", lambda: "n0" not in {m.member for m in self.ending.members()})
        for training in self.trainings:
            training.wait_steps()
        now = self.rig.head_view()
        self.polls, self.seconds = now.polls - before.polls, now.uptime_s - before.uptime_s
        self.reports = {training.run: training.finish() for training in self.trainings}
        self.states = self.rig.job_states()


@pytest.fixture(scope="module")
def begun(short: Rig) -> Begun:
    return Begun(short)


@pytest.fixture
def rig(shared: Rig, begun: Begun) -> Iterator[Rig]:
    with telling(shared):
        yield shared


def test_jobs_that_are_cancelled_from_outside_leave_in_order(rig: Rig) -> None:
    training = rig.submit("--nodes=1:2", "--fallow=outlive-base")
    harvested = training.wait_members(2)[1]
    rig.scancel(training.job_of(harvested))
    training.wait_for("it left", lambda: harvested.member not in {m.member for m in training.members()})
    training.wait_members(2)
    training.wait_for("it is known whose doing it was", lambda: training.events("cancelled"))
    rig.scancel(training.job)
    training.wait_for("n0 left", lambda: "n0" not in {m.member for m in training.members()})
    training.wait_steps()
    report = training.finish()

    assert not training.events("eject", "failed", "lost")
    assert report.steps_discarded == 0
    # Nobody asks for the base job again behind the user's back; the script ends in a job that is left.
    assert training.base_jobs() == [training.job]
    (last,) = training.lines_after()
    assert last in training.harvest_jobs()
    assert rig.job_states()[last] == "COMPLETED"


def test_a_cancelled_run_ends_all_its_jobs(rig: Rig) -> None:
    waiting = rig.submit("--nodes=1:2", "--begin=now+1hour")
    training = rig.submit("--nodes=1:2")
    members = training.wait_members(2)
    # Harvested nodes go and come by hand, too.
    rig.command("fallow", "pause", training.run)
    assert [m.allocation for m in training.wait_members(1)] == ["base"]
    rig.command("fallow", "resume", training.run)
    members = training.wait_members(2)
    rig.command("fallow", "cancel", training.run)
    training.wait_for("cancelled", lambda: training.view().status is RunStatus.CANCELLED)
    training.wait_jobs_gone()
    wait_for("its workers are gone", lambda: not any(psutil.pid_exists(m.pids[0]) for m in members), REACT_S)
    assert training.lines_after() == []
    assert not training.events("eject", "failed", "lost")
    # A run whose base job is cancelled before it began is not wanted.
    assert waiting.view().status is RunStatus.WAITING
    assert waiting.jobs_alive() == [waiting.job]
    rig.scancel(waiting.job)
    waiting.wait_for("cancelled", lambda: waiting.view().status is RunStatus.CANCELLED)
    waiting.wait_jobs_gone()


def test_a_run_whose_base_job_ends_before_an_agent_comes_has_failed(rig: Rig) -> None:
    """And it is not submitted again. What becomes of harvest jobs that come to nothing needs no real Slurm."""
    broken = rig.submit("--nodes=1:2", before="exit 3")
    broken.wait_for("failed", lambda: broken.view().status is RunStatus.FAILED)
    assert broken.view().message.startswith(f"job {broken.job} ended (FAILED) before its agent reached the head")
    broken.wait_jobs_gone()
    assert list(broken.jobs()) == [broken.job]


def test_s9_one_run_spans_the_components_of_a_heterogeneous_job(rig: Rig) -> None:
    training = rig.submit(heterogeneous=True)
    members = training.wait_members(4)
    base = [m for m in members if m.allocation == "base"]
    assert len(base) == 3
    assert len({m.token for m in base}) == 1
    assert len({m.node for m in members}) == 4
    training.wait_steps()
    training.finish()
    assert not training.events("eject", "failed", "lost", "refuse")
    assert training.lines_after() == [training.job]
    component = str(int(training.job) + 1)
    wait_for("both components are over", lambda: rig.job_states()[component] == "COMPLETED", REACT_S, rig.story)
    assert rig.job_states()[training.job] == "COMPLETED"


@pytest.fixture(scope="module")
def lasting(slurm_installed: None) -> Iterator[Rig]:
    """Preemption without grace, and harvest jobs for which the restart of a script pays."""
    with Rig("nograce", nodes=3, FALLOW_HARVEST__MAX_MINUTES="120") as rig, telling(rig):
        yield rig


def test_s2_a_run_grows_without_a_restart_and_survives_its_heads_absence_and_preemption_without_grace(
    lasting: Rig,
) -> None:
    rig = lasting  # a harvest node whose end is near would leave by itself
    training = rig.submit("--nodes=1:2", steps=1000, before=WHEN_TOLD)
    training.wait_members(1)
    training.wait_steps()
    (training.folder / "grow").touch()
    members = training.wait_members(2)
    base, harvested = members
    assert (base.allocation, harvested.allocation) == ("base", "harvest")
    training.wait_steps()
    kinds = "start", "absorb", "eject", "release", "mixed"
    assert [event.kind for event in training.changes(*kinds)] == ["start", "absorb"]
    # What comes before `fallow run` is the same in every job.
    jobs = [training.job, *training.harvest_jobs()]
    places = [(training.folder / f"place.{job}").read_text() for job in jobs]
    assert places == 2 * [f"{training.folder} {_umask()} an argument\n"]
    first, second = (environment_of(training.folder / f"env.{job}") for job in jobs)
    assert first == second

    rig.kill_head()
    training.wait_steps(20)
    rig.start_head()
    assert rig.head_view().term > 1
    assert [(m.member, m.pids[0]) for m in training.wait_members(2)] == [(m.member, m.pids[0]) for m in members]
    training.wait_steps()
    # The new head can do what the old one could: let a node go, take another one in.
    rig.command("fallow", "drain", training.run, harvested.node)
    training.wait_for("released", lambda: training.changes(*LEFT))
    training.wait_for("absorbed", lambda: len(training.changes(*JOINED)) > 1)
    # The drained one is idle, but of no use to the run until it is resumed.
    assert harvested.node not in [m.node for m in training.wait_members(2)]
    assert training.view().drained == [harvested.node]
    assert not training.events("eject", "refuse", "failed", "abort", "lost", "orphan")
    # Others take that node and the harvested one, and what they leave is harvested again.
    others = rig.others(2)
    rig.wait_job(others, "RUNNING")
    assert [m.member for m in training.wait_members(1)] == [base.member]
    training.wait_steps()
    rig.scancel(others)
    training.wait_members(2)
    training.finish()
    assert not training.events("refuse", "lost", "orphan", "cancelled")
    # One process all the time; the step that a loss interrupted may be begun again. The rest of the batch script, once.
    trace = training.trace(base.member)
    assert trace.pid == base.pids[0]
    steps = [step for _, step, _ in trace.steps]
    assert sorted(set(steps)) == list(range(steps[0], training.steps))
    assert training.lines_after() == [training.job]


def _umask() -> str:
    old = os.umask(0o077)
    os.umask(old)
    return f"{old:04o}"


@pytest.fixture(scope="module")
def minutes(short: Rig, begun: Begun) -> Begun:
    with telling(short):
        begun.finish()
    return begun


def test_s1_harvest_nodes_are_left_before_their_walltime_and_asked_for_again(minutes: Begun) -> None:
    training = minutes.harvested
    release = training.changes(*LEFT)[0]
    assert "walltime" in release.text
    assert not training.events("eject", "failed", "lost")
    # All in which an agent came ended themselves: Slurm had neither to warn nor to kill.
    came = {event.data["job"] for event in training.events("node") if "job" in event.data}
    assert len(came) > 2
    assert {minutes.states[job] for job in came} == {"COMPLETED"}
    # The base worker computed all the while.
    steps = [step for _, step, _ in training.trace("n0").steps]
    assert steps == list(range(steps[0], training.steps))
    assert training.lines_after() == [training.job]


def test_a_run_outlives_its_base_job(minutes: Begun) -> None:
    training = minutes.ending
    assert not training.events("eject", "failed", "lost")
    assert "TIMEOUT" not in {minutes.states[job] for job in training.jobs()}
    assert minutes.states[training.job] == "CANCELLED"
    # The rest of the script ran once, and not in the job that had to leave.
    assert len(training.lines_after()) == 1
    assert training.job not in training.lines_after()


def test_a_run_without_nodes_is_suspended_and_goes_on_by_itself(minutes: Begun) -> None:
    training, report = minutes.alone, minutes.reports[minutes.alone.run]
    assert not training.events("eject", "failed", "lost")
    assert "TIMEOUT" not in {minutes.states[job] for job in training.jobs()}
    written = training.events("checkpoint")[0]
    suspended = training.changes("suspend")[0]
    assert written.seq < suspended.seq
    first, second = report.generations[:2]
    assert (first.first_step, first.kind, second.kind) == (0, "start", "start")
    # From the very step at which it stopped.
    assert written.text == f"checkpoint of step {second.first_step}"
    # A node that leaves and its successor may be members of one generation, for the successor to get the state.
    done = {(generation, step) for trace in training.traces() for generation, step, _ in trace.steps}
    assert [step for _, step in sorted(done)] == list(range(training.steps))
    assert len(training.lines_after()) == 1


def test_usage_adds_up_to_what_slurm_allocated_and_slurm_is_asked_once_an_interval(short: Rig, minutes: Begun) -> None:
    # Polls begin an interval apart. One that had begun before may have ended then, and a slow one beside the next.
    assert 0 < minutes.polls <= minutes.seconds / POLL_S + 2, "whatever number of runs"
    spans = short.job_spans()
    for training in minutes.trainings:
        slurm_s = sum(spans[job] for job in training.jobs() if job in spans)

        def settled(run: str = training.run, slurm_s: float = slurm_s) -> dict[str, Any]:
            shown = json.loads(short.command("fallow", "usage", run, "--json"))
            done = abs(shown["total"]["allocated"]["node_s"] - slurm_s) < 1e-3
            return shown["total"] if done else {}

        total = training.wait_for(f"its jobs' {slurm_s} s are accounted for", settled)
        parts = [total[name]["node_s"] for name in ("base", "harvested", "wasted")]
        assert sum(parts) == pytest.approx(slurm_s)
        assert sum(cause["node_s"] for cause in total["causes"].values()) == pytest.approx(parts[2])
        assert total["causes"]["start_up"]["node_s"] > 0
        assert parts[0] > 0
        assert parts[1] > 0 or training is minutes.alone
        assert total["jobs"] == len(training.jobs())
    # What an account would say is said in words where Slurm keeps none.
    owner = json.loads(short.command("fallow", "usage", "--json"))["owner"]
    assert owner["notes"][0].startswith("the cluster has no accounting")
    assert owner["limits"] == []
    assert minutes.harvested.run in short.command("fallow", "usage")


def test_s2_a_preempted_node_is_left_within_the_grace(rig: Rig) -> None:
    """And one that Slurm takes for nobody is given back by the head."""
    training = rig.submit("--nodes=1:3")
    base = training.wait_members(3)[0]
    above = rig.others(NODES - 2)
    # Slurm preempts one of ours for it. Nobody but the head makes room for a job of our own tier; were that one
    # first, the other would take the room.
    rig.wait_job(above, "RUNNING")
    waits = rig.others(1, "scavenge")
    rig.wait_job(waits, "RUNNING")
    assert [m.member for m in training.wait_members(1)] == [base.member]
    training.wait_steps()
    rig.scancel(above, waits)
    # What they leave is harvested again.
    training.wait_members(3)
    training.finish()
    assert training.trace(base.member).pid == base.pids[0]
    assert "TIMEOUT" not in {rig.job_states()[job] for job in training.jobs()}
    assert not training.events("cancelled")
    assert not training.events("eject", "failed", "lost")
    assert training.lines_after() == [training.job]
    reasons = [event.text for event in training.events("release")]
    assert any("warned by Slurm" in text for text in reasons), reasons
    assert any(f"job {waits} of " in text for text in reasons), reasons


def test_a_script_that_knows_nothing_of_fallow_is_restarted_on_the_nodes_that_are_there(lasting: Rig) -> None:
    script = Path(__file__).with_name("restarted_training.py")
    training = lasting.submit("--nodes=2:3", words=f"--restart -- {script} . --told")

    def starts() -> list[list[int]]:
        path = training.folder / "starts"
        return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []

    training.wait_for("two nodes have started it", lambda: len(starts()) == 2, START_S)
    training.wait_for("why the newcomer waits", lambda: "waits for another" in training.view().message, START_S)
    # Of three that start at about the same time, whichever was last: on a busy machine it may be a base node's.
    newcomer = next(m for m in training.view().members if m.rank is None)
    assert f"{newcomer.member} ({newcomer.node}) waits for another" in training.view().message
    kept, lost = training.members()
    training.wait_for("there is something to go on from", (training.folder / "step").exists)
    # All scripts begin again in any case, so it need not wait any longer.
    os.kill(lost.pids[0], signal.SIGKILL)
    training.wait_for("both have started it again", lambda: len(starts()) == 4, START_S)
    assert {m.member for m in training.members()} == {kept.member, newcomer.member}
    assert sorted(start[:2] for start in starts()[2:]) == [[0, 2], [1, 2]]
    assert all(start[2] > 0 for start in starts()[2:]), "not from what it had saved"
    (training.folder / "hurry").touch()
    training.wait_for("the end of the run", lambda: training.view().status is RunStatus.FINISHED)
    training.wait_jobs_gone()
    assert training.lines_after() == [training.job]
