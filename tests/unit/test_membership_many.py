"""A large run: all members answer one by one, and what each says costs no look at all the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallow.core import changes
from fallow.core import events as ev
from fallow.core.changes import Awaited
from fallow.core.membership import Membership
from fallow.core.proposals import Proposal, wanted
from fallow.core.roster import Roster, Worker
from fallow.core.timing import Timing
from fallow.model import (
    PROTOCOL,
    Active,
    Beat,
    Commit,
    Held,
    Message,
    Parts,
    Prepare,
    RunStatus,
    Vote,
    WorkerHello,
    WorkerPhase,
    WorkerReady,
)

MANY = 300
NAMES = [f"w{number}" for number in range(MANY)]


class Looks:
    """Counts questions after single workers, and goings through all of them."""

    def __init__(self) -> None:
        self.single = self.all = 0


class _Set(set[str]):
    looks: Looks

    def __contains__(self, worker: object) -> bool:
        self.looks.single += 1
        return super().__contains__(worker)


class _List(list[str]):
    looks: Looks

    def __iter__(self) -> Iterator[str]:
        self.looks.all += 1
        return super().__iter__()


def watched(machine: Membership) -> Looks:
    """Count from now on."""
    looks, change = Looks(), machine.roster.change
    assert change is not None
    _Set.looks = _List.looks = looks
    change.votes, change.active = _Set(change.votes), _Set(change.active)
    change.members, machine.roster.members = _List(change.members), _List(machine.roster.members)
    return looks


def say(machine: Membership, message: Any) -> list[type[Message]]:
    """The sorts of messages that follow."""
    told = machine.handle(ev.Said(at=1.0, message=message))
    return [type(instruction.message) for instruction in told if isinstance(instruction, ev.Tell)]


@pytest.mark.parametrize("order", [list, lambda names: names[::-1], lambda names: names[1::2] + names[::2]])
def test_each_vote_and_each_switch_is_looked_at_once(order: Callable[[list[str]], list[str]]) -> None:
    workers = {
        name: Worker(worker=name, index=number, token="t", node=name, phase=WorkerPhase.MEMBER, has_state=True)
        for number, name in enumerate(NAMES)
    }
    roster = Roster(run="r", min_members=1, max_members=MANY, limit=MANY, workers=workers, members=list(NAMES))
    roster.generation = roster.high = 1
    roster.status = RunStatus.TRAINING
    machine = Membership(roster, term=1, timing=Timing(), at=0.0)
    machine.handle(ev.WorkerGone(at=1.0, worker="w7", reason="killed by signal 9", signal=9))
    looks = watched(machine)
    left = order([name for name in NAMES if name != "w7"])
    for name in left:
        assert not say(machine, Held(worker=name, generation=1, step=1, reason="interrupted"))
    assert looks.all == 0
    for name in left[:-1]:
        assert not say(machine, Vote(worker=name, generation=2, ok=True))
    assert looks.all == 0
    assert len(say(machine, Vote(worker=left[-1], generation=2, ok=True))) == MANY - 1, "all are told to switch"
    assert looks.single <= 4 * MANY
    looks = watched(machine)
    for name in left[:-1]:
        say(machine, Active(worker=name, generation=2, first_step=1, pause_s=0.1, parts=Parts()))
    assert looks.single <= 4 * MANY
    assert looks.all <= 1
    assert roster.change is not None
    say(machine, Active(worker=left[-1], generation=2, first_step=1, pause_s=0.1, parts=Parts()))
    assert roster.change is None
    assert roster.history[-1].members == [name for name in NAMES if name != "w7"]


def test_beats_from_before_the_commit_do_not_have_it_repeated() -> None:
    timing = Timing()
    machine = Membership(Roster(run="r", min_members=3, max_members=3, limit=3), term=1, timing=timing, at=0.0)
    for name in NAMES[:3]:
        machine.handle(ev.WorkerExpected(at=0.0, worker=name, token="t", node=name))
        say(machine, WorkerReady(worker=name, signature="s", layout=[], shards=8, global_batch=8))
    for name in NAMES[:3]:
        told = say(machine, Vote(worker=name, generation=1, ok=True))
    assert told == [Commit] * 3

    def answered(at: float) -> list[type[Message]]:
        beat = Beat(worker="w0", generation=0, prepared=1, step=0, held=False)
        out = machine.handle(ev.Said(at=at, message=beat))
        return [type(instruction.message) for instruction in out if isinstance(instruction, ev.Tell)]

    assert not answered(1.0)
    assert not answered(1.0 + timing.resend_s / 2)
    assert answered(1.0 + timing.resend_s) == [Commit], "it has missed it"
    assert not answered(1.5 + timing.resend_s)


def test_who_is_on_the_way_is_no_reason_to_look_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counting(roster: Roster) -> Proposal | None:
        nonlocal looks
        looks += 1
        return wanted(roster)

    monkeypatch.setattr(changes, "wanted", counting)
    machine = Membership(
        Roster(run="r", min_members=2, max_members=MANY, limit=MANY), term=1, timing=Timing(), at=0.0, validate=True
    )
    for name in NAMES[:50]:
        machine.handle(ev.WorkerExpected(at=1.0, worker=name, token="t", node=name))
        hello = WorkerHello(worker=name, pid=1, address="127.0.0.1", protocol=PROTOCOL, version="0", torch="0")
        assert not say(machine, hello)
    assert looks <= 1
    first, second = (
        WorkerReady(worker=name, signature="s", layout=[], shards=MANY, global_batch=MANY) for name in NAMES[:2]
    )
    assert not say(machine, first)
    assert say(machine, second) == [Prepare, Prepare], "two are enough, and they are asked at once"


@given(st.lists(st.sampled_from("abc"), unique=True), st.lists(st.sampled_from("abcd")))
def test_all_have_done_it_when_the_last_has(workers: Sequence[str], order: Sequence[str]) -> None:
    awaited, done = Awaited(workers), set[str]()
    assert awaited.all(done.__contains__) == (not workers)
    for worker in order:
        done.add(worker)
        assert awaited.all(done.__contains__) == (set(workers) <= done)
