"""Whether an agent's silence is its own. A head that was stopped, cut off or busy hears nobody, and blames nobody.

The membership judges nodes in the same manner (`core.membership.watch`), by what their workers report. This is for
agents that have no worker to report for, and it counts agents of all runs.
"""

from __future__ import annotations

import math

ABSENCE_S = 5.0
"""When nobody was heard for so long, connections of agents may have broken meanwhile."""

RECONNECT_S = 30.0
"""So long after an absence of the head agents may take to come back."""


class Hearing:
    """When this head heard agents, of whichever run. All times are on the head's clock."""

    def __init__(self) -> None:
        self._heard_at = -math.inf
        self._back_at = -math.inf
        "when the last absence ended"

    def hear(self, at: float) -> None:
        """A message of an agent was received."""
        if at - self._heard_at >= ABSENCE_S:
            self._back_at = at
        self._heard_at = max(at, self._heard_at)

    def silent_s(self, seen_at: float, now: float) -> float:
        """For how long an agent that was last heard at `seen_at` was silent while another one was heard."""
        if seen_at < self._back_at and now < self._back_at + RECONNECT_S:
            return 0.0
        return max(0.0, self._heard_at - seen_at)
