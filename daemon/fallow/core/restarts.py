"""Runs whose script knows nothing of Fallow: a change of the membership restarts it on all members. Pure.

A restart costs what was computed since the script's own last checkpoint, and the time in which it comes up again.
"""

from __future__ import annotations

from collections.abc import Sequence

from fallow.core.proposals import named, wanted
from fallow.core.roster import Roster
from fallow.model import ChangeKind

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


def wait_s(roster: Roster, kind: ChangeKind, lasted_s: float) -> float:
    """For how many seconds a planned change has to be put off, so that restarts do not eat what newcomers bring.

    Who leaves is waited for by somebody, and newcomers go along with them; a schedule says itself when.

    Args:
        roster: whose change it is.
        kind: of the change.
        lasted_s: for how long the scripts have run since they were started last.
    """
    if not roster.restarts or roster.scripted or kind is not ChangeKind.ABSORB:
        return 0.0
    return max(0.0, EVERY_S - lasted_s)


def waiting(roster: Roster, lasted_s: float) -> str:
    """Which newcomers are put off, for how long and why, in words; empty: none.

    Args:
        roster: of the run.
        lasted_s: for how long the scripts have run since they were started last.
    """
    proposal = None if roster.change is not None or roster.status.ended else wanted(roster)
    left_s = 0.0 if proposal is None else wait_s(roster, proposal.kind, lasted_s)
    if proposal is None or not left_s:
        return ""
    newcomers = [worker for worker in proposal.members if worker not in roster.members]
    return (
        f"{named(roster, newcomers)} {'waits' if len(newcomers) == 1 else 'wait'} for another {left_s / 60:.0f} min: a "
        f"newcomer restarts the script everywhere, which has to run for {EVERY_S / 60:.0f} min from one such restart "
        "to the next"
    )


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
