"""How fast a run trains with so many workers, learned while it trains. Pure.

What was measured counts. Sizes in between and beyond follow the shape of

    t(m) = ceil(S/m) + REST + TALK · log2(m)      in units of a shard's time, for S shards on m workers:

whole shards one after the other, what no worker can divide (the optimizer's step, the loop), and what grows with the
world (the reduction). REST and TALK are optimism that makes a run try sizes it has not seen, an efficiency of 0.76
with 64 workers of 64 shards. Published curves of training on idle nodes have 0.44 to 0.92 there (BFTrainer, arXiv
2106.12091), so it is believed until measured.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fallow.core.accounting.pacing import Schedule
from fallow.core.planning.share import Worth

REST, TALK = 0.2, 0.02

MEMORY_S = 600.0
"""Evidence at one size counts for at most this long, so that newer measurements replace old ones."""

HALF_LIFE_S = 7 * 86400.0
"""Evidence counts half after this time: nodes, data and software change."""

SIZES = 32
"""As many sizes are remembered; the one with the least evidence is forgotten."""


class Seen(msgspec.Struct, frozen=True):
    """What was measured at one size."""

    step_s: float
    weight_s: float
    "seconds of training behind it, fading"
    at: float
    "Unix time of the last measurement"


class Curve(msgspec.Struct, kw_only=True):
    """Measurements of one run; part of its durable record."""

    seen: dict[int, Seen] = {}
    "workers -> what was measured"
    shard_s: float | None = None
    "seconds per shard, as workers measured it (the median of them)"

    @property
    def is_measured(self) -> bool:
        """Was anything of it?"""
        return bool(self.seen) or self.shard_s is not None

    def observe(self, workers: int, step_s: float, lasted_s: float, at: float) -> None:
        """Take in a stretch of undisturbed training.

        Args:
            workers: all through it.
            step_s: mean seconds per step in it.
            lasted_s: its length.
            at: Unix time.
        """
        old = self.seen.get(workers)
        kept_s = 0.0 if old is None else min(_faded(old, at), MEMORY_S)
        was = step_s if old is None else old.step_s
        mean = (kept_s * was + lasted_s * step_s) / (kept_s + lasted_s)
        self.seen[workers] = Seen(mean, min(kept_s + lasted_s, MEMORY_S), at)
        if len(self.seen) > SIZES:
            others = [m for m in self.seen if m != workers]
            del self.seen[min(others, key=lambda m: _faded(self.seen[m], at))]


@dataclass(frozen=True, slots=True)
class Gain:
    """What a run gains from nodes.

    Attributes:
        worth: of nodes to it.
        speeds: (nodes, steps per second) at which it gets faster.
        curve: its own, with those of runs like it. While nothing is measured, only ratios of the speeds mean something.
        schedule: how it stands to its deadline; None: it has none, or it is not known how long it takes.
    """

    worth: Worth
    speeds: tuple[tuple[int, float], ...]
    curve: Curve
    schedule: Schedule | None


def pooled(own: Curve, others: Sequence[Curve], at: float) -> Curve:
    """A run's curve with those of earlier runs of the same script and model, which count half. Args: at: Unix time."""
    sums: dict[int, tuple[float, float]] = {}
    for share, curve in [(1.0, own), *((0.5, other) for other in others)]:
        for workers, seen in curve.seen.items():
            weight = share * _faded(seen, at)
            total, times = sums.get(workers, (0.0, 0.0))
            sums[workers] = (total + weight, times + weight * seen.step_s)
    merged = {m: Seen(times / weight, min(weight, MEMORY_S), at) for m, (weight, times) in sums.items() if weight > 0}
    paces = (curve.shard_s for curve in (own, *others) if curve.shard_s is not None)
    return Curve(seen=merged, shard_s=next(paces, None))


def _faded(seen: Seen, at: float) -> float:
    return float(seen.weight_s * 0.5 ** (max(0.0, at - seen.at) / HALF_LIFE_S))


def speeds(curve: Curve, shards: int, slots: int, most: int) -> list[tuple[int, float]]:
    """Numbers of nodes that are worth having, ascending, with steps per second; each is faster than those before.

    Args:
        curve: measurements, perhaps none: then a shard takes a second.
        shards: in a step, at least 1.
        slots: workers per node.
        most: nodes.
    """
    seen = sorted((min(workers, shards), one.step_s) for workers, one in curve.seen.items())
    factors = [(workers, step_s / _shape(shards, workers)) for workers, step_s in seen]
    factors = factors or [(1, 1.0 if curve.shard_s is None else curve.shard_s)]
    found: list[tuple[int, float]] = []
    for nodes in range(1, most + 1):
        workers = min(nodes * slots, shards)
        speed = 1.0 / (_factor(factors, workers) * _shape(shards, workers))
        if not found or speed > found[-1][1] * (1.0 + 1e-9):
            found.append((nodes, speed))
        if workers == shards:
            break
    return found


def _shape(shards: int, workers: int) -> float:
    """Time of a step in units of a shard's."""
    return -(-shards // workers) + REST + TALK * math.log2(workers)


def _factor(factors: list[tuple[int, float]], workers: int) -> float:
    """Measured time over the shape's, in between by the logarithm of the number of workers."""
    right = bisect_right(factors, workers, key=lambda each: each[0])
    if right in (0, len(factors)):
        return factors[max(0, right - 1)][1]
    (low, before), (high, after) = factors[right - 1], factors[right]
    return before + math.log(workers / low) / math.log(high / low) * (after - before)
