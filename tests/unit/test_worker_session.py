"""What a worker tells the head of itself while it goes from one generation to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from fallow.model import (
    Abort,
    Beat,
    Commit,
    FromWorker,
    Interrupt,
    KvOp,
    KvReply,
    KvRequest,
    Peer,
    Prepare,
    ToWorker,
    Vote,
    Welcome,
)
from fallow.worker.session import Session


class Wire:
    """The head's end of a session."""

    last_heard = float("inf")

    def __init__(self, *, grouped: bool = True) -> None:
        self.sent: list[FromWorker] = []
        self.session = Session("w0", "127.0.0.1", self._connect, grouped=grouped)
        self.say(Welcome(term=1, run="r", seed=0, max_workers=1, beat_s=1, lease_s=9, head_patience_s=30, folder=""))

    def _connect(self, on_message: Callable[[ToWorker], None], on_connect: Callable[[], None]) -> Any:
        self.say = on_message
        return self

    def start(self) -> None: ...

    def close(self) -> None: ...

    def send(self, message: FromWorker) -> None:
        asked_again = isinstance(message, KvRequest) and message in self.sent
        self.sent.append(message)
        if isinstance(message, Vote):
            self.say(Commit(term=1, generation=message.generation))
        if isinstance(message, KvRequest) and asked_again:
            self.say(KvReply(id=message.id, ok=True))

    def beat(self) -> Beat:
        self.session.beat()
        return next(message for message in reversed(self.sent) if isinstance(message, Beat))


def test_a_member_is_held_until_it_takes_the_next_generation_and_no_longer() -> None:
    """In that one's first exchange it waits for members, whose links have to be looked at if that does not end."""
    wire = Wire()
    wire.session.hold(1, "a connection is lost")
    assert wire.beat().held
    members = [Peer(worker="w0", address="127.0.0.1")]
    wire.say(Prepare(term=1, generation=2, replaces=1, members=members, interrupt=True, timeout_s=9))
    taken = wire.session.await_commit(lambda: False)
    assert taken.prepare.generation == 2
    assert not wire.beat().held


def test_where_there_are_no_groups_the_current_generation_outlives_one_that_is_given_up() -> None:
    """Its members' agents still ask in its store: they wait there for each other's scripts to end."""
    wire = Wire(grouped=False)
    members = [Peer(worker="w0", address="127.0.0.1")]
    wire.say(Prepare(term=1, generation=1, replaces=0, members=members, interrupt=False, timeout_s=9))
    assert wire.session.await_commit(lambda: False).group is None
    wire.say(Prepare(term=1, generation=2, replaces=1, members=members, interrupt=False, timeout_s=9))
    wire.say(Abort(term=1, generation=2, reason="the training is finished"))
    assert not wire.session.superseded
    assert wire.session.ask(1, KvOp.GET, ["key"], b"", 1.0).ok
    wire.say(Interrupt(term=1, generation=1, reason="w1 is gone"))
    assert wire.session.superseded
