"""How fast this member is: seconds of its own work per shard, without the time that it waits for others."""

from __future__ import annotations

import statistics
import time
from collections import deque

from fallow.worker.transport.group import Group

WINDOW = 5
"""Steps whose median counts: two odd ones in a row do not show."""

ENOUGH = 3
"""Steps measured before a pace is told; the first ones of a process are slow."""


class Pace:
    """A stopwatch for bodies, read once per step.

    What counts is a body from the moment its batch is there to its last backward; what the final body does beyond that
    (the optimizer's step) happens once per step, however many shards there are. What loading costs comes on top, or, if
    processes load in the background, takes the place of the body's time where they are slower. How long a body had to
    wait for such a batch does not tell: a member with few shards never waits, and would get more than it can load.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._group = Group(0, 0, 1, None)
        self._since = 0.0
        self._waited = 0.0
        self._whole = False
        self._bodies = 0
        self._work_s = 0.0
        self._load_s = 0.0
        self._background_s = 0.0

    @property
    def value(self) -> float:
        """Seconds per shard; 0: not known yet."""
        return statistics.median(self._steps) if len(self._steps) >= ENOUGH else 0.0

    def begin_phase(self, group: Group, *, first: bool) -> None:
        """A step begins, or another phase of it; a step that was begun before and not finished is forgotten."""
        self._group = group
        if first:
            self._bodies = 0
            self._work_s = self._load_s = self._background_s = 0.0

    def begin_body(self, *, whole: bool) -> None:
        """A body is next. `whole`: its shard has the full number of samples; others do not count."""
        self._whole = whole
        self._bodies += whole

    def loaded(self, load_s: float, processes: int) -> None:
        """Its batch was loaded, which took `load_s` in one of so many background processes; 0: in this one."""
        if not self._whole:
            return
        if processes:
            self._background_s += load_s / processes
        else:
            self._load_s += load_s

    def restart(self) -> None:
        """What was done since the last lap is not the shard's work."""
        self._since, self._waited = time.monotonic(), self._group.waited_s

    def lap(self) -> None:
        """What was done since the last lap, or restart, is the shard's work, but for waiting in collectives."""
        since, waited = self._since, self._waited
        self.restart()
        if self._whole:
            self._work_s += self._since - since - (self._waited - waited)

    def finish_step(self) -> None:
        """The step is finished: its measurement counts."""
        if self._bodies:
            self._steps.append(max(self._work_s + self._load_s, self._background_s) / self._bodies)
