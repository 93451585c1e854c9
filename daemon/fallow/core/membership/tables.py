"""The two tables that hold all decisions, and the conditions of their rows. Actions are in `facts`, `moves`, `losses`.

`NODE`: for each report, the machine carries out every row of the node's phase whose condition holds, in order.
`RUN`: after each event, it carries out the first row of the run's phase whose condition holds, until none holds.

Rows of `NODE` note facts. Rows of `RUN` look at the resulting state, so the order and number of reports do not matter.
Conditions change nothing. The tables are at the end of this module.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fallow.core.membership import facts, losses, moves
from fallow.core.membership.messages import Report
from fallow.core.membership.proposals import planned, put_off_s
from fallow.core.membership.records import Node
from fallow.core.membership.state import RunPhase, State
from fallow.model import MemberPhase


class Fact(NamedTuple):
    """A row of `NODE`: what a report may show, in which phases of the node it counts, and the action."""

    name: str
    phases: frozenset[MemberPhase]
    condition: Callable[[State, Node, Report], bool]
    action: Callable[[State, Node, Report], None]


class Rule(NamedTuple):
    """A row of `RUN`: a condition on the run, and the action."""

    name: str
    condition: Callable[[State], bool]
    action: Callable[[State], None]


# -- conditions: a node's report --------------------------------------------------------------------------------------


def has_failed(m: State, node: Node, report: Report) -> bool:
    return report.fault is not None and not node.finished


def has_left(m: State, node: Node, report: Report) -> bool:
    return 0 < report.passed_boundary >= report.generation


def refuses(m: State, node: Node, report: Report) -> bool:
    ballot, refusal = m.voting, report.refusal
    if ballot is None or refusal is None or refusal.generation != ballot.change.generation:
        return False
    return node.id in ballot.awaited and node.id not in ballot.refusals


def votes(m: State, node: Node, report: Report) -> bool:
    """The new group is built, and the node has given up what the plan interrupts. A newcomer must not compute yet."""
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
    """The node's group broke in a generation that is still in use and that the head itself has not given up."""
    root = m.roster.root
    if m.voting is not None and m.voting.change.interrupt:
        return False
    was_member = node.joined < root.generation
    oldest = root.change.replaces if root.old_may_step and root.change is not None and was_member else root.generation
    is_news = report.given_up > m.trouble.broken and report.given_up >= oldest
    return m.roster.is_inside(node) and root.generation > 0 and is_news


# -- conditions: the run ----------------------------------------------------------------------------------------------


def group_broke(m: State) -> bool:
    """A group broke, and no end of a node has explained the break in time."""
    group = m.trouble.group
    return group is not None and m.watch.now >= group.rebuild_at


def is_broken(m: State) -> bool:
    """The committed generation was given up when it had no member left, and members are heard again."""
    return 0 < m.roster.root.generation <= m.trouble.broken and bool(m.roster.present())


def is_explained(m: State) -> bool:
    """Enough refusals have come to know which nodes do not reach each other."""
    ballot = m.open_ballot
    if ballot.refused_at is None:
        return False
    accused = {n for refusal in ballot.refusals.values() for n in refusal.unreachable}
    decided_at = min(ballot.refused_at + m.timing.accuse_s, ballot.deadline)
    return (m.is_tick and m.watch.is_past(decided_at)) or not ballot.awaited - ballot.refusals.keys() - accused


def is_unanimous(m: State) -> bool:
    return not m.open_ballot.awaited


def is_mixed(m: State) -> bool:
    """Some survivors have the state and some do not. The state cannot be handed over inside a step."""
    return is_unanimous(m) and not m.roster.restarts and len({m.has_state(n) for n in m.open_ballot.members}) > 1


def may_commit(m: State) -> bool:
    """All have voted, and every generation before is certainly over. This is the safety rule, see `machine`."""
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
    return all(
        any(n in voters or _has_ended(m, n, g) for n in members_needed) for g, members_needed in may_step.items()
    )


def _has_ended(m: State, node: int, generation: int) -> bool:
    """The node will finish no more step of this generation: its end is proved, or it has given the generation up."""
    record, report = m.roster.nodes.get(node), m.watch.reports.get(node)
    return record is None or record.proved_gone or (report is not None and report.given_up >= generation)


def is_late(m: State) -> bool:
    """Votes are missing after the deadline. Only ticks check this: they come after all received reports."""
    ballot = m.open_ballot
    return m.is_tick and bool(ballot.awaited) and m.watch.is_past(ballot.deadline)


def is_late_and_heard(m: State) -> bool:
    """Votes are late although connections had time to come back and at least one member is heard."""
    if not is_late(m):
        return False
    ballot = m.open_ballot
    late_nodes = [n for n in ballot.awaited if m.roster.alive(n)]
    if any(map(m.watch.may_reconnect, late_nodes)):
        return False
    members = [n for n in ballot.participants if m.roster.nodes[n].seat and m.roster.alive(n)]
    since_s = m.watch.now - ballot.began_at
    return not members or any(n not in late_nodes or m.watch.unheard_s(n) < since_s for n in members)


def all_wait(m: State) -> bool:
    return m.is_tick and len(m.roster.members) > 1 and m.watch.all_wait_s() > m.trouble.probe_s


def all_wait_in_vain(m: State) -> bool:
    return m.is_tick and m.watch.all_wait_s() > m.timing.progress_s


def change_is_due(m: State) -> bool:
    """A planned change is due. It needs every vote, so it does not begin while a participant is not heard."""
    if not m.may_be_due or m.watch.now < m.trouble.retry_at:
        return False
    proposal = planned(m)
    if proposal is None or put_off_s(m, proposal):
        return False
    voters = [*proposal.members, *proposal.leavers]
    return not any(m.watch.unheard_s(n) > m.timing.lease_s or m.watch.may_reconnect(n) for n in voters)


def all_have_arrived(m: State) -> bool:
    going = m.going
    return going is not None and not going.awaited and not any(map(m.roster.alive, going.change.leavers))


def main_is_lost(m: State) -> bool:
    main = m.roster.nodes.get(m.roster.root.main)
    return main is not None and main.phase is MemberPhase.GONE and not main.finished


def all_have_finished(m: State) -> bool:
    """All members with the state have finished. Newcomers without it never reached their boundary."""
    r = m.roster
    if not all(r.nodes[n].finished for n in r.present() if m.has_state(n)):
        return False
    main = r.nodes.get(r.root.main)
    # The exit code is known when the processes have ended. A library may still be uploading its logs.
    return main is None or not main.alive or m.watch.over_s(main.id) > m.timing.progress_s


# -- the tables -------------------------------------------------------------------------------------------------------

_ANY = frozenset(MemberPhase)
_STARTING, _SILENT = frozenset((MemberPhase.STARTING,)), frozenset((MemberPhase.SILENT,))
_MEMBER, _ALIVE = frozenset((MemberPhase.MEMBER,)), _ANY - {MemberPhase.GONE}
_MEMBERS = frozenset((MemberPhase.MEMBER, MemberPhase.LEAVING))
_VOTERS = _MEMBERS | {MemberPhase.READY}
_SEATED, _LEAVERS = _MEMBERS | _SILENT, frozenset((MemberPhase.LEAVING, MemberPhase.SILENT))

NODE: tuple[Fact, ...] = (
    Fact("makes progress", _SEATED, lambda m, node, report: True, facts.note_progress),
    Fact("is heard again", _SILENT, lambda m, node, report: m.outbox.has_heard(node.id, report), facts.take_back),
    Fact("has a checkpoint", _ANY, lambda m, node, report: report.saved is not None, facts.note_saved),
    Fact("could not save one", _ANY, lambda m, node, report: report.unsaved is not None, facts.note_unsaved),
    Fact("could not load one", _ANY, lambda m, node, report: report.damaged is not None, facts.note_damaged),
    Fact("has failed", _ALIVE, has_failed, facts.note_fault),
    Fact("is ready", _STARTING, lambda m, node, report: report.ready is not None, facts.note_ready),
    Fact("has deserted", _MEMBERS, lambda m, node, report: report.deserted and not node.finished, facts.note_deserted),
    Fact("has finished", _SEATED, lambda m, node, report: report.finish is not None, facts.note_finished),
    Fact("has left", _LEAVERS, has_left, facts.note_left),
    Fact("has left unasked", _MEMBER, has_left, facts.note_left_alone),
    Fact("refuses", _VOTERS, refuses, facts.note_refusal),
    Fact("votes", _VOTERS, votes, lambda m, node, report: m.open_ballot.awaited.discard(node.id)),
    Fact("has arrived", _MEMBERS, has_arrived, facts.note_arrival),
    Fact("has lost its group", _MEMBERS, has_lost_its_group, facts.note_broken_group),
    Fact("missed an order", _ANY, lambda m, node, report: not m.outbox.has_heard(node.id, report), facts.resend),
)

_LOSS = Rule("a member is lost", lambda m: bool(m.trouble.lost_members), moves.rebuild)
_RETURN = Rule("its generation is broken", is_broken, partial(moves.rebuild, reason="members are heard again"))
_BREAK = Rule("a group broke", group_broke, moves.rebuild_group)
_IN_VAIN = Rule("all wait in vain", all_wait_in_vain, moves.rebuild_stuck)
_WAIT = Rule("all wait", all_wait, moves.probe)
_EXCHANGE = Rule("the first exchange does not end", all_wait, moves.rebuild_first_exchange)
_CHANGE_IS_DUE = Rule("a change is due", change_is_due, moves.prepare)
_DESERTION = Rule("a generation is voted on", lambda m: m.voting is not None, moves.await_deserter)
_BURNED = Rule("it is spoiled", lambda m: bool(m.open_ballot.spoiled), moves.burn)
_SPOILED = _BURNED._replace(action=moves.rebuild)
_CUT_NEWCOMERS = Rule("links are cut", is_explained, moves.drop_newcomers)
_CUT = _CUT_NEWCOMERS._replace(action=moves.drop_cut_off)
_REACHED = Rule("all have voted", is_unanimous, moves.burn_reachable)
_MIXED = Rule("not all have the state", is_mixed, partial(moves.rebuild, reason="some of its members lack the state"))
_ELECTED = Rule("all have voted, and what was before is over", may_commit, moves.commit)
_LATE_PLAN = Rule("votes are late", is_late, moves.burn_late)
_VOTES_ARE_LATE = Rule("votes are late", is_late_and_heard, moves.eject_late)
_COMPLETE = Rule("all are there", all_have_arrived, moves.complete)
_NO_MAIN = Rule("the main member is lost", main_is_lost, losses.end_without_main)
_FINISHED = Rule("all have finished", all_have_finished, losses.end_well)

RUN: dict[RunPhase, tuple[Rule, ...]] = {
    RunPhase.LISTENING: (),
    RunPhase.DESERTED: (_DESERTION,),
    RunPhase.EMPTY: (_LOSS, _CHANGE_IS_DUE),
    RunPhase.STEADY: (_LOSS, _RETURN, _BREAK, _IN_VAIN, _WAIT, _CHANGE_IS_DUE),
    RunPhase.PREPARING: (_LOSS, _BREAK, _BURNED, _CUT_NEWCOMERS, _ELECTED, _LATE_PLAN),
    RunPhase.PROBING: (_LOSS, _BREAK, _BURNED, _CUT, _REACHED, _VOTES_ARE_LATE),
    RunPhase.REBUILDING: (_LOSS, _SPOILED, _CUT, _BREAK, _MIXED, _ELECTED, _VOTES_ARE_LATE),
    RunPhase.SWITCHING: (_LOSS, _RETURN, _BREAK, _COMPLETE, _IN_VAIN, _EXCHANGE),
    RunPhase.FINISHING: (_COMPLETE, _NO_MAIN, _FINISHED),
    RunPhase.ENDED: (),
}
