"""Which generation the state calls for: who joins, who leaves, who has to go. Nothing is changed here."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fallow.core.membership.state import State
from fallow.core.training.restarts import EVERY_S
from fallow.model import ChangeKind, MemberPhase, RunStatus


class Proposal(NamedTuple):
    """A generation to begin."""

    kind: ChangeKind
    members: list[int]
    "in rank order"
    leavers: list[int]
    reason: str


def planned(m: State) -> Proposal | None:
    """The planned change that is due; None: there is none. Joins and leaves that are known now go together."""
    roster = m.roster
    staying, leaving = roster.present(MemberPhase.MEMBER), roster.present(MemberPhase.LEAVING)
    joiners = roster.fitting(staying, roster.standbys())
    if not staying and not leaving:
        return _start(m, joiners)
    if 0 < roster.root.generation <= roster.root.rollback_below:
        # Between two steps: a script that is inside of one may have no way back to another part of itself. Whoever
        # stays is the proof that this boundary has been reached; where nobody does, newcomers begin after the leave.
        if staying:
            return Proposal(ChangeKind.START, staying + joiners, leaving, roster.rolled_back)
        joiners = []
    if not joiners and not leaving:
        return None
    if joiners and not any(map(m.has_state, staying)):
        # Newcomers take the state from members of their own generation: one of the leavers stays for one more.
        keeper = next(filter(m.has_state, leaving), None)
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


def _start(m: State, joiners: list[int]) -> Proposal | None:
    roster, root, needed = m.roster, m.roster.root, 1
    if root.status is RunStatus.WAITING:
        # Fewer suffice if the limit or the number of shards leaves no place for more.
        is_full = len(joiners) < len(roster.standbys())
        needed = 1 if is_full else min(root.minimum, root.limit)
    if not joiners or len(joiners) < needed:
        return None
    verb = "went on" if root.generation else "started"
    return Proposal(ChangeKind.START, joiners, [], f"{verb} with {roster.names(joiners)}")


def after_loss(m: State, survivors: Sequence[int], reason: str) -> Proposal | None:
    """The generation of those who are left of a broken one; None: nobody is.

    Survivors who have the state may stand inside a step, where nobody can receive it from them. So they go on alone,
    and members whose state was on its way are absorbed later. A leaver stays if no member has the state.
    If nobody has it, all begin together from a checkpoint.

    Args:
        m: of the run.
        survivors: living members of the broken generation and of the one before, in rank order.
        reason: why the generation broke.
    """
    roster = m.roster
    staying = [n for n in survivors if roster.nodes[n].phase is not MemberPhase.LEAVING]
    holders = [n for n in survivors if m.has_state(n)]
    members = [n for n in holders if n in staying] or holders or staying
    if roster.restarts:
        # Scripts that begin again need no state, and newcomers cost nothing more.
        members = staying if roster.root.scripted else staying + roster.fitting(staying, roster.standbys())
    leavers = [n for n in survivors if n not in members and n not in staying]
    kind = ChangeKind.START if roster.root.rollback_below else ChangeKind.EJECT
    return Proposal(kind, members, leavers, reason) if members else None


def put_off_s(m: State, proposal: Proposal) -> float:
    """For how many seconds a planned change has to wait, so that restarts do not eat what newcomers bring."""
    if not m.roster.restarts or m.roster.root.scripted or proposal.kind is not ChangeKind.ABSORB:
        return 0.0
    return max(0.0, EVERY_S - (m.watch.now - m.watch.committed_at))


def to_drop(accusations: Mapping[int, Sequence[int]], by_age: Sequence[int], holders: Collection[int]) -> list[int]:
    """A small set of nodes without whom everybody left reaches everybody left.

    A cut link is symmetric here: whoever of the two noticed, one of them goes. Greedy, the most accused first, since
    the smallest such set (a vertex cover) is hard to find in general; for one bad node or one bad link it is exact.

    Args:
        accusations: node -> whom it cannot reach.
        by_age: all nodes concerned, the oldest first; of equals the youngest goes.
        holders: those who have the state; one of them always stays.
    """
    age = {node: number for number, node in enumerate(by_age)}
    cut = {frozenset((a, b)) for a, others in accusations.items() for b in others if a in age and b in age and a != b}
    dropped: list[int] = []
    while cut:
        degree = Counter(node for pair in cut for node in pair)
        left = [node for node in holders if node not in dropped]
        free = [node for node in degree if left != [node]]
        worst = max(free, key=lambda node: (degree[node], age[node]))
        dropped.append(worst)
        cut = {pair for pair in cut if worst not in pair}
    return dropped
