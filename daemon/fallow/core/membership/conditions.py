"""Conditions of the two tables. Pure: each looks at the state and says whether its row applies."""

from __future__ import annotations

from fallow.core.membership.messages import Report
from fallow.core.membership.proposals import planned, put_off_s
from fallow.core.membership.records import Node
from fallow.core.membership.state import State
from fallow.model import MemberPhase

# -- a node's report --------------------------------------------------------------------------------------------------


def has_saved(m: State, node: Node, report: Report) -> bool:
    return report.saved is not None and report.saved.path != node.noted


def could_not_save(m: State, node: Node, report: Report) -> bool:
    problem = report.unsaved
    return problem is not None and (problem.generation, problem.step) > m.roster.root.unsaved


def has_deserted(m: State, node: Node, report: Report) -> bool:
    return report.deserted and not (node.deserted or node.finished)


def has_finished(m: State, node: Node, report: Report) -> bool:
    return report.finish is not None and not node.finished and m.is_inside(node)


def has_left(m: State, node: Node, report: Report) -> bool:
    return report.left > 0 and report.left >= report.generation


def refuses(m: State, node: Node, report: Report) -> bool:
    ballot, refusal = m.voting, report.refusal
    if ballot is None or refusal is None or refusal.generation != ballot.change.generation:
        return False
    return node.id in ballot.awaited and node.id not in ballot.refusals


def votes(m: State, node: Node, report: Report) -> bool:
    """Its group stands, and it has given up what the plan interrupts. A newcomer must not compute in any generation."""
    ballot = m.voting
    if ballot is None or report.prepared != ballot.change.generation or node.id not in ballot.awaited:
        return False
    if ballot.change.interrupt:
        return report.given_up >= max(report.generation, ballot.change.replaces)
    return node.seat > 0 or report.given_up >= report.generation


def has_arrived(m: State, node: Node, report: Report) -> bool:
    going = m.going
    if going is None or node.id not in going.awaited:
        return False
    return report.generation == going.change.generation and report.has_state


def has_lost_its_group(m: State, node: Node, report: Report) -> bool:
    """Of a generation in which somebody still has to compute, and that the head itself has not broken."""
    root = m.roster.root
    if m.voting is not None and m.voting.change.interrupt:
        return False
    was_member = node.joined < root.generation
    oldest = root.change.replaces if root.old_may_step and root.change is not None and was_member else root.generation
    is_news = report.given_up > m.trouble.broken and report.given_up >= oldest
    return m.is_inside(node) and root.generation > 0 and is_news


# -- the run ----------------------------------------------------------------------------------------------------------


def has_lost_members(m: State) -> bool:
    return bool(m.trouble.lost)


def group_broke(m: State) -> bool:
    """A group broke, and no news of a death came to explain it."""
    group = m.trouble.group
    return group is not None and m.watch.now >= group.rebuild_at


def generation_is_broken(m: State) -> bool:
    """The members' generation was given up when none of them was left."""
    return 0 < m.roster.root.generation <= m.trouble.broken and bool(m.roster.present())


def is_spoiled(m: State) -> bool:
    return bool(m.open_ballot.spoiled)


def is_explained(m: State) -> bool:
    """Enough refusals are in to say who does not reach whom."""
    ballot = m.open_ballot
    if ballot.refused_at is None:
        return False
    accused = {n for refusal in ballot.refusals.values() for n in refusal.unreachable}
    decided_at = min(ballot.refused_at + m.timing.accuse_s, ballot.deadline)
    return (m.is_tick and m.watch.is_past(decided_at)) or not ballot.awaited - ballot.refusals.keys() - accused


def is_unanimous(m: State) -> bool:
    return not m.open_ballot.awaited


def is_mixed(m: State) -> bool:
    """Votes show that some survivors have the state and some have not, which cannot be given to them inside a step."""
    contract = m.roster.root.contract
    if not is_unanimous(m) or (contract is not None and contract.restarts):
        return False
    return len({m.has_state(n) for n in m.open_ballot.members}) > 1


def may_commit(m: State) -> bool:
    """All have voted, and whatever was before is over for certain. This is the safety rule, see `machine`."""
    if not is_unanimous(m):
        return False
    ballot = m.open_ballot
    if not ballot.change.interrupt and m.roster.present():
        return True  # the members of the old generation agree on the boundary among themselves
    root, members, voters = m.roster.root, m.roster.members, set(ballot.members)
    may_step = {root.generation: members} if members else {}
    if root.old_may_step and root.change is not None:
        before = [n for n in members if m.roster.nodes[n].joined < root.generation]
        may_step[root.change.replaces] = before + root.change.leavers
    # A step takes all members of its generation.
    return all(any(n in voters or _has_ended(m, n, g) for n in needed) for g, needed in may_step.items())


def _has_ended(m: State, node: int, generation: int) -> bool:
    """The node will never finish a step of this generation again: its end is proved, or it has given it up."""
    known, report = m.roster.nodes.get(node), m.watch.reports.get(node)
    return known is None or known.proved_gone or (report is not None and report.given_up >= generation)


def is_late(m: State) -> bool:
    """Looked at with ticks only: before one, all that has come is read."""
    ballot = m.open_ballot
    return m.is_tick and bool(ballot.awaited) and m.watch.is_past(ballot.deadline)


def is_late_and_heard(m: State) -> bool:
    """Votes are late, and not just because connections come back one by one, or because no member is heard at all."""
    if not is_late(m):
        return False
    ballot = m.open_ballot
    late = [n for n in ballot.awaited if m.roster.alive(n)]
    if any(map(m.watch.may_reconnect, late)):
        return False
    members = [n for n in ballot.participants if m.roster.nodes[n].seat and m.roster.alive(n)]
    since_s = m.watch.now - ballot.began_at
    return not members or any(n not in late or m.watch.unheard_s(n) < since_s for n in members)


def all_wait_s(m: State) -> float:
    """For how long all members have waited for each other. Looked at with ticks only."""
    if not m.is_tick:
        return 0.0
    return min((m.watch.waited_s(n) for n in m.inside() if m.roster.alive(n)), default=0.0)


def all_wait(m: State) -> bool:
    return len(m.roster.members) > 1 and all_wait_s(m) > m.trouble.probe_s


def all_wait_in_vain(m: State) -> bool:
    return all_wait_s(m) > m.timing.progress_s


def change_is_due(m: State) -> bool:
    """A planned change needs every vote, so none is begun while a participant is not heard."""
    if not m.may_be_due or m.watch.now < m.trouble.retry_at:
        return False
    proposal = planned(m)
    if proposal is None or put_off_s(m, proposal):
        return False
    asked = [*proposal.members, *proposal.leavers]
    return not any(m.watch.unheard_s(n) > m.timing.lease_s or m.watch.may_reconnect(n) for n in asked)


def all_have_arrived(m: State) -> bool:
    going = m.going
    return going is not None and not going.awaited and not any(map(m.roster.alive, going.change.leavers))


def main_is_lost(m: State) -> bool:
    main = m.roster.nodes.get(m.roster.root.main)
    return main is not None and main.phase is MemberPhase.GONE and not main.finished


def all_have_finished(m: State) -> bool:
    """A newcomer without state is not awaited: the others never came to the boundary of its generation."""
    r = m.roster
    if not all(r.nodes[n].finished for n in r.present() if m.has_state(n)):
        return False
    main = r.nodes.get(r.root.main)
    if main is None or not main.alive:
        return True
    # Its exit code is known when its processes are gone. A library may still upload what it has logged.
    return m.watch.now - m.finished_at.setdefault(main.id, m.watch.now) > m.timing.progress_s
