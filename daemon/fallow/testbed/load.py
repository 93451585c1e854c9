"""Jobs of other users on a testbed: made from a seed, played in real time. They run `sleep`, which costs no CPU."""

import math
import random
import threading
import time
from collections.abc import Sequence

from fallow.model import FallowError, Struct
from fallow.testbed.cluster import Testbed
from fallow.testbed.conf import PARTITION

USERS = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")
_SHORTEST_S = 1.0
_SIGMA = 1.0
"Spread of the logarithm of lengths: the longest tenth is about ten times as long as the shortest."
_MAX_CANCELS = 500
"Most jobs of one scancel: the length of an argument list is limited."


class LoadJob(Struct, frozen=True):
    """One job of another user, on whole nodes."""

    at_s: float
    "seconds from the start of the load to the submission"
    name: str
    "user-NAME-NUMBER"
    nodes: int
    runs_s: float
    limit_minutes: int
    "time limit that the user requests; more than the job needs, as users do"


class LoadResult(Struct, frozen=True):
    """Outcome of a load, in numbers of jobs."""

    folder: str
    planned: int
    submitted: int
    refused: int
    refusal: str
    "Slurm's reason for the last refusal"


def make_jobs(seed: int, *, seconds: float, nodes: int, utilisation: float, mean_s: float) -> list[LoadJob]:
    """Poisson arrivals of jobs with log-normal lengths, mostly of one node. The same arguments make the same jobs.

    Below a utilisation of 1 there are holes of all lengths, with queues in between. Sizes and lengths follow what GPU
    clusters report (many small and short, few large and long: Hu et al., SC '21).

    Args:
        seed: seed of the random numbers.
        seconds: time in which jobs are submitted.
        nodes: number of nodes of the testbed.
        utilisation: share of the nodes that the jobs request on average, above 0.
        mean_s: mean length of a job.
    """
    rng = random.Random(seed)
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= max(1, nodes // 2)]
    weights = [0.35**index for index in range(len(sizes))]
    mean_size = sum(size * weight for size, weight in zip(sizes, weights, strict=True)) / sum(weights)
    mu = math.log(mean_s) - _SIGMA**2 / 2
    rate = utilisation * nodes / (mean_size * mean_s)
    jobs: list[LoadJob] = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        runs_s = min(max(rng.lognormvariate(mu, _SIGMA), _SHORTEST_S), 8 * mean_s)
        size = rng.choices(sizes, weights)[0]
        name = f"user-{rng.choice(USERS)}-{len(jobs) + 1}"
        # Users ask for one to four times what they need; Slurm counts in minutes.
        limit = max(1, math.ceil(runs_s * rng.uniform(1.1, 4.0) / 60))
        jobs.append(LoadJob(round(at_s, 3), name, size, round(runs_s, 3), limit))
        at_s += rng.expovariate(rate)
    return jobs


def play(testbed: Testbed, jobs: Sequence[LoadJob], seconds: float, stop: threading.Event) -> LoadResult:
    """Submit each job at its time, until `seconds` have passed or `stop` is set. Then cancel the remaining jobs."""
    began_at = time.monotonic()
    ids: list[str] = []
    refused_jobs, refusal = 0, ""
    try:
        for job in jobs:
            if stop.wait(max(0.0, began_at + job.at_s - time.monotonic())) or not testbed.conf.exists():
                break  # somebody stopped the load, or took the testbed down
            try:
                ids.append(_submit(testbed, job))
            except FallowError as error:
                refused_jobs, refusal = refused_jobs + 1, error.message
        else:
            stop.wait(max(0.0, began_at + seconds - time.monotonic()))
    finally:
        _cancel(testbed, ids)
    return LoadResult(str(testbed.folder), len(jobs), len(ids), refused_jobs, refusal)


def _submit(testbed: Testbed, job: LoadJob) -> str:
    """Submit a job and return its id."""
    options = [f"--job-name={job.name}", f"--nodes={job.nodes}", f"--time={job.limit_minutes}", "--exclusive"]
    options += [f"--partition={PARTITION}", "--no-requeue", "--output=/dev/null", "--chdir=/", "--parsable"]
    if testbed.layout.gpus:
        options.append(f"--gres=gpu:{testbed.layout.gpus}")
    # exec: one process per job, and the signal at its end goes to it
    command = f"--wrap=exec sleep {job.runs_s:.3f}"
    return testbed.slurm("sbatch", *options, command).strip().partition(";")[0]


def _cancel(testbed: Testbed, ids: Sequence[str]) -> None:
    try:
        for first in range(0, len(ids), _MAX_CANCELS):
            testbed.slurm("scancel", "--quiet", *ids[first : first + _MAX_CANCELS])
    except FallowError:
        return  # somebody took the testbed down
