"""The two tables that say what the machine does. Conditions: `conditions`. Actions: `facts`, `moves` and `losses`.

`NODE`: for each report, every row that counts in the node's phase and whose condition holds is carried out, in order.
`RUN`: after each event, the first row of the run's phase whose condition holds is carried out, until none holds.

Rows of `NODE` note facts, rows of `RUN` look at how things stand. So it does not matter in which order facts come in,
or how often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fallow.core.membership import conditions as when
from fallow.core.membership import facts, losses, moves
from fallow.core.membership.messages import Report
from fallow.core.membership.records import Node
from fallow.core.membership.state import RunPhase, State
from fallow.model import MemberPhase


@dataclass(frozen=True, slots=True)
class Fact:
    """What a node's report shows, in which phases of the node this counts, and what is done."""

    name: str
    phases: frozenset[MemberPhase]
    condition: Callable[[State, Node, Report], bool]
    action: Callable[[State, Node, Report], None]


@dataclass(frozen=True, slots=True)
class Rule:
    """In a phase of the run: what holds, and what is done."""

    name: str
    condition: Callable[[State], bool]
    action: Callable[[State], None]


_ANY = frozenset(MemberPhase)
_STARTING, _SILENT = frozenset((MemberPhase.STARTING,)), frozenset((MemberPhase.SILENT,))
_ALIVE = _ANY - {MemberPhase.GONE}
_VOTERS = frozenset((MemberPhase.READY, MemberPhase.MEMBER, MemberPhase.LEAVING))
_MEMBERS = frozenset((MemberPhase.MEMBER, MemberPhase.LEAVING))
_SEATED = frozenset((MemberPhase.MEMBER, MemberPhase.LEAVING, MemberPhase.SILENT))
_LEAVERS = frozenset((MemberPhase.LEAVING, MemberPhase.SILENT))

_TAKE_IN = partial(moves.rebuild, reason="members are heard again")
_PART = partial(moves.rebuild, reason="some of its members have the state and some have not")

NODE: tuple[Fact, ...] = (
    Fact("makes progress", _SEATED, lambda m, node, said: True, facts.note_progress),
    Fact("is heard again", _SILENT, lambda m, node, said: m.outbox.has_heard(node.id, said), facts.take_back),
    Fact("has a checkpoint", _ANY, when.has_saved, facts.note_saved),
    Fact("could not save one", _ANY, when.could_not_save, facts.note_unsaved),
    Fact("could not load one", _ANY, lambda m, node, said: said.damaged is not None, facts.note_damaged),
    Fact("has failed", _ALIVE, lambda m, node, said: said.fault is not None and not node.finished, facts.note_fault),
    Fact("is ready", _STARTING, lambda m, node, said: said.ready is not None, facts.note_ready),
    Fact("has deserted", _MEMBERS, when.has_deserted, facts.note_deserted),
    Fact("has finished", _SEATED, when.has_finished, facts.note_finished),
    Fact("has left", _LEAVERS, when.has_left, facts.note_left),
    Fact("has left unasked", frozenset((MemberPhase.MEMBER,)), when.has_left, facts.note_left_alone),
    Fact("refuses", _VOTERS, when.refuses, facts.note_refusal),
    Fact("votes", _VOTERS, when.votes, lambda m, node, said: m.open_ballot.awaited.discard(node.id)),
    Fact("has arrived", _MEMBERS, when.has_arrived, facts.note_arrival),
    Fact("has lost its group", _MEMBERS, when.has_lost_its_group, facts.note_broken_group),
    Fact("missed an order", _ANY, lambda m, node, said: not m.outbox.has_heard(node.id, said), facts.resend),
)

RUN: dict[RunPhase, tuple[Rule, ...]] = {
    RunPhase.LISTENING: (),
    RunPhase.DESERTED: (Rule("a generation is voted on", lambda m: m.voting is not None, moves.await_deserter),),
    RunPhase.EMPTY: (
        Rule("the last member is lost", when.has_lost_members, moves.rebuild),
        Rule("enough nodes are ready", when.change_is_due, moves.prepare),
    ),
    RunPhase.STEADY: (
        Rule("a member is lost", when.has_lost_members, moves.rebuild),
        Rule("its generation is broken", when.generation_is_broken, _TAKE_IN),
        Rule("its group broke", when.group_broke, moves.rebuild_group),
        Rule("all wait in vain", when.all_wait_in_vain, moves.rebuild_stuck),
        Rule("all wait", when.all_wait, moves.probe),
        Rule("a change is due", when.change_is_due, moves.prepare),
    ),
    RunPhase.PREPARING: (
        Rule("a member is lost", when.has_lost_members, moves.rebuild),
        Rule("the group broke", when.group_broke, moves.rebuild_group),
        Rule("it is spoiled", when.is_spoiled, moves.burn),
        Rule("links are cut", when.is_explained, moves.drop_newcomers),
        Rule("all have voted, and what was before is over", when.may_commit, moves.commit),
        Rule("votes are late", when.is_late, moves.burn_late),
    ),
    RunPhase.PROBING: (
        Rule("a member is lost", when.has_lost_members, moves.rebuild),
        Rule("the group broke", when.group_broke, moves.rebuild_group),
        Rule("it is spoiled", when.is_spoiled, moves.burn),
        Rule("links are cut", when.is_explained, moves.drop_cut_off),
        Rule("all have voted", when.is_unanimous, moves.burn_reachable),
        Rule("votes are late", when.is_late_and_heard, moves.eject_late),
    ),
    RunPhase.REBUILDING: (
        Rule("another member is lost", when.has_lost_members, moves.rebuild),
        Rule("it is spoiled", when.is_spoiled, moves.rebuild),
        Rule("links are cut", when.is_explained, moves.drop_cut_off),
        Rule("a group could not be built", when.group_broke, moves.rebuild_group),
        Rule("not all have the state", when.is_mixed, _PART),
        Rule("all have voted, and what was before is over", when.may_commit, moves.commit),
        Rule("votes are late", when.is_late_and_heard, moves.eject_late),
    ),
    RunPhase.SWITCHING: (
        Rule("a member is lost", when.has_lost_members, moves.rebuild),
        Rule("its generation is broken", when.generation_is_broken, _TAKE_IN),
        Rule("a group broke", when.group_broke, moves.rebuild_group),
        Rule("all are there", when.all_have_arrived, moves.complete),
        Rule("all wait in vain", when.all_wait_in_vain, moves.rebuild_stuck),
        Rule("the first exchange does not end", when.all_wait, moves.rebuild_first_exchange),
    ),
    RunPhase.FINISHING: (
        Rule("all are there", when.all_have_arrived, moves.complete),
        Rule("the main member is lost", when.main_is_lost, losses.end_without_main),
        Rule("all have finished", when.all_have_finished, losses.end_well),
    ),
    RunPhase.ENDED: (),
}
