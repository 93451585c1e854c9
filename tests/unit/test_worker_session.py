"""What a worker tells the head of itself while it goes from one generation to the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

import torch

from fallow.model import (
    Abort,
    Beat,
    BeatAck,
    Commit,
    Doing,
    FromWorker,
    Interrupt,
    KvOp,
    KvReply,
    KvRequest,
    Outcome,
    Peer,
    Prepare,
    ToWorker,
    Vote,
    Welcome,
    WorkerReady,
)
from fallow.worker.session.progress import Progress
from fallow.worker.session.session import HEAD_SILENT_S, Answered, Session


class Wire:
    """The head's end of a session."""

    last_heard = float("inf")

    def __init__(self, *, grouped: bool = True) -> None:
        self.sent: list[FromWorker] = []
        self.voted = threading.Event()
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
            self.voted.set()
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


def test_who_hears_the_answer_of_a_member_that_is_gone_goes_on_with_it_and_takes_the_generation_later() -> None:
    wire = Wire()
    wire.session.progress.move(in_loop=False)
    wire.session.hold(1, "a connection is lost")
    prepare = Prepare(
        term=1,
        generation=2,
        replaces=1,
        members=[Peer(worker="w0", address="127.0.0.1")],
        interrupt=True,
        timeout_s=9,
        outcome=Outcome(generation=1, agreed=3, answer=0.5),
    )
    wire.say(prepare)
    assert wire.voted.wait(9), "it is committed before anybody looks"
    with pytest.raises(Answered) as answered:
        wire.session.await_commit(lambda: False, lambda announced: announced == prepare)
    assert (answered.value.agreed, answered.value.answer) == (3, 0.5)
    beat = wire.beat()
    assert (beat.held, beat.doing) == (False, Doing.OUTSIDE)
    assert wire.session.await_commit(lambda: False).prepare.generation == 2


def test_groups_are_made_for_the_device_that_was_announced() -> None:
    wire = Wire()
    ready = WorkerReady(worker="w0", signature="s", layout=[], shards=1, global_batch=1)
    wire.session.announce(ready, torch.device("meta"))
    members = [Peer(worker="w0", address="127.0.0.1")]
    wire.say(Prepare(term=1, generation=1, replaces=0, members=members, interrupt=False, timeout_s=9))
    group = wire.session.await_commit(lambda: False).group
    assert group is not None
    assert group.device == torch.device("meta")


def test_a_beat_that_does_not_know_of_a_vote_is_not_sent_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vote may be the last one: to a head that has committed by then, this member would seem to have missed it."""
    wire = Wire()
    members = [Peer(worker="w0", address="127.0.0.1")]
    prepare = Prepare(term=1, generation=2, replaces=1, members=members, interrupt=True, timeout_s=9)
    link = threading.Thread(target=wire.say, args=(prepare,))

    def doing(*_: object) -> tuple[Doing, float]:
        """While the beat is made, all that a vote needs comes to pass, as far as it can."""
        link.start()
        wire.voted.wait(0.2)
        return Doing.WAITING, 0.0

    monkeypatch.setattr(Progress, "doing", doing)
    wire.session.beat()
    assert wire.voted.wait(9)
    link.join()
    beat, vote = (said for said in wire.sent if isinstance(said, Beat | Vote))
    assert isinstance(vote, Vote)
    assert isinstance(beat, Beat)
    assert beat.prepared < vote.generation


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


def test_a_member_leaves_without_the_head_only_where_its_node_goes_away_and_the_head_is_silent() -> None:
    wire = Wire()
    silent, heard = time.monotonic() - HEAD_SILENT_S - 1.0, float("inf")
    wire.last_heard = silent
    assert not wire.session.leaves_alone(30.0), "its node stays"
    wire.say(BeatAck(term=1, ready=True, deadline_in_s=25.0))
    assert wire.session.leaves_alone(30.0)
    assert not wire.session.leaves_alone(10.0), "there is time"
    wire.session.warn()
    assert wire.session.leaves_alone(10.0)
    wire.last_heard = heard
    assert not wire.session.leaves_alone(30.0), "the head releases it"


def test_a_worker_with_infinite_patience_waits_for_a_silent_head() -> None:
    """Those of a base job: what ends the wait is a head, or Slurm."""
    wire = Wire()
    wire.last_heard = time.monotonic() - 1e6
    patient = Welcome(
        term=1, run="r", seed=0, max_workers=1, beat_s=1, lease_s=9, head_patience_s=float("inf"), folder=""
    )
    wire.say(msgspec.msgpack.decode(msgspec.msgpack.encode(patient), type=Welcome))
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            members = [Peer(worker="w0", address="127.0.0.1")]
            wire.say(Prepare(term=1, generation=2, replaces=1, members=members, interrupt=True, timeout_s=9))
        return looks < 3

    assert wire.session.await_commit(look).prepare.generation == 2
