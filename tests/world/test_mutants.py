"""The histories can tell: where a guard is taken away, one of them shows a violation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from fallow.core.membership import conditions, losses, machine, moves, proposals, tables
from fallow.core.membership.messages import Report
from fallow.core.membership.records import Node
from fallow.core.membership.roster import Roster
from fallow.core.membership.state import Plans, State
from fallow.core.membership.watch import Watch
from world.world import play

Take = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which a guard is missing."""

_BEGIN, _PLANS, _SEAT, _AFTER_LOSS = moves._begin, moves._plans, Roster.seat, proposals.after_loss


def _commit_if(condition: Callable[[State], bool]) -> Take:
    rows = {
        phase: tuple(
            dataclasses.replace(r, condition=condition) if r.condition is conditions.may_commit else r for r in rules
        )
        for phase, rules in tables.RUN.items()
    }
    return partial(patch.dict, tables.RUN, rows)


def _fact(name: str, action: Callable[[State, Node, Report], None]) -> Take:
    rows = tuple(dataclasses.replace(fact, action=action) if fact.name == name else fact for fact in tables.NODE)
    assert rows != tables.NODE
    return partial(patch.object, tables, "NODE", rows)


def _half_voted(m: State) -> bool:
    return m.voting is not None and 2 * len(m.voting.awaited) <= len(m.voting.members)


def _reuse(m: State, *args: Any, **more: Any) -> None:
    m.roster.root.highest = m.roster.root.generation
    _BEGIN(m, *args, **more)


def _plans_with_leavers(*args: Any) -> Plans:
    plans = _PLANS(*args)
    return plans._replace(delta=msgspec.structs.replace(plans.delta, without=()))


def _seat_unwritten(self: Roster, members: list[int], joined: list[int]) -> None:
    _SEAT(self, members, joined)
    self.unwritten -= {f"node/{n}" for n in members}


def _after_loss_all(roster: Roster, survivors: Any, has_state: Any, *why: Any) -> proposals.Proposal | None:
    return _AFTER_LOSS(roster, survivors, lambda n: n in roster.members, *why)


def _own_silence(self: Watch, node: Node) -> float:
    return self._head.heard_at - self._heard_at.setdefault(node.id, self.now)


MUTANTS: dict[str, Take] = {
    "half of the votes suffice": _commit_if(_half_voted),
    "burned numbers are used again": partial(patch.object, moves, "_begin", _reuse),
    "orders go out before the write": nullcontext,  # in the world itself, as the next one
    "the store does not fence": nullcontext,
    "seats are not written": partial(patch.object, Roster, "seat", _seat_unwritten),
    "survivors are mixed with those who wait for the state": partial(
        patch.object, moves, "after_loss", _after_loss_all
    ),
    "leavers are not taken out of the delta": partial(patch.object, moves, "_plans", _plans_with_leavers),
    "nothing is said twice": _fact("missed an order", lambda m, node, said: None),
    "a member that lost its seat stays a member": partial(patch.object, Roster, "standbys", lambda self: []),
}
RARE: dict[str, Take] = {
    "a node that is heard again is ended": _fact(
        "is heard again", lambda m, node, said: losses.dismiss(m, node, machine.Exit.TEMPFAIL, node.ended)
    ),
    "steps are no sign of life": partial(patch.object, Watch, "_silent_s", _own_silence),
}


def is_noticed(name: str, take: Take, most: int) -> bool:
    for number in range(most):
        try:
            with take():
                play(300_000 + number, mutant=name)
        except (AssertionError, LookupError):
            return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_guard_is_noticed(name: str) -> None:
    assert is_noticed(name, MUTANTS[name], 150)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RARE)
def test_many_histories_notice_guards_that_are_seldom_needed(name: str) -> None:
    assert is_noticed(name, RARE[name], 2000)
