"""The clock on which one run's leases and deadlines run: the time for which the head was awake and heard somebody.

A head that was stopped, waited for its store or was cut off must not take its own absence for the death of others. So

- the clock goes on by `LONGEST_TICK_S` from one tick to the next at most, however long that took;
- it stands still while nobody of the run is heard for `DEAF_S`, though somebody should be: it is the head that is away;
- it knows when the last absence ended, since connections come back one by one.

A tick must come only when all that was received before it has been handled (`head.inbox`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST_TICK_S = 1.0
DEAF_S = 3.0

ABSENCE_S = 5.0
"""Connections outlive a shorter absence. ZeroMQ's heartbeats end them after six seconds."""

RECONNECT_S = 30.0
"""Within this time after an absence every connection that can come back does."""


@dataclass(frozen=True, slots=True)
class Hearing:
    """What the head could hear of a run, in times of the run's clock."""

    newest_at: float
    "when somebody of the run was heard last"
    returned_at: float = -math.inf
    "when the head's last absence ended"


class LeaseClock:
    """Maps the head's monotonic clock to the time that counts for leases.

    Args:
        at: now, in seconds of the head's monotonic clock. The new clock shows the same.
    """

    def __init__(self, at: float) -> None:
        self._shows = at
        self._looked_at = at
        self._deaf_s = 0.0
        self._absent_s = 0.0
        self._newest_at = at
        self._returned_at = at

    def read(self, at: float) -> float:
        """What the clock shows. It never goes back."""
        passed_s = min(max(0.0, at - self._looked_at), LONGEST_TICK_S)
        return self._shows + max(0.0, min(passed_s, DEAF_S - self._deaf_s))

    def hear(self, at: float) -> None:
        """Somebody of the run was heard."""
        self._go_on(at)
        if self._absent_s > ABSENCE_S:
            self._returned_at = self._shows
        self._deaf_s = self._absent_s = 0.0
        self._newest_at = self._shows

    def tick(self, at: float, *, expects_somebody: bool) -> Hearing:
        """Go on to a tick: all that had been received by now has been handled.

        Args:
            at: now.
            expects_somebody: agents or workers of the run should be heard. Without any, silence means nothing.
        """
        self._go_on(at)
        if not expects_somebody:
            self._deaf_s = self._absent_s = 0.0
        return self.hearing

    @property
    def hearing(self) -> Hearing:
        """What was heard until now."""
        return Hearing(self._newest_at, self._returned_at)

    @property
    def is_deaf(self) -> bool:
        """Nobody was heard for so long that the clock stands still."""
        return self._deaf_s >= DEAF_S

    def _go_on(self, at: float) -> None:
        shows = self.read(at)
        self._deaf_s += shows - self._shows
        self._absent_s += max(0.0, at - self._looked_at)
        self._shows, self._looked_at = shows, max(at, self._looked_at)
