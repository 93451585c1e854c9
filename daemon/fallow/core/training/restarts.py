"""Runs whose script knows nothing of Fallow: a change of the membership restarts it on all members. Pure.

A restart costs what was computed since the script's own last checkpoint, and the time in which it comes up again.
"""

from collections.abc import Sequence

EVERY_S = 300.0
"""Newcomers wait until the scripts have run for so long: then restarts take a small part of the time at most."""

LEAST_MINUTES = 10
"""A node that is there for less time spends most of it waiting for the others."""

PAUSE_S = 60.0
"""What a restart is taken to cost each member where holes are weighed: nobody measures it."""

ATTEMPTS = 3
"""So many times in a row a script that failed is started again among the same members."""

WELL_S = 600.0
"""A generation that lasted this long has gone well, whatever ends it."""


class Attempts:
    """How often in a row the same members were started. All of them see the same generations, so all count alike."""

    def __init__(self) -> None:
        self._members: list[str] = []
        self._began_at = 0.0
        self._again = 0

    def began(self, members: Sequence[str], at: float) -> None:
        """A generation begins.

        Args:
            members: its workers.
            at: now, in seconds.
        """
        same = sorted(members) == self._members and at - self._began_at < WELL_S
        self._again = self._again + 1 if same else 0
        self._members, self._began_at = sorted(members), at

    def spent(self, at: float) -> bool:
        """The script has failed again: was that once too often?"""
        return self._again >= ATTEMPTS and at - self._began_at < WELL_S
