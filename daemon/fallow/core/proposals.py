"""Which generation a roster calls for. Pure: it reads the roster and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fallow.core.roster import Change, Roster
from fallow.model import ChangeKind, GenerationReport, RunStatus, WorkerPhase


@dataclass(frozen=True, slots=True)
class Proposal:
    """A generation to begin."""

    kind: ChangeKind
    members: list[str]
    leavers: list[str]
    reason: str


def wanted(roster: Roster) -> Proposal | None:
    """The planned change that is due. Joins and leaves known now go together."""
    r = roster
    staying, leaving = r.staying(), r.leaving()
    joiners = r.standbys()[: max(0, r.useful_members - len(staying))]
    if not r.members:
        needed = r.min_members if r.status is RunStatus.WAITING else 1
        if joiners and len(joiners) >= min(needed, r.useful_members):
            reason = "started with " if r.generation == 0 else "went on with "
            return Proposal(ChangeKind.START, joiners, [], reason + named(r, joiners))
        return None
    rollback = r.rollback if staying or joiners else None  # else a suspension: others load the checkpoint
    if not joiners and not leaving and rollback is None:
        return None
    if joiners and rollback is None and not any(r.workers[w].has_state for w in staying):
        # Newcomers take the state from members of their own generation: one of the leavers stays for one more.
        keeper = next((w for w in leaving if r.workers[w].has_state), None)
        leaving = [w for w in leaving if w != keeper]
        staying = [w for w in r.members if w in staying or w == keeper]
    reasons = []
    if rollback is not None:
        reasons.append(f"rolled back to step {rollback.to_step}")
    if joiners:
        reasons.append("absorbed " + named(r, joiners))
    if leaving:
        why = sorted({r.workers[w].leaving_because or "asked" for w in leaving})
        reasons.append(f"released {named(r, leaving)} ({', '.join(why)})")
    if rollback is not None:
        return Proposal(ChangeKind.START, staying + joiners, leaving, ", ".join(reasons))
    kinds = {(True, False): ChangeKind.ABSORB, (False, True): ChangeKind.RELEASE, (True, True): ChangeKind.MIXED}
    return Proposal(kinds[bool(joiners), bool(leaving)], staying + joiners, leaving, ", ".join(reasons))


def after_loss(roster: Roster, involved: list[str], reason: str) -> Proposal | None:
    """The generation of the survivors of a broken one; None: there are none.

    Survivors hold the state: they may stand inside of a step, where nobody can receive it from them. A leaver that has
    not left yet stays if no other survivor is left. If nobody holds the state, all begin together, as at a start.

    Args:
        roster: of the run.
        involved: living members and leavers of the broken generation, in rank order.
        reason: why it broke.
    """
    holders = [w for w in involved if roster.workers[w].has_state]
    staying = [w for w in involved if roster.workers[w].phase is WorkerPhase.MEMBER]
    members = [w for w in holders if w in staying] or holders or staying
    if roster.restarts:
        members = staying  # scripts that begin again need no state
    leavers = [w for w in involved if w not in members and w not in staying]
    if members and roster.restarts and not roster.scripted:
        members += roster.standbys()[: max(0, roster.useful_members - len(members))]
    kind = ChangeKind.EJECT if roster.rollback is None else ChangeKind.START
    return Proposal(kind, members, leavers, reason) if members else None


def involved(roster: Roster) -> list[str]:
    """Members of the current generation and of the one being made, and those leaving it."""
    r = roster
    names: Iterable[str] = r.members if r.change is None else [*r.members, *r.change.participants]
    return list(dict.fromkeys(names))


def is_involved(roster: Roster, worker: str) -> bool:
    """Is it one of them?"""
    return worker in roster.members or (roster.change is not None and roster.change.concerns(worker))


def report_of(change: Change, at: float) -> GenerationReport:
    """What is remembered of a change that is complete at `at`."""
    return GenerationReport(
        generation=change.generation,
        kind=change.kind,
        members=list(change.members),
        first_step=change.first_step,
        pause_s=change.pause_s,
        parts=change.parts,
        bytes_in_pause=change.bytes_in_pause,
        bytes_behind=change.bytes_behind,
        reason=change.reason,
        took_s=at - change.began_at,
    )


def named(roster: Roster, workers: Iterable[str]) -> str:
    return ", ".join(f"{w} ({roster.workers[w].node})" for w in workers)
