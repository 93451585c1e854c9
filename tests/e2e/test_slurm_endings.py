"""How jobs and runs end on a real Slurm: as planned, by preemption, or because an agent is gone or unheard."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from slurm_rig import WHEN_TOLD, Rig

from slurm_training import REACT_S
from waiting import gone, wait_for

ORPHAN_S = 300.0
"""No job of ours lives longer than this beyond what it is for."""
NODES = 6

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def shared(slurm_installed: None) -> Iterator[Rig]:
    """An agent that falls silent is soon given up."""
    # More than two runs hold: no base job that is asked for again takes a harvest node of the other run.
    with Rig("preempt", nodes=NODES, FALLOW_MEMBERSHIP__HEAD_PATIENCE_S="20") as rig:
        yield rig


def shown(rig: Rig, job: str) -> str:
    """What `scontrol show job` says of a job."""
    return rig.testbed.slurm("scontrol", "show", "job", job)


def after_ok(rig: Rig, job: str) -> str:
    """A job that is to start once `job` has succeeded; returns its id."""
    argv = ["sbatch", "--parsable", f"--dependency=afterok:{job}", "--time=1", "--output=/dev/null", "--wrap=true"]
    return rig.command(*argv).strip()


def agent_of(rig: Rig, job: str) -> psutil.Process:
    """The agent that runs in a job of one node; other testbeds on this machine have jobs of the same number."""
    for process in psutil.process_iter():
        try:
            # srun's own words are longer.
            is_agent = process.cmdline()[1:3] == ["-Pm", "fallow.agent"]
            if is_agent and process.environ().items() >= {**rig.testbed.env(), "SLURM_JOB_ID": job}.items():
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"job {job} has no agent")


def test_slurm_gets_the_exit_code_of_the_batch_script_and_jobs_that_depend_on_it_start_or_not(rig: Rig) -> None:
    """Two runs at once, one of which ends with 7 by its script's own will."""
    well, badly = rig.submit("--nodes=1:2"), rig.submit("--nodes=1:2", before="trap 'exit 7' EXIT")
    after_well, after_badly = after_ok(rig, well.job), after_ok(rig, badly.job)
    harvested = well.wait_members(2)[1]
    harvest = badly.job_of(badly.wait_members(2)[1])
    rig.command("fallow", "drain", well.run, harvested.node)
    drained = well.job_of(harvested)
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


def test_preempted_base_jobs_come_back(rig: Rig) -> None:
    """Slurm puts one back into the queue; for the other, which it may not requeue, the head submits another one.

    That one's script is started by a shell, which Slurm's warning ends at once.
    """
    again = rig.submit("--nodes=1:1", "--partition=scavenge", "--requeue")
    anew = rig.submit("--nodes=1:1", "--partition=scavenge", "--no-requeue", shell=True)
    for training in (again, anew):
        training.wait_members(1)
        training.wait_steps()
    other = rig.others(NODES)
    rig.wait_job(other, "RUNNING")
    anew.wait_for("the base job is submitted again", lambda: len(anew.base_jobs()) == 2)
    assert not again.view().status.ended
    rig.scancel(other)
    for training in (again, anew):
        training.wait_members(1)
        training.wait_steps()
        training.finish()
        assert not training.events("eject"), "they left in order"
        assert training.lines_after() == training.base_jobs()[-1:]
        assert rig.job_states()[training.base_jobs()[-1]] == "COMPLETED"
    assert len(again.base_jobs()) == 1
    assert ("Restarts=1" in shown(rig, again.job), "Restarts=1" in shown(rig, anew.job)) == (True, False)


def test_the_rest_of_a_script_does_not_run_where_its_agent_was_killed_or_the_head_has_let_go_of_it(rig: Rig) -> None:
    """Two runs at once. They go on in another base job, or on harvest nodes that came first; the lines run there."""
    frozen, killed = trainings = rig.submit("--nodes=1:2"), rig.submit("--nodes=1:2")
    for training in trainings:
        training.wait_members(2)
    agent = agent_of(rig, frozen.job)
    for process in (agent, *agent.children(recursive=True)):
        process.suspend()
    os.kill(agent_of(rig, killed.job).pid, signal.SIGKILL)
    for training in trainings:
        training.wait_for("the base job has ended", lambda: not alive(rig, training.job), ORPHAN_S)  # noqa: B023
        training.wait_members(2)
        training.finish()
        assert len(training.lines_after()) == 1
        assert training.job not in training.lines_after()
    assert not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE


def test_a_worker_that_is_killed_takes_its_node_along_and_the_node_comes_back_as_another_member(rig: Rig) -> None:
    """Two workers on each node: members are nodes, and ranks are workers."""
    training = rig.submit("--nodes=1:2", "--fallow=workers-per-node=2", before=WHEN_TOLD, reproducible=True)
    digest = training.undisturbed_digest()
    training.wait_steps()
    (training.folder / "grow").touch()
    base, lost = training.wait_members(2)
    assert [(m.rank, m.workers, len(m.pids)) for m in (base, lost)] == [(0, 2, 2), (2, 2, 2)]
    training.wait_steps()

    victim, sibling = reversed(lost.pids)
    os.kill(victim, signal.SIGKILL)
    training.wait_for("its node is ejected", lambda: training.changes("eject"))
    wait_for("its sibling has ended", lambda: gone(sibling), REACT_S, rig.story)
    _, returned = training.wait_members(2)
    assert (returned.node, returned.token, returned.workers) == (lost.node, lost.token, 2)
    assert returned.member != lost.member
    training.wait_steps()
    rig.command("fallow", "shrink", training.run, "--by=1")
    assert [m.pids for m in training.wait_members(1)] == [base.pids], "the same two processes all the time"
    training.wait_steps()

    report = training.finish()
    changes = [(one.kind, one.members) for one in report.generations]
    alone, both = [base.member], [base.member, returned.member]
    assert changes == [
        ("start", alone), ("absorb", [base.member, lost.member]), ("eject", alone), ("absorb", both), ("release", alone)
    ]  # fmt: skip
    assert report.steps_discarded <= 1
    assert report.final_digest == digest
    assert training.lines_after() == [training.job]


def alive(rig: Rig, job: str) -> bool:
    return rig.job_states()[job] in ("RUNNING", "COMPLETING", "PENDING")
