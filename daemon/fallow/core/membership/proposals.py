"""Which generation a roster calls for. Pure: it reads the roster and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fallow.core.membership.roster import Roster
from fallow.core.training.restarts import EVERY_S
from fallow.model import ChangeKind, MemberPhase, RunStatus

HasState = Callable[[int], bool]
"""Has this node the whole state, as far as is known?"""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A generation to begin."""

    kind: ChangeKind
    members: list[int]
    "in rank order"
    leavers: list[int]
    reason: str


def planned(roster: Roster, has_state: HasState) -> Proposal | None:
    """The planned change that is due; None: there is none. Joins and leaves that are known now go together."""
    staying, leaving = roster.present(MemberPhase.MEMBER), roster.present(MemberPhase.LEAVING)
    joiners = roster.fitting(staying, roster.standbys())
    if not staying and not leaving:
        return _start(roster, joiners)
    if 0 < roster.root.generation <= roster.root.rollback_below:
        # Between two steps: a script that is inside of one may have no way back to another part of itself. Whoever
        # stays is the proof that this boundary has been reached; where nobody does, newcomers begin after the leave.
        if staying:
            return Proposal(ChangeKind.START, staying + joiners, leaving, roster.rolled_back)
        joiners = []
    if not joiners and not leaving:
        return None
    if joiners and not any(map(has_state, staying)):
        # Newcomers take the state from members of their own generation: one of the leavers stays for one more.
        keeper = next(filter(has_state, leaving), None)
        leaving = [n for n in leaving if n != keeper]
        staying = [n for n in roster.members if n in staying or n == keeper]
    reasons = []
    if joiners:
        reasons.append("absorbed " + roster.names(joiners))
    if leaving:
        why = sorted({roster.nodes[n].leaving or "asked" for n in leaving})
        reasons.append(f"released {roster.names(leaving)} ({', '.join(why)})")
    kinds = {(True, False): ChangeKind.ABSORB, (False, True): ChangeKind.RELEASE, (True, True): ChangeKind.MIXED}
    return Proposal(kinds[bool(joiners), bool(leaving)], staying + joiners, leaving, ", ".join(reasons))


def _start(roster: Roster, joiners: list[int]) -> Proposal | None:
    root, needed = roster.root, 1
    if root.status is RunStatus.WAITING:
        # Fewer suffice if the limit or the number of shards leaves no place for more.
        is_full = len(joiners) < len(roster.standbys())
        needed = 1 if is_full else root.minimum
    if not joiners or len(joiners) < needed:
        return None
    verb = "went on" if root.generation else "started"
    return Proposal(ChangeKind.START, joiners, [], f"{verb} with {roster.names(joiners)}")


def after_loss(
    roster: Roster, survivors: Sequence[int], has_state: HasState, kind: ChangeKind, reason: str
) -> Proposal | None:
    """The generation of those who are left of a broken one; None: nobody is.

    Survivors who have the state may stand inside a step, where nobody can receive it from them. So they go on alone,
    and members whose state was on its way are absorbed later. A leaver stays if no member has the state.
    If nobody has it, all begin together from a checkpoint.

    Args:
        roster: of the run.
        survivors: living members of the broken generation and of the one before, in rank order.
        has_state: see `HasState`.
        kind: of the change.
        reason: why the generation broke.
    """
    staying = [n for n in survivors if roster.nodes[n].phase is not MemberPhase.LEAVING]
    holders = [n for n in survivors if has_state(n)]
    members = [n for n in holders if n in staying] or holders or staying
    contract = roster.root.contract
    if contract is not None and contract.restarts:
        # Scripts that begin again need no state, and newcomers cost nothing more.
        members = staying if roster.root.scripted else staying + roster.fitting(staying, roster.standbys())
    leavers = [n for n in survivors if n not in members and n not in staying]
    return Proposal(kind, members, leavers, reason) if members else None


def put_off_s(roster: Roster, proposal: Proposal, lasted_s: float) -> float:
    """For how many seconds a planned change has to wait, so that restarts do not eat what newcomers bring.

    Args:
        roster: of the run.
        proposal: the change.
        lasted_s: for how long the scripts have run since they were started last.
    """
    contract = roster.root.contract
    if contract is None or not contract.restarts or roster.root.scripted or proposal.kind is not ChangeKind.ABSORB:
        return 0.0
    return max(0.0, EVERY_S - lasted_s)
