"""What changes of a membership cost.

In place is what Fallow measures of itself (bench/README.md: 4 members, 10 M parameters). Restarts are as other systems
have them: 18 s up and 12 s down is Elastic Horovod's in BFTrainer's simulations, 25 to 250 s what Sia measured
(SOSP'23).
"""

from __future__ import annotations

import math
import re
from hashlib import blake2b
from statistics import NormalDist

from fallow.model import Exit, FallowError
from fallow.sim.types import Costs

IN_PLACE = Costs(absorb=(0.082, 0.125), release=(0.049, 0.072), eject=(0.416, 0.681), start=(10.0, 20.0))
"""The start is a script's imports and rehearsal; it depends on the script."""

RESTART = "18-12"

P95 = 1.6448536269514722
"""The normal distribution's 95th percentile, in standard deviations."""


def restart(words: str, start: tuple[float, float] = IN_PLACE.start) -> Costs:
    """`18-12`: 18 s for each growth, 12 s for each shrinking, wanted or not.

    Args:
        words: UP-DOWN in seconds.
        start: from the start of a job until its node could join (p50, p95).

    Raises:
        FallowError: not of this shape.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)", words)
    if match is None:
        raise FallowError(f"costs {words!r}: wanted UP-DOWN in seconds, for example {RESTART}", Exit.USAGE)
    up, down = (float(each) for each in match.groups())
    return Costs(absorb=(up, up), release=(down, down), eject=(down, down), start=start)


def drawn(cost: tuple[float, float], which: str) -> float:
    """One time it costs so much: lognormal through (p50, p95). `which` decides: the same words, the same luck."""
    p50, p95 = cost
    if p50 <= 0 or p95 <= p50:
        return p50
    chance = (int.from_bytes(blake2b(which.encode(), digest_size=6).digest(), "big") + 0.5) / 2.0**48
    return p50 * math.exp(NormalDist().inv_cdf(chance) * math.log(p95 / p50) / P95)
