"""The simulated Slurm against a real one: the same jobs at the same times start in the same order, and when it did."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from fallow.model import PartitionInfo
from fallow.sim.slurm import SlurmSim
from fallow.sim.types import Scheduler, SimJob, SimNode, Site
from fallow.testbed.cluster import Testbed
from fallow.testbed.conf import GRACE_S, KILL_WAIT_S, PARTITION, SCAVENGE, Profile

pytestmark = pytest.mark.slurm
MakeTestbed = Callable[..., Testbed]
DATA = Path(__file__).parents[1] / "data" / "sim"
LOOK_S = 5.0
PLAYS = 4
MAIN_S = 3.0
"The main scheduler starts a job so long after what lets it start; Slurm tells whole seconds, and looks once a second."


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job of a load."""

    at_s: float
    name: str
    partition: str
    nodes: int
    limit: int
    "minutes"
    runs_s: float
    backfill: bool = False
    "True: backfill starts the job, at a time of which only the interval is known"


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of a job."""

    submit_at: float
    start_at: float
    end_at: float
    limit: str
    state: str


def test_starts_are_those_of_a_real_slurm(make_testbed: MakeTestbed) -> None:
    """Play two loads at once, as nearly all of the time is waiting.

    On a busy machine the real Slurm may start a job late, but not the same job in each play.
    """
    loads = {
        profile: msgspec.json.decode((DATA / f"{profile}.json").read_bytes(), type=list[Line])
        for profile in (Profile.PLAIN, Profile.PREEMPT)
    }
    always: dict[Profile, set[str]] = {}
    for _ in range(PLAYS):
        testbeds = [make_testbed(nodes=4, profile=profile, bf_interval=5) for profile in loads]
        with ThreadPoolExecutor() as pool:
            played = list(pool.map(play, testbeds, loads.values()))
        for testbed, (profile, load), real in zip(testbeds, list(loads.items()), played, strict=True):
            deviations = set(
                differences(load, real, simulate(testbed, load, real), testbed.layout.bf_interval + MAIN_S)
            )
            always[profile] = always.get(profile, deviations) & deviations
            if not always[profile]:
                del loads[profile]
        for testbed in testbeds:
            testbed.down()
        if not loads:
            return
    pytest.fail(f"not as a real Slurm: {always}")


def play(testbed: Testbed, load: list[Line]) -> dict[str, Outcome]:
    """Run the jobs on the real Slurm. Polls all the time, because Slurm forgets ended jobs after MinJobAge."""
    began, started = time.monotonic(), dict[str, Outcome]()
    for job in load:
        while (left_s := began + job.at_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_S))
            started |= look(testbed)
        options = [f"--job-name={job.name}", f"--nodes={job.nodes}", f"--time={job.limit}"]
        options += [f"--partition={job.partition}", "--exclusive", "--no-requeue", "--output=/dev/null", "--chdir=/"]
        testbed.slurm("sbatch", *options, f"--wrap=exec sleep {job.runs_s:g}")
    deadline = began + load[-1].at_s + 120.0 + 5.0 * len(load)
    while testbed.slurm("squeue", "-h", "-o", "%j"):
        assert time.monotonic() < deadline, f"jobs are left: {testbed.slurm('squeue')}"
        time.sleep(0.2)
        started |= look(testbed)
    return started | look(testbed)


def look(testbed: Testbed) -> dict[str, Outcome]:
    """The jobs that have started, by name."""
    text = testbed.slurm("env", "SLURM_TIME_FORMAT=%s", "squeue", "-h", "-t", "all", "-o", "%j|%V|%S|%e|%l|%T")
    rows = [line.split("|") for line in text.split()]
    return {
        name: Outcome(float(submit), float(start), float(end), limit, state)
        for name, submit, start, end, limit, state in rows
        if state != "PENDING"
    }


def simulate(testbed: Testbed, load: list[Line], real: dict[str, Outcome]) -> dict[str, Outcome]:
    """Run the same jobs on the simulated Slurm, with the submit times of the real Slurm."""
    jobs = sorted((job_of(j, real) for j in load), key=lambda j: j.submit_at)
    sim = SlurmSim(site(testbed), 0, jobs[0].submit_at, jobs)
    started: dict[str, Outcome] = {}
    end = max(outcome.start_at for outcome in real.values()) + 600.0
    while sim.next_at() <= end:
        sim.advance(sim.next_at())
        for job in sim.poll().jobs:
            if job.state == "RUNNING" and job.start_at is not None and job.time_limit_s is not None:
                minutes, seconds = divmod(round(job.time_limit_s), 60)
                at = real[job.job_id].submit_at
                state = "PREEMPTED" if job.preempt_at is not None else "COMPLETED"
                started[job.job_id] = Outcome(at, job.start_at, 0.0, f"{minutes}:{seconds:02}", state)
    return {name: msgspec.structs.replace(outcome, end_at=sim.run_times[name][1]) for name, outcome in started.items()}


def site(testbed: Testbed) -> Site:
    nodes, layout = testbed.layout.node_names, testbed.layout
    config = dict(
        (part.strip() for part in line.split("=", 1))
        for line in testbed.slurm("scontrol", "show", "config").splitlines()
        if "=" in line
    )
    partitions = [PartitionInfo(partition=PARTITION, nodes=nodes, max_time_s=86400.0, priority_tier=10)]
    if layout.profile is not Profile.PLAIN:
        scavenge = PartitionInfo(partition=SCAVENGE, nodes=nodes, preempt_mode="REQUEUE", grace_s=float(GRACE_S))
        partitions.append(scavenge)
    return Site(
        name="testbed",
        nodes=tuple(SimNode(node=node, gpus=layout.gpus, cpus=4) for node in nodes),
        partitions=tuple(partitions),
        scheduler=Scheduler.from_parameters(
            config["SchedulerParameters"], version=layout.version, kill_wait_s=float(KILL_WAIT_S)
        ),
        preempt_type="" if layout.profile is Profile.PLAIN else config["PreemptType"],
    )


def job_of(line: Line, real: dict[str, Outcome]) -> SimJob:
    return SimJob(
        job_id=line.name,
        user="user",
        submit_at=real[line.name].submit_at + 0.5,  # somewhere in the second that Slurm says
        runs_s=line.runs_s,
        limit_s=60.0 * line.limit,
        partition=line.partition,
        nodes=line.nodes,
    )


def differences(
    load: list[Line], real: dict[str, Outcome], simulation: dict[str, Outcome], cycle_s: float
) -> Iterator[str]:
    for job in load:
        print(f"{job.name:6} real {real[job.name]}\n       sim  {simulation[job.name]}")
    for job in load:
        simulated, observed = simulation[job.name], real[job.name]
        if (simulated.limit, simulated.state) != (observed.limit, observed.state):
            yield f"end of {job.name}"
        if abs(simulated.start_at - observed.start_at) > cycle_s:
            yield f"start of {job.name}"
        # Delays add up along a chain of jobs, so each start is measured from its cause.
        if not job.backfill and observed.start_at - set_off(simulated, simulation, real) > MAIN_S:
            yield f"start of {job.name} after what set it off"
    for one, other in combinations(load, 2):
        distance_s = simulation[one.name].start_at - simulation[other.name].start_at
        if abs(distance_s) > cycle_s and (real[one.name].start_at > real[other.name].start_at) != (distance_s > 0):
            yield f"order of {one.name} and {other.name}"


def set_off(job: Outcome, simulation: dict[str, Outcome], real: dict[str, Outcome]) -> float:
    """Time in the real Slurm of the event that started the simulated job: its submission, or the end of another job."""
    causes = [(job.submit_at, job.submit_at)]
    causes += [
        (outcome.end_at, real[name].end_at) for name, outcome in simulation.items() if outcome.end_at <= job.start_at
    ]
    return max(causes)[1]
