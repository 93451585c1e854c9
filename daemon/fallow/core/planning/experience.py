"""What the head has learned about a cluster: how long starts take, how often nodes come, how many at once. Pure."""

from __future__ import annotations

from math import inf
from statistics import median

import msgspec

SAMPLES = 32
"""As many starts are remembered, the newest."""

FRESH_S = 6 * 3600.0
"""Starts that are longer ago say nothing: a cluster that was slow for a day must not stay unused."""

HALF_S = 3600.0
"""Nodes that came at once count half as many after so long: it may not happen again."""

START_S, WAIT_S = 30.0, 15.0
"""What a start costs and a request takes, until the head has seen some."""

Sample = tuple[float, float]
"""(Unix time, seconds)"""


class Experience(msgspec.Struct, kw_only=True):
    """All that is remembered; small, so that it can be written down as a whole."""

    starts: list[Sample] = []
    "ascending: seconds from a job's start to its first step in the training"
    waits: list[Sample] = []
    "seconds from a request to its job's start"
    together: tuple[float, int] = (0.0, 0)
    "(Unix time, nodes that fell idle between two polls): the most of late"

    def started(self, wait_s: float | None, start_s: float, at: float) -> None:
        """A node came: `wait_s` from request to job start (None: there was no idle node), `start_s` from there to its
        first step at `at`."""
        self.starts = _with(self.starts, at, start_s)
        if wait_s is not None:
            self.waits = _with(self.waits, at, wait_s)

    def came(self, nodes: int, at: float) -> None:
        """So many nodes have fallen idle since the poll before."""
        if nodes and nodes > self.at_once(at):
            self.together = at, nodes

    def at_once(self, at: float) -> float:
        """As many nodes may fall idle between two polls."""
        then, nodes = self.together
        return nodes * float(0.5 ** (max(0.0, at - then) / HALF_S))

    def start_s(self, at: float) -> float:
        """From a job's start to its first step, as a rule."""
        return median([seconds for _, seconds in _fresh(self.starts, at)] or [START_S])

    def wait_s(self, at: float) -> float:
        """From a request to its job's start, as a rule."""
        return median([seconds for _, seconds in _fresh(self.waits, at)] or [WAIT_S])

    def between_s(self, at: float) -> float:
        """From one node that comes to the next, as a rule; infinity: nobody knows."""
        fresh = _fresh(self.starts, at)
        first = fresh[0][0] if fresh else at
        return (at - first) / (len(fresh) - 1) if len(fresh) > 1 and at > first else inf


def _with(samples: list[Sample], at: float, seconds: float) -> list[Sample]:
    return sorted([*samples, (round(at), round(max(0.0, seconds), 1))])[-SAMPLES:]


def _fresh(samples: list[Sample], at: float) -> list[Sample]:
    return [sample for sample in samples if at - sample[0] < FRESH_S]
