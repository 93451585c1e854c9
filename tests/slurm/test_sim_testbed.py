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
    "it starts when backfill looks, of which only the interval is known"


class Seen(msgspec.Struct, frozen=True):
    """What became of it."""

    submit_at: float
    start_at: float
    end_at: float
    limit: str
    state: str


def test_starts_are_those_of_a_real_slurm(make_testbed: MakeTestbed) -> None:
    """Two at once: nearly all of the time is waiting.

    On a busy machine the real Slurm may start a job late, but not the same one each time.
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
            found = set(differences(load, real, simulate(testbed, load, real), testbed.layout.bf_interval + MAIN_S))
            always[profile] = always.get(profile, found) & found
            if not always[profile]:
                del loads[profile]
        for testbed in testbeds:
            testbed.down()
        if not loads:
            return
    pytest.fail(f"not as a real Slurm: {always}")


def play(testbed: Testbed, load: list[Line]) -> dict[str, Seen]:
    """Have the real Slurm run it. Slurm forgets ended jobs after MinJobAge, so they are looked at all the time."""
    began, seen = time.monotonic(), dict[str, Seen]()
    for job in load:
        while (left_s := began + job.at_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_S))
            seen |= look(testbed)
        options = [f"--job-name={job.name}", f"--nodes={job.nodes}", f"--time={job.limit}"]
        options += [f"--partition={job.partition}", "--exclusive", "--no-requeue", "--output=/dev/null", "--chdir=/"]
        testbed.slurm("sbatch", *options, f"--wrap=exec sleep {job.runs_s:g}")
    deadline = began + load[-1].at_s + 120.0 + 5.0 * len(load)
    while testbed.slurm("squeue", "-h", "-o", "%j"):
        assert time.monotonic() < deadline, f"jobs are left: {testbed.slurm('squeue')}"
        time.sleep(0.2)
        seen |= look(testbed)
    return seen | look(testbed)


def look(testbed: Testbed) -> dict[str, Seen]:
    """The jobs that have started, by name."""
    text = testbed.slurm("env", "SLURM_TIME_FORMAT=%s", "squeue", "-h", "-t", "all", "-o", "%j|%V|%S|%e|%l|%T")
    rows = [line.split("|") for line in text.split()]
    return {
        name: Seen(float(submit), float(start), float(end), limit, state)
        for name, submit, start, end, limit, state in rows
        if state != "PENDING"
    }


def simulate(testbed: Testbed, load: list[Line], real: dict[str, Seen]) -> dict[str, Seen]:
    """The same, submitted when the real one had it."""
    jobs = sorted((job_of(j, real) for j in load), key=lambda j: j.submit_at)
    sim = SlurmSim(site(testbed), 0, jobs[0].submit_at, jobs)
    shown: dict[str, Seen] = {}
    end = max(seen.start_at for seen in real.values()) + 600.0
    while sim.next_at() <= end:
        sim.advance(sim.next_at())
        for job in sim.poll().jobs:
            if job.state == "RUNNING" and job.start_at is not None and job.time_limit_s is not None:
                minutes, seconds = divmod(round(job.time_limit_s), 60)
                at = real[job.job_id].submit_at
                state = "PREEMPTED" if job.preempt_at is not None else "COMPLETED"
                shown[job.job_id] = Seen(at, job.start_at, 0.0, f"{minutes}:{seconds:02}", state)
    return {name: msgspec.structs.replace(seen, end_at=sim.run_times[name][1]) for name, seen in shown.items()}


def site(testbed: Testbed) -> Site:
    nodes, layout = testbed.layout.node_names, testbed.layout
    slurm_config = dict(
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
            slurm_config["SchedulerParameters"], version=layout.version, kill_wait_s=float(KILL_WAIT_S)
        ),
        preempt_type="" if layout.profile is Profile.PLAIN else slurm_config["PreemptType"],
    )


def job_of(line: Line, real: dict[str, Seen]) -> SimJob:
    return SimJob(
        job_id=line.name,
        user="user",
        submit_at=real[line.name].submit_at + 0.5,  # somewhere in the second that Slurm says
        runs_s=line.runs_s,
        limit_s=60.0 * line.limit,
        partition=line.partition,
        nodes=line.nodes,
    )


def differences(load: list[Line], real: dict[str, Seen], ours: dict[str, Seen], cycle_s: float) -> Iterator[str]:
    for job in load:
        print(f"{job.name:6} real {real[job.name]}\n       sim  {ours[job.name]}")
    for job in load:
        mine, theirs = ours[job.name], real[job.name]
        if (mine.limit, mine.state) != (theirs.limit, theirs.state):
            yield f"end of {job.name}"
        if abs(mine.start_at - theirs.start_at) > cycle_s:
            yield f"start of {job.name}"
        # What each start comes late by adds up along a chain of jobs, so it is measured from what set it off.
        if not job.backfill and theirs.start_at - set_off(mine, ours, real) > MAIN_S:
            yield f"start of {job.name} after what set it off"
    for one, other in combinations(load, 2):
        apart = ours[one.name].start_at - ours[other.name].start_at
        if abs(apart) > cycle_s and (real[one.name].start_at > real[other.name].start_at) != (apart > 0):
            yield f"order of {one.name} and {other.name}"


def set_off(job: Seen, ours: dict[str, Seen], real: dict[str, Seen]) -> float:
    """When that happened to the real Slurm which made the simulated one start the job: it came, or another ended."""
    causes = [(job.submit_at, job.submit_at)]
    causes += [(seen.end_at, real[name].end_at) for name, seen in ours.items() if seen.end_at <= job.start_at]
    return max(causes)[1]
