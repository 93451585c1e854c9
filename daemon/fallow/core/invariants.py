"""Rules that the membership of a run never breaks; checked after every event in tests and under `fallow local`."""

from __future__ import annotations

from collections.abc import Iterable

from fallow.core import events as ev
from fallow.core.proposals import is_involved
from fallow.core.roster import Roster
from fallow.model import WorkerPhase


class InvalidMembership(AssertionError):
    """The machine broke one of its own rules; the story of the last events is in the message."""


def check(roster: Roster, story: Iterable[ev.Event]) -> None:
    """Assert the invariants that concern one run (I1 and I2 of the protocol among them).

    Raises:
        InvalidMembership: naming the broken rules, the roster and the last events.
    """
    r, change = roster, roster.change
    leaving = [w.worker for w in r.workers.values() if w.phase is WorkerPhase.LEAVING]
    rules = {
        "generations only grow": r.generation <= r.high,
        "members are known": all(w in r.workers for w in r.members),
        "no worker twice": len(set(r.members)) == len(r.members),
        "an ended run changes nothing": not (r.status.ended and change is not None),
        "never more members than allowed": r.status.ended or len(r.staying()) <= max(r.max_members, r.min_members),
        "who has to leave hears of it": r.status.ended or r.finishing or all(is_involved(r, w) for w in leaving),
    }
    if change is not None:
        rules["a change has the newest number"] = change.generation == r.high
        rules["a change follows the generation it replaces"] = change.committed or change.replaces == r.generation
        rules["a committed change is the generation"] = not change.committed or r.generation == change.generation
        rules["a change that only looks is never committed"] = not (change.probe and change.committed)
        rules["nobody joins and leaves at once"] = not set(change.members) & set(change.leavers)
        holders = {w for w in [*change.members, *change.leavers] if r.alive(w) and r.workers[w].has_state}
        kept = not holders or not change.members or bool(holders & set(change.members))
        kept = kept or change.rollback_to is not None
        known = {r.workers[w].has_state for w in change.members if r.alive(w)}
        rules["only a whole generation is changed as planned"] = change.interrupt or change.committed or not r.lost()
        survivors = not change.interrupt or change.committed or r.restarts or len(known) < 2
        rules["who survives needs nobody's state"] = survivors
        rules["the state does not leave with those who leave"] = kept or change.committed
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        told = "\n".join(map(str, story))
        raise InvalidMembership(f"run {r.run}: {'; '.join(broken)}\n{r}\nstory:\n{told}")
