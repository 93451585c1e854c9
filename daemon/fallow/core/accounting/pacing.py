"""Deadlines: is a run on schedule, and how many nodes does it need? Pure.

Uniform Progress (Can't Be Late, NSDI'24): at time t a run should have done the part (t - begin)/(deadline - begin) of
its steps. While the run is ahead, idle nodes are good enough, however few they are. While it is behind, the head
requests nodes of normal priority until the run is ahead again. After the deadline nothing can make up for the delay:
the run keeps the speed that its schedule needed, so that it ends soon, but not at any price.
"""

from collections.abc import Sequence
from dataclasses import dataclass

URGENT = 16.0
"""Maximum factor of a run's gain, for as many nodes as its deadline needs. The factor falls as the run gets ahead."""

SLACK = 0.1
"""Part of the whole time by which a run must be ahead for its gain to count as usual, and to give extra nodes back."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The progress of a run compared with its schedule."""

    ahead_s: float
    "seconds of schedule by which it is ahead; negative: behind"
    span_s: float
    "from begin to deadline"
    speed: float
    "steps per second that the remaining steps need; after the deadline, those that the whole run needed"

    @property
    def behind(self) -> bool:
        return self.ahead_s < 0

    @property
    def comfortable(self) -> bool:
        """True if the run is so far ahead that its deadline needs nothing."""
        return self.ahead_s >= SLACK * self.span_s

    @property
    def urgency(self) -> float:
        """Factor from 1 (comfortable) to `URGENT` (behind), without a jump in between."""
        part = 1.0 - self.ahead_s / (SLACK * self.span_s)
        return float(URGENT ** min(1.0, max(0.0, part)))

    def nodes(self, speeds: Sequence[tuple[int, float]]) -> int:
        """Smallest number of nodes that is fast enough, or all that help; 0 if no steps remain.

        Args:
            speeds: (nodes, steps per second), both ascending.
        """
        if self.speed <= 0 or not speeds:
            return 0
        return next((nodes for nodes, speed in speeds if speed >= self.speed), speeds[-1][0])


def schedule(begin: float, deadline: float, total: int, finished_steps: int, at: float) -> Schedule:
    """Compare a run with uniform progress.

    Args:
        begin, deadline, at: Unix times. `begin` is before `deadline`, unless clocks differ.
        total: steps of the whole run, at least 1.
        finished_steps: finished steps.
    """
    span_s = max(1.0, deadline - begin)
    ahead_s = span_s * finished_steps / total - (min(at, deadline) - begin)
    remaining_steps = max(0, total - finished_steps)
    speed = 0.0 if not remaining_steps else remaining_steps / (deadline - at) if at < deadline else total / span_s
    return Schedule(ahead_s, span_s, speed)


def extra_nodes(progress: Schedule, speeds: Sequence[tuple[int, float]], nodes_held: int, max_nodes: int) -> int:
    """Number of nodes to request at normal priority now.

    Args:
        progress: of the run.
        speeds: see `Schedule.nodes`.
        nodes_held: nodes held or requested at normal priority, plus idle nodes that already train.
        max_nodes: that the run may have.
    """
    if not progress.behind:
        return 0
    return max(0, min(progress.nodes(speeds), max_nodes) - nodes_held)


def may_release(progress: Schedule, speeds: Sequence[tuple[int, float]], nodes_held: int, extra_nodes: int) -> bool:
    """Return True if `extra_nodes` of the `nodes_held` training nodes may go, because the rest is fast enough."""
    return progress.comfortable and nodes_held - extra_nodes >= progress.nodes(speeds)
