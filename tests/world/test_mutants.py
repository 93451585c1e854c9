"""Each guard is needed: where it is taken away a test by hand fails, or a history of the world shows a violation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from fallow.core.membership import events as ev
from fallow.core.membership import facts, losses, machine, moves, proposals, tables, watch
from fallow.core.membership.machine import InvalidMembership, Machine
from fallow.core.membership.messages import Plan, Report
from fallow.core.membership.records import Node
from fallow.core.membership.roster import Roster
from fallow.core.membership.state import RunPhase, State
from fallow.core.membership.watch import Watch
from fallow.model import MemberPhase
from world import test_absent, test_failures, test_planned, test_rebuilt, test_records, test_saved, test_world
from world.observer import Violation
from world.rig import NOTICED_BY
from world.world import play

Take = Callable[[], Any]
"""Makes a context manager in which a guard is missing."""


def _rule(phase: RunPhase, name: str, **changed: Any) -> Take:
    """A row of the run's table is changed; without changes it is taken out."""
    rules = tables.RUN[phase]
    assert any(rule.name == name for rule in rules)
    new = [r._replace(**changed) if r.name == name else r for r in rules if changed or r.name != name]
    return lambda: patch.dict(tables.RUN, {phase: tuple(new)})


def _condition(old: Callable[[State], bool], new: Callable[[State], bool]) -> Take:
    """A condition is another one, in every row."""
    table = {
        phase: tuple(r._replace(condition=new) if r.condition is old else r for r in rules)
        for phase, rules in tables.RUN.items()
    }
    return lambda: patch.dict(tables.RUN, table)


def _fact(name: str, **changed: Any) -> Take:
    """A row of the nodes' table is changed; without changes it is taken out."""
    assert any(fact.name == name for fact in tables.NODE)
    rows = [f._replace(**changed) if f.name == name else f for f in tables.NODE if changed or f.name != name]
    return lambda: patch.object(tables, "NODE", tuple(rows))


def _object(target: Any, name: str, new: Any) -> Take:
    return lambda: patch.object(target, name, new)


def _handler(event: type[ev.Event], new: Callable[[Machine, Any], None]) -> Take:
    return lambda: patch.dict(machine._HANDLERS, {event: new})


@contextmanager
def _nothing() -> Iterator[None]:
    """The mutant is in the world itself: `World.mutant`."""
    yield


def _any_prepared(m: State, node: Node, report: Report) -> bool:
    voting = m.voting
    return voting is not None and report.prepared == voting.change.generation and node.id in voting.awaited


def _half_voted(m: State) -> bool:
    return m.voting is not None and 2 * len(m.voting.awaited) <= len(m.voting.members)


def _commit_without_old(m: State) -> None:
    moves.commit(m)
    m.roster.root.old_may_step = False


def _suspend_for_good(m: State, leavers: list[int], reason: str) -> None:
    _SUSPEND(m, leavers, reason)
    m.roster.root.change = None


def _leave_any(m: State, node: Node, report: Report) -> None:
    facts.note_left(m, node, report)
    m.roster.root.old_may_step = False


def _any_seq(self: Machine, event: ev.Reported) -> None:
    last = self.watch.reports.get(event.report.node)
    if last is not None and event.report.seq <= last.seq:
        event = msgspec.structs.replace(event, report=msgspec.structs.replace(event.report, seq=last.seq + 1))
    Machine._report(self, event)


def _reuse(m: State, *args: Any, **more: Any) -> None:
    m.roster.root.highest = m.roster.root.generation
    _BEGIN(m, *args, **more)


def _leavers_in_delta(*args: Any) -> tuple[Plan, Plan]:
    whole, delta = _PLANS(*args)
    return whole, msgspec.structs.replace(delta, without=())


def _seat_unwritten(self: Roster, members: list[int], joined: list[int]) -> None:
    _SEAT(self, members, joined)
    self.unwritten -= {f"node/{n}" for n in members}


def _seat_for_good(self: Roster, members: list[int], joined: list[int]) -> None:
    before = [node for node in self.nodes.values() if node.phase is MemberPhase.MEMBER]
    _SEAT(self, members, joined)
    for node in before:
        node.phase = MemberPhase.MEMBER


def _after_loss_all(m: State, survivors: Any, reason: str) -> proposals.Proposal | None:
    with patch.object(m, "has_state", lambda n: n in m.roster.members):
        return _AFTER_LOSS(m, survivors, reason)


def _plain_clock(self: Any, at: float) -> float:
    passed = at - self.ticked_at
    self.ticked_at = at
    return float(passed)


def _clock_without_deaf(self: Any, at: float) -> float:
    passed = min(1.0, at - self.ticked_at)
    self.ticked_at = at
    return float(passed)


def _own_silence(self: Watch, node: Node) -> float:
    return self._head.heard_at - self._heard_at[node.id]


def _end_silent(m: State, node: Node, report: Report) -> None:
    losses.dismiss(m, node, machine.Exit.TEMPFAIL, node.ended)


def _silence_is_proof(m: State, node: int, generation: int) -> bool:
    return not m.roster.alive(node) or _HAS_ENDED(m, node, generation)


def _forget_unproved(m: State, node: Node) -> None:
    if not m.roster.is_inside(node) and node.id not in m.participants() and not node.alive:
        m.roster.forget(node)


def _recover_numbers(m: State, report: Report, host: str) -> None:
    _RECOVER(m, report, host)
    m.roster.root.recovered = 0


def _hear_all(self: Machine, event: ev.Reported) -> None:
    if event.report.term > self.outbox.term:
        event = msgspec.structs.replace(event, report=msgspec.structs.replace(event.report, term=self.outbox.term))
    _REPORT(self, event)


def _release_at_once(self: Machine, event: ev.Release) -> None:
    Machine._release(self, event)
    self.may_be_due = True


def _blame_all(self: Watch) -> dict[int, float]:
    reports = {n: msgspec.structs.replace(report, computes=False) for n, report in self.reports.items()}
    with patch.object(self, "reports", reports):
        return _STALLED(self)


def _keep_checkpoint_quietly(m: State, new: Any) -> None:
    voting = m.voting
    spoiled = voting.spoiled if voting is not None else ""
    _KEEP_CHECKPOINT(m, new)
    if voting is not None:
        voting.spoiled = spoiled


_RECOVER, _REPORT, _STALLED = machine.recover, Machine._report, Watch._stalled
_KEEP_CHECKPOINT = machine.keep_checkpoint
_BEGIN, _PLANS, _SEAT, _AFTER_LOSS = moves._begin, moves._plans, Roster.seat, proposals.after_loss
_SUSPEND = moves._suspend
_HAS_ENDED = tables._has_ended

MUTANTS: dict[str, Take] = {
    # safety
    "commits without proof that the old generation is over": _condition(tables.may_commit, tables.is_unanimous),
    "silence proves that a node has ended": _object(tables, "_has_ended", _silence_is_proof),
    "votes count of nodes that have not given up": _fact("votes", condition=_any_prepared),
    "half of the votes suffice": _condition(tables.may_commit, _half_voted),
    "it is forgotten that the old generation steps until the boundary": _rule(
        RunPhase.PREPARING, "all have voted, and what was before is over", action=_commit_without_old
    ),
    "a suspended run forgets that the generation before may act": _object(moves, "_suspend", _suspend_for_good),
    "a former leaver ends a generation that it was not in": _fact("has left", action=_leave_any),
    "burned numbers are used again": _object(moves, "_begin", _reuse),
    "orders go out before the write": _nothing,
    "the store does not fence": _nothing,
    "seats are not written": _object(Roster, "seat", _seat_unwritten),
    "survivors are mixed with those who wait for the state": _object(moves, "after_loss", _after_loss_all),
    "votes that show a lost state count": _rule(RunPhase.REBUILDING, "not all have the state"),
    "what a node held before it was away counts": _object(State, "_state_since", lambda self, node: 0),
    "leavers are not taken out of the delta": _object(moves, "_plans", _leavers_in_delta),
    "numbers that a store lost are not heard of": _object(machine, "recover", lambda m, report, host: None),
    "what a node held before a generation that the store lost counts": _object(machine, "recover", _recover_numbers),
    "a new head does not listen": _object(watch.Watch, "heard_all", lambda self: True),
    "members hear of a commit before its newcomers": _object(State, "_told_last", lambda self: set()),
    # absence
    "a tick comes ahead of what lies in the inbox": _object(watch._Hearing, "advance", _plain_clock),
    "the clock goes on though nobody is heard": _object(watch._Hearing, "advance", _clock_without_deaf),
    "steps are no sign of life": _object(Watch, "_silent_s", _own_silence),
    "silence counts though nobody waits": _object(Watch, "_counts", lambda self, node: True),
    "overtaken reports count": _handler(ev.Reported, _any_seq),
    "a node that is heard again is ended": _fact("is heard again", action=_end_silent),
    "nothing is said twice": _fact("missed an order"),
    "claims to obey a newer head are believed": _handler(ev.Reported, _hear_all),
    "no connection may come back": _object(Watch, "may_reconnect", lambda self, node: False),
    # progress
    "votes have no deadline (rebuilding)": _rule(RunPhase.REBUILDING, "votes are late"),
    "votes have no deadline (planned)": _rule(RunPhase.PREPARING, "votes are late"),
    "leaving has no deadline": _object(Watch, "ends_within", lambda self, node, seconds: False),
    "a loss goes unnoticed while all switch": _rule(RunPhase.SWITCHING, "a member is lost"),
    "a broken group is not rebuilt": _rule(RunPhase.SWITCHING, "a group broke"),
    "nobody comes back into a broken generation": _rule(RunPhase.STEADY, "its generation is broken"),
    "nobody looks at links": _rule(RunPhase.STEADY, "all wait"),
    "the first exchange may last for ever": _rule(RunPhase.SWITCHING, "the first exchange does not end"),
    "a deserter is not waited for": _object(State, "deserters", lambda self: []),
    "a spoiled ballot is committed": _rule(RunPhase.PREPARING, "it is spoiled"),
    "a member that lost its seat stays a member": _object(Roster, "seat", _seat_for_good),
    "a checkpoint of a history that was left is loaded": _object(facts, "_is_superseded", lambda roster, new: False),
    "groups that always break on one node are rebuilt for ever": _object(moves, "ATTEMPTS", 1000),
    "a leaver that hangs is waited for": _object(Roster, "inside", lambda self: self.members),
    "of nodes that are stuck all are to blame": _object(Watch, "_stalled", _blame_all),
    "each release is a generation": _handler(ev.Release, _release_at_once),
    "a checkpoint that turns up does not stop a start": _object(machine, "keep_checkpoint", _keep_checkpoint_quietly),
    "finished nodes are not counted": _fact("has finished"),
    "a failed script is not noticed": _fact("has failed"),
    "nodes are forgotten though their end is not proved": _object(losses, "forget_if_unneeded", _forget_unproved),
}
"""What is missing -> how it is taken away."""

# -- who notices -------------------------------------------------------------------------------------------------------

BY_HAND = (test_absent, test_failures, test_planned, test_rebuilt, test_records, test_saved, test_world)
"""Have tests that say which guard they notice (`rig.notices`)."""

IN_HISTORIES = {
    "half of the votes suffice",
    "burned numbers are used again",
    "orders go out before the write",
    "the store does not fence",
    "seats are not written",
    "survivors are mixed with those who wait for the state",
    "leavers are not taken out of the delta",
    "nothing is said twice",
    "a member that lost its seat stays a member",
}
"""Noticed within 150 histories."""


def histories_until_noticed(name: str, most: int) -> int:
    """In which history the missing guard is noticed, from 1; 0: in none.

    The observer or the machine itself has to notice: another error is the mutant's own. And it has to be for the
    mutant's sake that it does.
    """
    for number in range(most):
        try:
            with MUTANTS[name]():
                play(300_000 + number, mutant=name)
        except (Violation, InvalidMembership):
            play(300_000 + number)
            return number + 1
    return 0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_guard_is_noticed(name: str) -> None:
    if name in IN_HISTORIES:
        assert histories_until_noticed(name, 150)
        return
    NOTICED_BY[name]()
    # The test's own assertion or the machine's: another error is the mutant's own.
    with MUTANTS[name](), pytest.raises(AssertionError):
        NOTICED_BY[name]()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["a node that is heard again is ended", "steps are no sign of life"])
def test_many_histories_notice_by_themselves(name: str) -> None:
    assert histories_until_noticed(name, 2000)
