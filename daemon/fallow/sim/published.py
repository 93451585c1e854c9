"""Scaling curves of runs and durations of membership changes, mostly from published measurements.

The unit of work is what one node does in a second, so that the work of different models adds up.

Sources:
    AlexNet to DenseNet: images per second on 1, 2, 4, ... 64 Summit nodes with 6 V100 each (Liu et al., BFTrainer,
        arXiv 2106.12091).
    bert to yolov3: 4-GPU nodes as measured for Pollux (Qiao et al., OSDI'21; GitHub petuum/adaptdl, branch
        osdi21-artifact, `simulator/traces/MODEL/scalability.csv`), of the largest global batch that was measured on
        three numbers of nodes; `core.planning.gain` extrapolated to fewer nodes than were measured.
    Changes in place: Fallow's own measurements (bench/README.md: 4 members, 10 M parameters).
    Restarts: 18 s up and 12 s down for Elastic Horovod in BFTrainer's simulations; Sia measured 25 to 250 s
        (SOSP'23).
"""

import math
import re
from bisect import bisect_right
from hashlib import blake2b
from pathlib import Path
from statistics import NormalDist

import msgspec

from fallow.model import Exit, FallowError, SpeedView
from fallow.sim.types import Costs, RunPlan
from fallow.slurm.parse.values import MOST_NODES

Rate = tuple[tuple[int, float], ...]
"""(nodes, work per second), ascending; linear in between, constant beyond."""

DEFAULT = "10x64:ShuffleNet"
"""Runs of BFTrainer's evaluation."""

_DOUBLINGS = {
    "AlexNet": (7115.3, 13071.7, 21066.1, 40484.9, 74002.9, 130762.0, 202135.4),
    "ResNet18": (5218.8, 10582.5, 20436.0, 39584.0, 78023.8, 144762.5, 262723.0),
    "MnasNet": (3245.7, 6001.9, 11489.3, 23075.6, 43899.7, 83474.2, 160493.6),
    "MobileNet": (3039.9, 5893.0, 11386.0, 22024.8, 42488.4, 82268.3, 155213.8),
    "ShuffleNet": (2831.0, 5259.0, 9988.0, 20379.2, 38895.3, 74125.1, 145081.5),
    "VGG16": (1193.3, 2389.2, 4691.7, 9257.9, 18348.9, 36208.5, 70151.7),
    "DenseNet": (989.9, 1952.5, 3849.8, 7608.1, 14993.2, 28812.2, 57773.9),
}
"""Images per second on 1, 2, 4, ... 64 nodes."""

_FEW = (1.0, 1.998, 2.970, 3.986, 4.901, 5.919)
_ONE_BY_ONE = {
    "bert": (*_FEW, 6.870, 7.933, 7.971, 8.228, 8.350, 8.609),
    "cifar10": (*_FEW, 6.961, 8.130, 8.278, 8.633, 8.832, 9.166),
    "deepspeech2": (*_FEW, 7.141, 8.537),
    "imagenet": (*_FEW, 6.870, 7.933, 8.187, 8.629, 8.903, 9.305),
    "ncf": _FEW,
    "yolov3": (*_FEW, 5.942, 5.966, 5.990, 6.014, 6.037, 6.061, 6.085, 6.399, 6.748, 7.574),
}
"""Speed on 1, 2, 3, ... nodes, relative to one node."""

CURVES: dict[str, Rate] = {
    **{name: tuple((1 << n, speed / all_[0]) for n, speed in enumerate(all_)) for name, all_ in _DOUBLINGS.items()},
    **{name: tuple(enumerate(all_, 1)) for name, all_ in _ONE_BY_ONE.items()},
}

IN_PLACE = Costs(absorb=(0.082, 0.125), release=(0.049, 0.072), eject=(0.416, 0.681), start=(10.0, 20.0))
"""Durations of changes in place. The start (imports and rehearsal) depends on the script."""

RESTART = "18-12"

P95 = 1.6448536269514722
"""The normal distribution's 95th percentile, in standard deviations."""

_PART = re.compile(r"(\d{1,4})x(?:(\d{1,9})-)?(\d{1,9})(?:,in=([^:]+))?:(.+)")


def speeds(plan: RunPlan) -> tuple[float, ...]:
    """Work per second on 0, 1, ... `plan.max_nodes` nodes; 0 below `min_nodes`."""
    return tuple(0.0 if n < plan.min_nodes else rate_of(plan.rate, n) for n in range(plan.max_nodes + 1))


def rate_of(rate: Rate, nodes: int) -> float:
    """Work per second on `nodes` nodes."""
    right = bisect_right(rate, nodes, key=lambda point: point[0])
    if right == len(rate):
        return rate[-1][1]
    n0, r0 = rate[right - 1] if right else (0, 0.0)
    n1, r1 = rate[right]
    return r0 + (r1 - r0) * (nodes - n0) / (n1 - n0)


def parse_runs(text: str, partitions: tuple[str, ...] = ()) -> list[RunPlan]:
    """Parse runs: `COUNTxMAX:CURVE` or `COUNTxMIN-MAX,in=PARTITION+PARTITION:CURVE`, separated by `;`.

    Args:
        text: for example `10x64:ShuffleNet;2x2-16,in=a100+v100:bert`. The second part is two runs of 2 to 16 nodes in
            these partitions.
        partitions: partitions that are harvested; a run without `in=` may use all of them.

    Raises:
        FallowError: the text has another form, or names an unknown curve or partition.
    """
    run_plans: list[RunPlan] = []
    for part in text.split(";"):
        match = _PART.fullmatch(part.strip())
        number, least, most = (int(word or 1) for word in match.group(1, 2, 3)) if match else (0, 0, 0)
        if match is None or not (number >= 1 and 1 <= least <= most):
            raise FallowError(
                f"--runs {part.strip()!r}: expected COUNTxNODES:CURVE or COUNTxMIN-MAX,in=PARTITION+PARTITION:CURVE, "
                f"for example {DEFAULT}",
                Exit.USAGE,
            )
        if sum(plan.max_nodes for plan in run_plans) + number * most > MOST_NODES:
            raise FallowError(f"--runs {part.strip()!r}: more than {MOST_NODES:,} nodes in total", Exit.USAGE)
        chosen = tuple(match[4].split("+")) if match[4] else partitions
        if unknown := [name for name in chosen if name not in partitions]:
            raise FallowError(
                f"--runs {part.strip()!r}: partition {unknown[0]!r} is not harvested; choose {', '.join(partitions)}",
                Exit.USAGE,
            )
        rate = curve_of(match[5])
        run_plans += [
            RunPlan(
                run=f"r{len(run_plans) + k + 1}",
                min_nodes=least,
                max_nodes=most,
                rate=rate,
                partitions=chosen,
            )
            for k in range(number)
        ]
    return run_plans


def curve_of(name: str) -> Rate:
    """The curve of a model, or of a run in the output of `fallow status --json`: `head:FILE[:RUN]`."""
    source, _, where = name.partition(":")
    if source == "head" and where:
        return _learned(where)
    if name not in CURVES:
        raise FallowError(f"--runs: no curve {name!r}; choose {', '.join(CURVES)} or head:FILE", Exit.USAGE)
    return CURVES[name]


class _Run(msgspec.Struct):
    run: str
    speeds: list[SpeedView] = []


class _Status(msgspec.Struct):
    runs: list[_Run]


def _learned(where: str) -> Rate:
    name, _, run = where.partition(":")
    try:
        status = msgspec.json.decode(Path(name).read_bytes(), type=_Status)
    except OSError as error:
        raise FallowError(f"{name}: cannot be read ({error.strerror})", Exit.NOINPUT) from None
    except msgspec.MsgspecError as error:
        raise FallowError(f"{name}: not the output of `fallow status --json` ({error})", Exit.DATA) from None
    for each in status.runs:
        speeds = [speed for speed in each.speeds if speed.steps_per_s > 0.0]
        if speeds and run in ("", each.run):
            # One node may not have been measured: assume a linear curve below the fewest nodes.
            fewest = speeds[0]
            return tuple((s.nodes, s.steps_per_s * fewest.nodes / fewest.steps_per_s) for s in speeds)
    raise FallowError(f"{name}: has no speeds of {f'run {run}' if run else 'any run'}", Exit.DATA)


# -- durations of changes --------------------------------------------------------------------------------------------


def restart_costs(words: str, start: tuple[float, float] = IN_PLACE.start) -> Costs:
    """Durations of restarts, for example `18-12`: 18 s when a run grows, 12 s when it shrinks or loses a node.

    Args:
        words: UP-DOWN in seconds.
        start: time from the start of a job until its node can join (p50, p95), in seconds.

    Raises:
        FallowError: `words` has another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)", words)
    if match is None:
        raise FallowError(f"--costs {words!r}: expected UP-DOWN in seconds, for example {RESTART}", Exit.USAGE)
    up, down = (float(each) for each in match.groups())
    return Costs(absorb=(up, up), release=(down, down), eject=(down, down), start=start)


def draw_cost_s(cost: tuple[float, float], which: str) -> float:
    """Draw a duration in seconds from the lognormal distribution through (p50, p95). `which` is the seed."""
    p50, p95 = cost
    if p50 <= 0 or p95 <= p50:
        return p50
    chance = (int.from_bytes(blake2b(which.encode(), digest_size=6).digest(), "big") + 0.5) / 2.0**48
    return p50 * math.exp(NormalDist().inv_cdf(chance) * math.log(p95 / p50) / P95)
