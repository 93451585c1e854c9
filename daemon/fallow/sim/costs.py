"""What changes of a membership cost.

In place is what Fallow measures of itself (bench/README.md: 4 members, 10 M parameters). `UP/DOWN` seconds are
restarts, as other systems have them: 18/12 is Elastic Horovod's in BFTrainer's simulations, 25 to 250 what Sia measured
(SOSP'23).
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from statistics import NormalDist

import msgspec

from fallow.core.membership.watch import Timing
from fallow.model import Exit, FallowError
from fallow.sim.types import Costs

IN_PLACE = Costs(absorb=(0.082, 0.125), release=(0.049, 0.072), eject=(0.416, 0.681), start=(10.0, 20.0))
"""The start is a script's imports and rehearsal; it depends on the script."""

SILENT_S = Timing().lease_s
"""Until a head takes a node for lost that has died or is cut off; its run waits for it."""

P95 = 1.6448536269514722
"""The normal distribution's 95th percentile, in standard deviations."""

_ROWS = {"absorb": "planned pause, absorb", "release": "planned pause, release", "eject": "recovery"}
"""Row of `make bench ARGS="pause recovery"` by cost."""


def restart(words: str, start: tuple[float, float] = IN_PLACE.start) -> Costs:
    """`18-12`: 18 s for each growth, 12 s for each shrinking, wanted or not.

    Raises:
        FallowError: not of this shape.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)", words)
    if match is None:
        raise FallowError(f"costs {words!r}: wanted UP-DOWN in seconds, for example 18-12", Exit.USAGE)
    up, down = (float(each) for each in match.groups())
    return Costs(absorb=(up, up), release=(down, down), eject=(down, down), start=start)


class _Ours(msgspec.Struct):
    p50: float
    p95: float


class _Row(msgspec.Struct):
    name: str
    ours: _Ours


def measured(path: Path, start: tuple[float, float] = IN_PLACE.start) -> Costs:
    """From the output of `python -m bench pause recovery --json`; of several rows of a name the first.

    Raises:
        FallowError: the file is not that.
    """
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[_Row])
    except OSError as error:
        raise FallowError(
            f"costs {str(path)!r}: neither UP-DOWN in seconds, for example 18-12, nor a file that can be read "
            f"({error.strerror})",
            Exit.NOINPUT,
        ) from None
    except msgspec.MsgspecError as error:
        raise FallowError(f"{path}: not what `python -m bench --json` prints ({error})", Exit.DATA) from None
    found: dict[str, tuple[float, float]] = {}
    for cost, name in _ROWS.items():
        row = next((row for row in rows if row.name == name), None)
        if row is None:
            raise FallowError(
                f"{path}: no row {name!r}; make it in a checkout: python -m bench pause recovery --json", Exit.DATA
            )
        found[cost] = row.ours.p50, row.ours.p95
    return Costs(**found, start=start)


@lru_cache(maxsize=64)
def drawn(cost: tuple[float, float], which: str) -> float:
    """One time it costs so much: lognormal through (p50, p95). `which` decides: the same words, the same luck.

    Kept, for what a release costs is asked twice.
    """
    p50, p95 = cost
    if p50 <= 0 or p95 <= p50:
        return p50
    # A generator of random numbers would be seeded for one of them, which takes ten times as long.
    chance = (int.from_bytes(blake2b(which.encode(), digest_size=6).digest(), "big") + 0.5) / 2.0**48
    return p50 * math.exp(NormalDist().inv_cdf(chance) * math.log(p95 / p50) / P95)
