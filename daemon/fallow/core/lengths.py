"""How long to ask for: the time limit that trains most per second that it holds the node. Pure.

A lease of T seconds on a hole that lasts X more, X by the survival curve, trains from its first step (`start_s` after
the job's start) until the hole ends or the node is left (`margin_s` before T):

    used(T) = E[min(X, T - margin)] - E[min(X, start)]

The run pays with a stall of all its members for the absorb and for the end, which is planned (`pause_s`) if the limit
comes first and may be a cut (`cut_s`) if the hole ends first (BFTrainer's T_up and T_dw, arXiv 2106.12091). What is
left is `worth`; asked for is the length of the highest worth per second from request to end, since what is not held can
be asked for again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fallow.core.survival import Curve

LADDER = (90, 56, 34, 22, 14, 8, 6, 4, 2, 1)
"""Minutes. Where ends of holes are not known this set covered .92 of Summit's idle time, one fixed length .13 to .79
(for start-ups of 30 s; fixed sets did better than --time-min in production, HPC-Whisk, SC'22)."""

KIND = 0.99
"""Where nothing preempts, nearly as good is good enough for a shorter limit: others' starts are planned after it."""


CHANCE = 0.25
"""A hole that is less likely to outlive the start is left alone: jobs that come to nothing are a burden to the site."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a node costs, in seconds."""

    start_s: float = 30.0
    "from the job's start to its first step"
    wait_s: float = 15.0
    "from the request to the job's start"
    margin_s: float = 20.0
    "left unused before the limit"
    pause_s: float = 0.5
    "all members stall for a planned change"
    cut_s: float = 2.0
    "all members lose when the hole ends before the limit"


class Lease:
    """What leases on one hole bring to a run.

    Args:
        curve, age_s: of the hole.
        costs: of a node there.
        members: nodes that the run has.
    """

    def __init__(self, curve: Curve, age_s: float, costs: Costs, members: float) -> None:
        self._curve, self._age_s, self._costs, self._members = curve, age_s, costs, members
        self._now, self._area = now, area = curve.look(age_s)
        later, area_later = curve.look(age_s + costs.start_s)
        self.comes = later / now if now > 0.0 else 0.0
        "probability that the hole outlives the start"
        self._lost_s = (area_later - area) / now if now > 0.0 else 0.0
        "of it, until the first step, as a mean"

    def worth(self, seconds: float) -> float:
        """Node-seconds of training that a lease adds to the run; negative: it costs more than it brings."""
        now, costs, comes = self._now, self._costs, self.comes
        if now <= 0.0:
            return 0.0
        until = max(0.0, seconds - costs.margin_s)
        later, area = self._curve.look(self._age_s + until)
        used = (area - self._area) / now - self._lost_s if until > costs.start_s else 0.0
        lasts = min(later / now, comes)
        return used - self._members * (costs.pause_s * (comes + lasts) + costs.cut_s * (comes - lasts))

    def rate(self, seconds: float) -> float:
        """`worth` per second from request to end."""
        return self.worth(seconds) / (self._costs.wait_s + self._curve.expected(self._age_s, seconds))

    def bound(self, seconds: float) -> float:
        """No lease of at most so many seconds has a higher `rate`, unless this is below 0.

        For T it has the node, at most as long as with `seconds`. It does not train in all of T: not at the start, nor
        in the margin, as far as the hole is there by then (after `seconds` it is less often), and no end costs less
        than the cheaper kind. The part that is left, (T - idle) / (wait + T), rises with T.
        """
        now, costs = self._now, self._costs
        if now <= 0.0:
            return 0.0
        later, area = self._curve.look(self._age_s + seconds)
        has_s = (area - self._area) / now
        stalls_s = self._members * self.comes * (costs.pause_s + min(costs.pause_s, costs.cut_s))
        idle_s = self._lost_s + costs.margin_s * later / now + stalls_s
        return (has_s - idle_s) / (costs.wait_s + has_s)


def best_minutes(lease: Lease, shortest: int, longest: int, kind: bool) -> int | None:
    """Minutes to ask for; None when no length from `shortest` to `longest` pays back.

    Args:
        lease: on the hole.
        shortest, longest: minutes.
        kind: prefer a shorter limit that is nearly as good.
    """
    if lease.comes < CHANCE:
        return None
    tried = list(lengths(shortest, longest))
    if not kind and len(tried) > 1 and lease.rate(tried[0] * 60.0) > max(0.0, lease.bound(tried[1] * 60.0)):
        return longest  # nearly always: no other need be looked at
    rates = {m: lease.rate(m * 60.0) for m in tried}
    best = max(rates.values(), default=0.0)
    if best <= 0.0:
        return None
    good = [m for m, value in rates.items() if value >= best * (KIND if kind else 1.0)]
    return min(good) if kind else max(good)


def lengths(shortest: int, longest: int) -> Iterator[int]:
    """Lengths worth comparing, longest first."""
    if longest >= shortest:
        yield longest
    yield from (m for m in LADDER if shortest <= m < longest)
