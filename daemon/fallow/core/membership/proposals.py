"""Which generation to propose next: who joins, who leaves, who must be dropped. Pure functions of the state."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fallow.core.membership.state import State
from fallow.core.training.restarts import EVERY_S
from fallow.model import ChangeKind, MemberPhase, RunStatus


class Proposal(NamedTuple):
    """A generation to propose."""

    kind: ChangeKind
    members: list[int]
    "in rank order"
    leavers: list[int]
    reason: str


def planned(m: State) -> Proposal | None:
    """Return the planned change that is due, with all joins and leaves known now; None: no change is due."""
    roster = m.roster
    staying, leaving = roster.present(MemberPhase.MEMBER), roster.present(MemberPhase.LEAVING)
    joiners = roster.fitting(staying, roster.standbys())
    if not staying and not leaving:
        return _start(m, joiners)
    if 0 < roster.root.generation <= roster.root.rollback_below:
        # A rollback happens between two steps, because a script inside of a step may have no way back. A member that
        # stays proves that the boundary has been reached. If none stays, newcomers begin after the leavers are gone.
        if staying:
            return Proposal(ChangeKind.START, staying + joiners, leaving, roster.rolled_back)
        joiners = []
    if not joiners and not leaving:
        return None
    if joiners and not any(map(m.has_state, staying)):
        # Newcomers take the state from members of their own generation, so one leaver stays one generation longer.
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
    roster, root, nodes_needed = m.roster, m.roster.root, 1
    if root.status is RunStatus.WAITING:
        # Fewer nodes suffice if the limit or the number of shards allows no more.
        is_full = len(joiners) < len(roster.standbys())
        nodes_needed = 1 if is_full else min(root.minimum, root.limit)
    if not joiners or len(joiners) < nodes_needed:
        return None
    verb = "went on" if root.generation else "started"
    return Proposal(ChangeKind.START, joiners, [], f"{verb} with {roster.names(joiners)}")


def after_loss(m: State, survivors: Sequence[int], reason: str) -> Proposal | None:
    """Return the generation that follows a broken one; None: no member is left.

    Survivors with the state may be inside a step, where they cannot hand it over. So they continue alone, and members
    whose state was on its way are absorbed later. A leaver stays if no other member has the state. If no survivor has
    it, all begin together from a checkpoint.

    Args:
        m: state of the run.
        survivors: living members of the broken generation and of the previous one, in rank order.
        reason: why the generation broke.
    """
    roster = m.roster
    staying = [n for n in survivors if roster.nodes[n].phase is not MemberPhase.LEAVING]
    holders = [n for n in survivors if m.has_state(n)]
    members = [n for n in holders if n in staying] or holders or staying
    if roster.restarts:
        # Restarted scripts need no state, so newcomers join at no extra cost.
        members = staying if roster.root.scripted else staying + roster.fitting(staying, roster.standbys())
    leavers = [n for n in survivors if n not in members and n not in staying]
    kind = ChangeKind.START if roster.root.rollback_below else ChangeKind.EJECT
    return Proposal(kind, members, leavers, reason) if members else None


def put_off_s(m: State, proposal: Proposal) -> float:
    """Seconds for which a planned change must wait, so that restarts do not cost more than newcomers bring."""
    if not m.roster.restarts or m.roster.root.scripted or proposal.kind is not ChangeKind.ABSORB:
        return 0.0
    return max(0.0, EVERY_S - (m.watch.now - m.watch.committed_at))


def to_drop(accusations: Mapping[int, Sequence[int]], by_age: Sequence[int], holders: Collection[int]) -> list[int]:
    """Return a small set of nodes to drop so that all remaining nodes reach each other.

    A cut link counts for both of its ends, and one of them is dropped. The smallest set is a minimum vertex cover,
    which is hard to find in general. This greedy search drops the most accused node first, which is exact for a single
    bad node or a single bad link.

    Args:
        accusations: node -> nodes that it cannot reach.
        by_age: all nodes concerned, the oldest first; of equals the youngest is dropped.
        holders: nodes that have the state; one of them always stays.
    """
    age = {node: number for number, node in enumerate(by_age)}
    cut = {
        frozenset((a, b))
        for a, unreachable in accusations.items()
        for b in unreachable
        if a in age and b in age and a != b
    }
    dropped: list[int] = []
    while cut:
        degree = Counter(node for pair in cut for node in pair)
        remaining_holders = [node for node in holders if node not in dropped]
        free = [node for node in degree if remaining_holders != [node]]
        worst = max(free, key=lambda node: (degree[node], age[node]))
        dropped.append(worst)
        cut = {pair for pair in cut if worst not in pair}
    return dropped
