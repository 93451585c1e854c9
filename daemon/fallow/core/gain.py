"""Gain: how fast a run trains with so many workers, learned while it trains. Pure.

A step of S shards takes m workers

    t(m) = shard · ceil(S/m) + rest + talk · log2(m)      seconds:

whole shards one after the other, what no worker can divide (the optimizer's step, the loop), and what grows with the
world (the reduction). The three are fitted to all sizes seen so far by least squares of relative errors, pulled towards
a prior, never below 0. What is left between fit and measurement is taken over as a factor that never falls with m
(isotonic regression), so each further size is at most as good as the ones before promise: the curve is monotone and,
but for the stairs that whole shards make, concave.

The prior is the optimism that makes a run try sizes it has not seen: rest = 0.2 shard, talk = 0.02 shard, which is an
efficiency of 0.76 with 64 workers of 64 shards. Published curves of training on idle nodes have 0.44 to 0.92 there
(BFTrainer, arXiv 2106.12091), so it is believed until measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import mul
from typing import NamedTuple

import msgspec

REST, TALK = 0.2, 0.02
"""The prior's `rest` and `talk`, in shards."""

NOISE_S = 60.0
"""Seconds of measurement after which a mean step is known to `NOISE`, a part of itself."""

NOISE = 0.03
KNOWN, GUESSED = 0.05, 0.5
"""How far a shard's time may be from the prior, as a part of it: measured by the workers themselves, or not."""

LOOSE = 5.0
"""The same for `rest` and `talk`: models differ much in them."""

MEMORY_S = 600.0
"""Evidence at one size counts for at most this long, so that newer measurements replace old ones."""

HALF_LIFE_S = 7 * 86400.0
"""Evidence counts half after this time: nodes, data and software change."""

SIZES = 32
"""As many sizes are remembered; the one with the least evidence is forgotten."""


SPARES = 3
"""Nodes beyond a stair that are looked at."""

LOST = 6
"""Nodes lost at a time that are looked at one by one."""


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


class Evidence(NamedTuple):
    """What a curve says at some moment."""

    shard_s: float | None
    seen: list[tuple[int, float, float]]
    "(workers, seconds behind it that have not faded, mean step)"


def evidence(curve: Curve, at: float) -> Evidence:
    """Args: at: Unix time."""
    return Evidence(curve.shard_s, [(workers, _faded(seen, at), seen.step_s) for workers, seen in curve.seen.items()])


def pooled(own: Curve, others: Iterable[Curve], at: float) -> Curve:
    """A run's curve with those of earlier runs of the same script and model, which count half."""
    return pool(evidence(own, at), [evidence(other, at) for other in others], at)


def pool(own: Evidence, others: Iterable[Evidence], at: float) -> Curve:
    """As `pooled`, of what these curves say at that time: runs that learn from each other ask for the same."""
    sums: dict[int, tuple[float, float]] = {}
    paces = [] if own.shard_s is None else [own.shard_s]
    for share, curve in [(1.0, own), *((0.5, other) for other in others)]:
        if not paces and curve.shard_s is not None:
            paces.append(curve.shard_s)
        for workers, weight_s, step_s in curve.seen:
            weight = share * weight_s
            total, times = sums.get(workers, (0.0, 0.0))
            sums[workers] = (total + weight, times + weight * step_s)
    merged = {m: Seen(times / weight, min(weight, MEMORY_S), at) for m, (weight, times) in sums.items() if weight > 0}
    return Curve(seen=merged, shard_s=paces[0] if paces else None)


def _faded(seen: Seen, at: float) -> float:
    return float(seen.weight_s * 0.5 ** (max(0.0, at - seen.at) / HALF_LIFE_S))


@dataclass(frozen=True, slots=True)
class Fit:
    """A curve as a function of the number of workers.

    Attributes:
        shards: in a step.
        shard_s, rest_s, talk_s: the three parameters, in seconds.
        sizes: that were measured, ascending.
        factors: measured time over the formula's at these sizes, never falling.
    """

    shards: int
    shard_s: float
    rest_s: float
    talk_s: float
    sizes: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()

    def step_s(self, workers: int) -> float:
        """Seconds per step; workers beyond the number of shards have nothing to do."""
        m = min(workers, self.shards)
        return _plain_s(self.shards, self.shard_s, self.rest_s, self.talk_s, m) * self._factor(m)

    def _factor(self, workers: int) -> float:
        if not self.sizes:
            return 1.0
        right = bisect_right(self.sizes, workers)
        if right == 0:
            return self.factors[0]
        if right == len(self.sizes):
            return self.factors[-1]
        low, high = self.sizes[right - 1], self.sizes[right]
        part = math.log(workers / low) / math.log(high / low)
        return self.factors[right - 1] + part * (self.factors[right] - self.factors[right - 1])

    def speeds(self, slots: int, most: int) -> list[tuple[int, float]]:
        """Numbers of nodes that are worth having, ascending, with steps per second; each is faster than those before.

        Args:
            slots: workers per node.
            most: nodes.
        """
        found: list[tuple[int, float]] = []
        best = 0.0
        for nodes, workers, each, talks in _stairs(self.shards, slots, most):
            # As `step_s`.
            plain = self.shard_s * each + self.rest_s + self.talk_s * talks
            speed = 1.0 / (plain * self._factor(workers))
            if not found or speed > best:
                found.append((nodes, speed))
                best = speed
        return found


def _plain_s(shards: int, shard_s: float, rest_s: float, talk_s: float, workers: int) -> float:
    """The formula, without factors; each worker has something to do."""
    return shard_s * -(-shards // workers) + rest_s + talk_s * math.log2(workers)


@lru_cache(maxsize=1024)
def _stairs(shards: int, slots: int, most: int) -> list[tuple[int, int, int, float]]:
    """Numbers of nodes at which a worker has fewer shards than with one node less: about 2·√shards of them. Kept.

    Each with its workers that have something to do, the shards of one of them, and the binary logarithm of their
    number.
    """
    nodes = 1
    found: list[tuple[int, int, int, float]] = []
    while nodes <= most:
        busy = min(nodes * slots, shards)
        each = -(-shards // busy)
        found.append((nodes, busy, each, math.log2(busy)))
        if each == 1:
            break
        workers = -(-shards // (each - 1))
        nodes = max(nodes + 1, -(-workers // slots))
    return found


def with_losses(speeds: Sequence[tuple[int, float]], loss: float, most: int) -> list[tuple[int, float]]:
    """Speeds that can be counted on: the mean over which nodes are just then lost and not yet replaced.

    This is the liveput of Parcae (NSDI'24). It gives spare nodes, which add nothing as long as all are there, the worth
    that they have: a stair is not lost with the first node that goes. Up to `SPARES` beyond each stair are looked at.

    Args:
        speeds: (nodes, steps per second), both ascending.
        loss: probability that a node is away.
        most: nodes; what the speeds say of more does not count.
    """
    speeds = [(n, speed) for n, speed in speeds if n <= most]
    spread = _spread(tuple([n for n, _ in speeds]), loss, most)
    with_nodes = [0.0] * ((spread[-1][0] if spread else 0) + 1)
    "steps per second by the number of nodes that are there"
    for (n, speed), (end, _) in pairwise([*speeds, (len(with_nodes), 0.0)]):
        with_nodes[n:end] = [speed] * (end - n)
    falling = with_nodes[::-1]
    found: list[tuple[int, float]] = []
    best = 0.0
    for n, there, chances in spread:
        mean = sum(map(mul, chances, falling[there]))
        if not found or mean > best:
            found.append((n, mean))
            best = mean
    return found


@lru_cache(maxsize=64)
def _spread(stairs: tuple[int, ...], loss: float, most: int) -> list[tuple[int, slice, list[float]]]:
    """Numbers of nodes to look at; for each those that may be there, from all of them down to the last number and as
    places in a list that begins with the largest, and how likely that is. Kept, for runs ask for the same."""
    sizes = sorted({n + spare for n in stairs for spare in range(SPARES + 1) if n + spare <= most})
    # With none of them lost, with one, and so on.
    return [(n, slice(sizes[-1] - n, sizes[-1] - n + LOST + 2), _lost(n, loss)) for n in sizes]


def _lost(nodes: int, loss: float) -> list[float]:
    """Probabilities that none of so many nodes is away, one of them, and so on.

    More than `LOST` at once are counted as just one more.
    """
    weight, left, found = (1 - loss) ** nodes, 1.0, []
    for lost in range(min(nodes, LOST) + 1):
        found.append(weight)
        left -= weight
        weight *= (nodes - lost) / (lost + 1) * loss / (1 - loss)
    return [*found, max(0.0, left)] if nodes > LOST else found


def fit(curve: Curve, shards: int, at: float) -> Fit:
    """Fit the formula to what was seen.

    Args:
        curve: measurements, perhaps none: then times are in units of a shard's.
        shards: in a step, at least 1.
        at: Unix time.
    """
    seen = [(min(m, shards), one.step_s, _faded(one, at) / NOISE_S) for m, one in sorted(curve.seen.items())]
    shard_s = curve.shard_s
    if shard_s is None:
        total = sum(weight for _, _, weight in seen)
        shard_s = (
            sum(w * step_s / _plain_s(shards, 1.0, REST, TALK, m) for m, step_s, w in seen) / total if total else 1.0
        )
    prior = (shard_s, shard_s * REST, shard_s * TALK)
    # In units of the prior: minimise sum w (x.u - 1)^2 + firm (u - 1)^2 over u >= 0.
    spread = (GUESSED if curve.shard_s is None else KNOWN, LOOSE, LOOSE)
    firm = [(NOISE / s) ** 2 for s in spread]
    # Each plan fits all runs, so this is written out.
    ra, rb, rc = firm
    (aa, ab, ac), (ba, bb, bc), (ca, cb, cc) = (firm[0], 0.0, 0.0), (0.0, firm[1], 0.0), (0.0, 0.0, firm[2])
    for m, step_s, weight in seen:
        a, b, c = prior[0] * -(-shards // m) / step_s, prior[1] / step_s, prior[2] * math.log2(m) / step_s
        wa, wb, wc = weight * a, weight * b, weight * c
        ra, rb, rc = ra + wa, rb + wb, rc + wc
        aa, ab, ac = aa + wa * a, ab + wa * b, ac + wa * c
        ba, bb, bc = ba + wb * a, bb + wb * b, bc + wb * c
        ca, cb, cc = ca + wc * a, cb + wc * b, cc + wc * c
    scale = _not_negative([[aa, ab, ac], [ba, bb, bc], [ca, cb, cc]], [ra, rb, rc])
    one, rest, talk = (p * u for p, u in zip(prior, scale, strict=True))
    factors = [(w * step_s / _plain_s(shards, one, rest, talk, m) + 1.0) / (w + 1.0) for m, step_s, w in seen]
    rising = _rising(factors, [weight + 1.0 for _, _, weight in seen])
    return Fit(shards, one, rest, talk, tuple(m for m, _, _ in seen), tuple(rising))


def _not_negative(gram: list[list[float]], right: list[float]) -> list[float]:
    """Minimum of u'Gu/2 - r'u over u >= 0, by coordinate descent; G is positive definite (3 x 3)."""
    (aa, ab, ac), (ba, bb, bc), (ca, cb, cc) = gram
    ra, rb, rc = right
    a = b = c = 1.0
    for _ in range(100):
        was_a, was_b, was_c = a, b, c
        a = (ra - (ab * b + ac * c)) / aa
        a = a if a > 0.0 else 0.0
        b = (rb - (ba * a + bc * c)) / bb
        b = b if b > 0.0 else 0.0
        c = (rc - (ca * a + cb * b)) / cc
        c = c if c > 0.0 else 0.0
        if abs(a - was_a) < 1e-6 and abs(b - was_b) < 1e-6 and abs(c - was_c) < 1e-6:
            break
    # With nothing left of a shard's time there would be no reason to stop at any size.
    return [max(a, 1e-3), b, c]


def _rising(values: list[float], weights: list[float]) -> list[float]:
    """The closest sequence that never falls (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            before, heavy, count = blocks.pop()
            both = heavy + block[1]
            block = ((before * heavy + block[0] * block[1]) / both, both, count + block[2])
        blocks.append(block)
    return [value for value, _, count in blocks for _ in range(count)]
