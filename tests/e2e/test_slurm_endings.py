"""How jobs and runs end on a real Slurm: by scancel, by preemption, as planned, and when the head has let go of one."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import psutil
import pytest
from slurm_rig import Rig, telling

from fallow.model import AllocationState, RunStatus
from slurm_training import REACT_S, START_S, Training, wait_for

ORPHAN_S = 180.0
"""No job of ours lives longer than this beyond what it is for."""

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def with_grace(slurm_installed: None) -> Iterator[Rig]:
    """Preempted jobs get SIGTERM 10 s before their end. An agent that falls silent is given up after 10 s."""
    with Rig("preempt", nodes=4, FALLOW_MEMBERSHIP__HEAD_PATIENCE_S="10") as rig:
        yield rig


@pytest.fixture(scope="module")
def without_grace(slurm_installed: None) -> Iterator[Rig]:
    with Rig("nograce", nodes=2) as rig:
        yield rig


@pytest.fixture
def rig(with_grace: Rig) -> Iterator[Rig]:
    with telling(with_grace):
        yield with_grace


def shown(rig: Rig, job: str) -> str:
    """What `scontrol show job` says of a job."""
    return rig.testbed.slurm("scontrol", "show", "job", job)


def after_ok(rig: Rig, job: str) -> str:
    """A job that is to start once `job` has succeeded; returns its id."""
    argv = ["sbatch", "--parsable", f"--dependency=afterok:{job}", "--time=1", "--output=/dev/null", "--wrap=true"]
    return rig.command(*argv).strip()


def agent_of(job: str) -> psutil.Process:
    """The agent that runs in a job of one node."""
    for process in psutil.process_iter():
        try:
            # srun's own words are longer.
            is_agent = process.cmdline()[1:3] == ["-m", "fallow.agent"]
            if is_agent and process.environ().get("SLURM_JOB_ID") == job:
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"job {job} has no agent")


def test_scancel_of_the_base_job_ends_the_run(rig: Rig) -> None:
    training = rig.submit("--nodes=1:2")
    training.wait_members(2)
    before = training.jobs()
    rig.scancel(training.job)
    training.wait_for("cancelled", lambda: training.view().status is RunStatus.CANCELLED)
    training.wait_jobs_gone()
    assert training.jobs() == before, "something was requested after the scancel"
    assert training.lines_after() == []
    assert training.view().message == f"job {training.job}, its base job, was cancelled"


def test_slurm_gets_the_exit_code_of_the_batch_script_and_jobs_that_depend_on_it_start_or_not(rig: Rig) -> None:
    """Two runs at once, one of which ends with 7 by its script's own will."""
    well, badly = rig.submit("--nodes=1:2"), rig.submit("--nodes=1:2", before="trap 'exit 7' EXIT")
    after_well, after_badly = after_ok(rig, well.job), after_ok(rig, badly.job)
    harvested = well.wait_members(2)[1]
    badly.wait_members(2)
    (harvest,) = badly.harvest_jobs()
    rig.command("fallow", "drain", well.run, harvested.node)
    drained = next(job for job, token in well.jobs().items() if token == harvested.token)
    rig.wait_job(drained, "COMPLETED")
    well.finish()
    rig.wait_job(after_well, "COMPLETED")
    states, came = rig.job_states(), " ".join(event.text for event in well.events("node"))
    # One that was asked for in the drained one's place may not have started by then.
    assert {states[job] for job, token in well.jobs().items() if job in states and token in came} == {"COMPLETED"}
    assert "ExitCode=0:0" in shown(rig, well.job)
    assert well.lines_after() == [well.job]

    badly.finish()
    rig.wait_job(badly.job, "FAILED")
    assert "ExitCode=7:0" in shown(rig, badly.job)
    # The rest of the script, its traps included, is the base job's alone.
    rig.wait_job(harvest, "COMPLETED")
    wait_for("never satisfied", lambda: "DependencyNeverSatisfied" in shown(rig, after_badly), REACT_S, rig.story)
    rig.scancel(after_badly)


@pytest.mark.parametrize("grace", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_preempted_base_jobs_come_back(with_grace: Rig, request: pytest.FixtureRequest, grace: bool) -> None:
    """Slurm puts one back into the queue; for the other, which it may not requeue, the head submits another one."""
    rig: Rig = with_grace if grace else request.getfixturevalue("without_grace")
    with telling(rig):
        again, anew = (rig.submit("--nodes=1:1", "--partition=scavenge", how) for how in ("--requeue", "--no-requeue"))
        for training in (again, anew):
            training.wait_members(1)
            training.wait_steps()
        other = rig.others(4 if grace else 2)
        rig.wait_job(other, "RUNNING")
        anew.wait_for("the base job is submitted again", lambda: len(anew.base_jobs()) == 2)
        assert not again.view().status.ended
        rig.scancel(other)
        for training in (again, anew):
            training.wait_members(1)
            training.wait_steps()
            training.finish()
            assert training.lines_after() == training.base_jobs()[-1:]
            assert rig.job_states()[training.base_jobs()[-1]] == "COMPLETED"
        assert len(again.base_jobs()) == 1
        assert ("Restarts=1" in shown(rig, again.job), "Restarts=1" in shown(rig, anew.job)) == (True, False)


def running(training: Training) -> list[str | None]:
    """Jobs that run for the run, as the head says."""
    return [a.job_id for a in training.view().allocations if a.state is AllocationState.RUNNING]


def let_go_of_base(rig: Rig) -> tuple[Training, psutil.Process]:
    """A run whose head has given its base job up, because all processes there stand still; and their agent."""
    training = rig.submit("--nodes=1:2")
    training.wait_members(2)
    agent = agent_of(training.job)
    stopped = [agent, *agent.children(recursive=True)]
    for process in stopped:
        process.suspend()
    try:
        training.wait_for(
            "the head lets go of the base job",
            lambda: training.job not in running(training),
            START_S,
        )
    except BaseException:
        for process in stopped:
            process.resume()
        raise
    return training, agent


def test_a_base_job_that_the_head_has_let_go_of_ends(rig: Rig) -> None:
    training, agent = let_go_of_base(rig)
    training.wait_for(
        "its job has ended",
        lambda: rig.job_states()[training.job] not in ("RUNNING", "COMPLETING", "PENDING"),
        ORPHAN_S,
    )
    assert not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE
    assert training.lines_after() == []
    # The head asks for another one, and the lines after `fallow run` run there.
    training.wait_for("another base job", lambda: len(training.base_jobs()) == 2)
    training.wait_members(2, START_S)
    training.finish()
    assert len(training.lines_after()) == 1
    assert training.job not in training.lines_after()


@pytest.mark.soak
def test_fallow_cancel_ends_a_base_job_that_the_head_has_let_go_of(rig: Rig) -> None:
    training, _ = let_go_of_base(rig)
    rig.command("fallow", "cancel", training.run)
    training.wait_for("no job of it is left", lambda: not training.jobs_alive(), ORPHAN_S)
    assert training.lines_after() == []


def test_the_rest_of_a_script_does_not_run_where_the_agent_was_killed(rig: Rig) -> None:
    """The training goes on elsewhere."""
    training = rig.submit("--nodes=1:2")
    training.wait_members(2)
    os.kill(agent_of(training.job).pid, signal.SIGKILL)
    training.wait_for("its job has ended", lambda: rig.job_states()[training.job] not in ("RUNNING", "COMPLETING"))
    assert training.lines_after() == []
    training.wait_members(2)
    training.finish()
    assert len(training.lines_after()) == 1
    assert re.fullmatch(r"\d+", training.lines_after()[0])
