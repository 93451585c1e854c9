"""Deadlines: is a run on schedule, and what does it take? Pure.

Uniform Progress (Can't Be Late, NSDI'24): at any time t a run should have done its part (t - begin)/(deadline - begin)
of the whole. While it is ahead of that, idle nodes are good enough, whatever they come to; when it is behind, nodes of
normal priority are asked for until it is ahead again. Once the deadline has passed nothing can make up for it: the run
is held to the speed that the schedule took, so that it ends soon, and not at any price.
"""

from collections.abc import Sequence
from dataclasses import dataclass

URGENT = 16.0
"""A run's gain counts up to this much more, for as many nodes as its deadline takes, the less it is ahead."""

SLACK = 0.1
"""Part of the whole time by which a run is ahead when its gain counts as usual, and extra nodes are given back."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a run stands."""

    ahead_s: float
    "seconds of schedule by which it is ahead; negative: behind"
    span_s: float
    "from begin to deadline"
    speed: float
    "steps per second that the rest takes; once the deadline has passed, those that the whole took"

    @property
    def behind(self) -> bool:
        return self.ahead_s < 0

    @property
    def comfortable(self) -> bool:
        """So far ahead that nothing needs to be done for the deadline."""
        return self.ahead_s >= SLACK * self.span_s

    @property
    def urgency(self) -> float:
        """1 (comfortable) to `URGENT` (behind), without a jump in between."""
        part = 1.0 - self.ahead_s / (SLACK * self.span_s)
        return float(URGENT ** min(1.0, max(0.0, part)))

    def nodes(self, speeds: Sequence[tuple[int, float]]) -> int:
        """Fewest nodes that are fast enough, or all that help; 0 where nothing is left to do.

        Args:
            speeds: (nodes, steps per second), both ascending.
        """
        if self.speed <= 0 or not speeds:
            return 0
        return next((nodes for nodes, speed in speeds if speed >= self.speed), speeds[-1][0])


def schedule(begin: float, deadline: float, total: int, done: int, at: float) -> Schedule:
    """Compare a run with uniform progress.

    Args:
        begin, deadline, at: Unix times. The first comes before the second, unless clocks differ.
        total: steps of the whole run, at least 1.
        done: finished steps.
    """
    span_s = max(1.0, deadline - begin)
    ahead_s = span_s * done / total - (min(at, deadline) - begin)
    left = max(0, total - done)
    speed = 0.0 if not left else left / (deadline - at) if at < deadline else total / span_s
    return Schedule(ahead_s, span_s, speed)


def extra_nodes(standing: Schedule, speeds: Sequence[tuple[int, float]], held: int, most: int) -> int:
    """Nodes of normal priority to ask for now.

    Args:
        standing: how the run stands.
        speeds: see `Schedule.nodes`.
        held: nodes that it has or has asked for with normal priority, and idle ones that already train.
        most: nodes that it may have.
    """
    if not standing.behind:
        return 0
    return max(0, min(standing.nodes(speeds), most) - held)


def dispensable(standing: Schedule, speeds: Sequence[tuple[int, float]], held: int, extra: int) -> bool:
    """May `extra` nodes of normal priority go, of the `held` ones that train? Only if the rest is fast enough."""
    return standing.comfortable and held - extra >= standing.nodes(speeds)
