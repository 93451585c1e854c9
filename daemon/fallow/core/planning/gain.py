"""Training speed of a run as a function of its number of workers, learned while it trains. Pure.

Measured sizes use their measurement. Other sizes follow the model of a step's time for S shards on m workers:

    t(m) = ceil(S/m) + FIXED_COST + REDUCTION_COST · log2(m)      in units of one shard's time

The terms are: the shards of one worker, one after the other; what no worker can divide (the optimizer's step, the
loop); and what grows with the world size (the reduction). The two constants are optimistic, so that a run tries new
sizes: they give an efficiency of 0.76 with 64 workers for 64 shards. Published curves of training on idle nodes have
0.44 to 0.92 there (BFTrainer, arXiv 2106.12091).
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fallow.core.accounting.pacing import Schedule
from fallow.core.planning.share import Worth

FIXED_COST, REDUCTION_COST = 0.2, 0.02

MEMORY_S = 600.0
"""Evidence at one size counts for at most this long, so that newer measurements replace old ones."""

HALF_LIFE_S = 7 * 86400.0
"""Evidence counts half after this time: nodes, data and software change."""

SIZES = 32
"""Number of sizes that are remembered; the size with the least evidence is dropped."""


class Measurement(msgspec.Struct, frozen=True):
    """Measurement at one number of workers."""

    step_s: float
    weight_s: float
    "seconds of training that it is based on; fades with time"
    at: float
    "Unix time of the last measurement"


class Curve(msgspec.Struct, kw_only=True):
    """Measurements of one run; part of its durable record."""

    measurements: dict[int, Measurement] = msgspec.field(default_factory=dict, name="seen")
    "workers -> measurement"
    shard_s: float | None = None
    "seconds per shard: median of what the workers measured"

    @property
    def is_measured(self) -> bool:
        """True if the curve has any measurement."""
        return bool(self.measurements) or self.shard_s is not None

    def observe(self, workers: int, step_s: float, lasted_s: float, at: float) -> None:
        """Take in a stretch of undisturbed training.

        Args:
            workers: number of workers, constant during the stretch.
            step_s: mean seconds per step.
            lasted_s: length of the stretch.
            at: Unix time.
        """
        old = self.measurements.get(workers)
        kept_s = 0.0 if old is None else min(_faded_weight_s(old, at), MEMORY_S)
        old_step_s = step_s if old is None else old.step_s
        mean = (kept_s * old_step_s + lasted_s * step_s) / (kept_s + lasted_s)
        self.measurements[workers] = Measurement(mean, min(kept_s + lasted_s, MEMORY_S), at)
        if len(self.measurements) > SIZES:
            other_sizes = [m for m in self.measurements if m != workers]
            del self.measurements[min(other_sizes, key=lambda m: _faded_weight_s(self.measurements[m], at))]


@dataclass(frozen=True, slots=True)
class Gain:
    """What a run gains from nodes.

    Attributes:
        worth: worth of nodes to the run.
        speeds: (nodes, steps per second) of the numbers of nodes that make the run faster.
        curve: pooled with the curves of similar runs. While nothing is measured, only ratios of speeds mean something.
        schedule: progress against the deadline; None: no deadline, or the run's length is unknown.
    """

    worth: Worth
    speeds: tuple[tuple[int, float], ...]
    curve: Curve
    schedule: Schedule | None


def pool_curves(own: Curve, earlier_curves: Sequence[Curve], at: float) -> Curve:
    """Pool a run's curve with those of earlier runs of its script and model, which count half. Args: at: Unix time."""
    sums: dict[int, tuple[float, float]] = {}
    for share, curve in [(1.0, own), *((0.5, other) for other in earlier_curves)]:
        for workers, measurement in curve.measurements.items():
            weight = share * _faded_weight_s(measurement, at)
            total, times = sums.get(workers, (0.0, 0.0))
            sums[workers] = (total + weight, times + weight * measurement.step_s)
    merged = {
        m: Measurement(times / weight, min(weight, MEMORY_S), at) for m, (weight, times) in sums.items() if weight > 0
    }
    paces = (curve.shard_s for curve in (own, *earlier_curves) if curve.shard_s is not None)
    return Curve(measurements=merged, shard_s=next(paces, None))


def _faded_weight_s(measurement: Measurement, at: float) -> float:
    return float(measurement.weight_s * 0.5 ** (max(0.0, at - measurement.at) / HALF_LIFE_S))


def speeds(curve: Curve, shards: int, slots: int, most: int) -> list[tuple[int, float]]:
    """Numbers of nodes at which the run gets faster, ascending, with its speed in steps per second.

    Args:
        curve: measurements; without any, a shard takes one second.
        shards: number of shards in a step, at least 1.
        slots: workers per node.
        most: largest number of nodes to consider.
    """
    step_times = sorted(
        (min(workers, shards), measurement.step_s) for workers, measurement in curve.measurements.items()
    )
    factors = [(workers, step_s / _shape(shards, workers)) for workers, step_s in step_times]
    factors = factors or [(1, 1.0 if curve.shard_s is None else curve.shard_s)]
    speedups: list[tuple[int, float]] = []
    for nodes in range(1, most + 1):
        workers = min(nodes * slots, shards)
        speed = 1.0 / (_factor(factors, workers) * _shape(shards, workers))
        if not speedups or speed > speedups[-1][1] * (1.0 + 1e-9):
            speedups.append((nodes, speed))
        if workers == shards:
            break
    return speedups


def _shape(shards: int, workers: int) -> float:
    """Time of a step by the model, in units of one shard's time."""
    return -(-shards // workers) + FIXED_COST + REDUCTION_COST * math.log2(workers)


def _factor(factors: list[tuple[int, float]], workers: int) -> float:
    """Measured time divided by the model's, interpolated by the logarithm of the number of workers."""
    right = bisect_right(factors, workers, key=lambda each: each[0])
    if right in (0, len(factors)):
        return factors[max(0, right - 1)][1]
    (low, before), (high, after) = factors[right - 1], factors[right]
    return before + math.log(workers / low) / math.log(high / low) * (after - before)
