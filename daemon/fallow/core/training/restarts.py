"""Restarts of scripts that do not know Fallow: a change of the membership restarts the script on all members. Pure.

A restart costs the steps since the script's own last checkpoint, and the time of its start-up.
"""

from collections.abc import Sequence

EVERY_S = 300.0
"""Seconds for which scripts must have run before newcomers join, so that restarts take a small part of the time."""

LEAST_MINUTES = 10
"""Minimum minutes of a node. A shorter stay would mostly be spent waiting for the others."""

PAUSE_S = 60.0
"""Assumed seconds that a restart costs each member, used to weigh holes: nobody measures it."""

ATTEMPTS = 3
"""Maximum restarts in a row of a failing script among the same members."""

WELL_S = 600.0
"""A generation that lasted this many seconds counts as a success, whatever ends it."""


class Attempts:
    """How often in a row the same members were started. All members see the same generations, so all count alike."""

    def __init__(self) -> None:
        self._members: list[str] = []
        self._began_at = 0.0
        self._repeats = 0

    def begin(self, members: Sequence[str], at: float) -> None:
        """Note that a generation begins.

        Args:
            members: names of its workers.
            at: now, in seconds.
        """
        is_repeat = sorted(members) == self._members and at - self._began_at < WELL_S
        self._repeats = self._repeats + 1 if is_repeat else 0
        self._members, self._began_at = sorted(members), at

    def is_exhausted(self, at: float) -> bool:
        """Return True if the script, which has failed again, must not be restarted."""
        return self._repeats >= ATTEMPTS and at - self._began_at < WELL_S
