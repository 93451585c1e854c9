"""The time limits that users asked for, where a trace does not have them.

A limit is the runtime times e^z, z ~ N(ln 2.5, 0.9) and at least 0, rounded up to what people ask for; every tenth job
asks for all that its partition allows. Twenty values make nine tenths of users' estimates, and the maximum is among the
most popular ones: Tsafrir, Etsion and Feitelson, "Modeling User Runtime Estimates", JSSPP 2005. That the median user
asks for 2.5 times what is needed is an assumption of ours.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left

MEDIAN_FACTOR = 2.5
_SPREAD = 0.9
_ALL_OF_IT = 0.1
MINUTES = (5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 600, 720, 1080, 1440, 2160, 2880, 4320)
"""What people ask for."""


def limit_s(seed: int, job_id: str, runs_s: float, longest_s: float) -> float:
    """A limit for a job, always the same for the same arguments.

    Args:
        seed: of the simulation.
        job_id: of the job.
        runs_s: how long it ran.
        longest_s: what its partition allows, MaxTime.
    """
    rng = random.Random(f"{seed}/walltime/{job_id}")
    if rng.random() < _ALL_OF_IT:
        return max(longest_s, runs_s)
    wanted_s = runs_s * math.exp(max(0.0, rng.gauss(math.log(MEDIAN_FACTOR), _SPREAD)))
    place = bisect_left(MINUTES, wanted_s / 60)
    rounded_s = 60.0 * MINUTES[place] if place < len(MINUTES) else longest_s
    return max(min(rounded_s, longest_s), runs_s)
