"""Guards that are taken away one at a time: a history of the world notices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from fallow.core.membership import conditions, moves, proposals, tables
from fallow.core.membership.roster import Roster
from fallow.core.membership.state import Plans, State
from world.world import play

MOST = 150
"""Histories in which a missing guard is noticed."""

_BEGIN, _PLANS, _SEAT, _AFTER_LOSS = moves._begin, moves._plans, Roster.seat, proposals.after_loss


def _half_voted(m: State) -> bool:
    return m.voting is not None and 2 * len(m.voting.awaited) <= len(m.voting.members)


def _half_suffices() -> AbstractContextManager[Any]:
    rules = {
        phase: tuple(
            dataclasses.replace(r, condition=_half_voted) if r.condition is conditions.may_commit else r for r in of
        )
        for phase, of in tables.RUN.items()
    }
    return patch.dict(tables.RUN, rules)


def _reuse(m: State, *args: Any, **more: Any) -> None:
    m.roster.root.highest = m.roster.root.generation
    _BEGIN(m, *args, **more)


def _plans_with_leavers(*args: Any) -> Plans:
    plans = _PLANS(*args)
    return plans._replace(delta=msgspec.structs.replace(plans.delta, without=()))


def _seat_unwritten(self: Roster, members: list[int], joined: list[int]) -> None:
    _SEAT(self, members, joined)
    self._changed -= {f"node/{n}" for n in members}


def _after_loss_all(
    roster: Roster, survivors: Any, has_state: Any, kind: Any, reason: str
) -> proposals.Proposal | None:
    return _AFTER_LOSS(roster, survivors, lambda n: n in roster.members, kind, reason)


MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "half of the votes suffice": _half_suffices,
    "burned numbers are used again": lambda: patch.object(moves, "_begin", _reuse),
    # These two are in the world itself: `World.mutant`.
    "orders go out before the write": nullcontext,
    "the store does not fence": nullcontext,
    "seats are not written": lambda: patch.object(Roster, "seat", _seat_unwritten),
    "survivors are mixed with those who wait for the state": lambda: patch.object(moves, "after_loss", _after_loss_all),
    "what a node held before it was away counts": lambda: patch.object(State, "_state_since", lambda self, node: 0),
    "leavers are not taken out of the delta": lambda: patch.object(moves, "_plans", _plans_with_leavers),
    "nothing is said twice": lambda: patch.object(
        tables, "NODE", tuple(fact for fact in tables.NODE if fact.name != "missed an order")
    ),
    "a member that lost its seat stays a member": lambda: patch.object(Roster, "standbys", lambda self: []),
}
"""What is missing -> how it is taken away."""


def play_all(name: str) -> None:
    with MUTANTS[name]():
        for seed in range(300_000, 300_000 + MOST):
            play(seed, mutant=name)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_guard_is_noticed(name: str) -> None:
    with pytest.raises((AssertionError, LookupError)):
        play_all(name)
