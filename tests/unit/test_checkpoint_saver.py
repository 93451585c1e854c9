"""When members take part in checkpoints: interval, wishes, vetoes, and suspending in the middle of a periodic one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fallow.model import Checkpointed, Welcome  # noqa: E402
from fallow.worker.checkpoint import writer as writing  # noqa: E402
from fallow.worker.checkpoint.restore import load  # noqa: E402
from fallow.worker.checkpoint.saver import Saver  # noqa: E402
from fallow.worker.group import Group  # noqa: E402
from fallow.worker.position import Position  # noqa: E402
from fallow.worker.prepared import Gate, Prepared  # noqa: E402
from fallow.worker.progress import Progress  # noqa: E402


class Session:
    """What a saver needs of the conversation with the head."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.checkpoint_wanted = False
        self.deadline_in_s: float | None = None
        self.progress = Progress()
        self.written: list[Checkpointed] = []
        self.sent: list[Any] = []

    def checkpoint_done(self) -> None:
        self.checkpoint_wanted = False

    def announce_checkpoint(self, written: Checkpointed) -> None:
        self.written.append(written)

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Member:
    """One of `size` members of generation 3."""

    def __init__(self, folder: Path, rank: int, size: int, every_s: float) -> None:
        self.session = Session(f"w{rank}")
        self.prepared = Prepared(Gate())
        torch.manual_seed(0)
        self.prepared.add(torch.nn.Linear(30, 20))
        self.group = Group(3, rank, size, None)
        welcome = Welcome(
            term=1,
            run="r",
            seed=0,
            max_workers=2,
            beat_s=1.0,
            lease_s=9.0,
            head_patience_s=9.0,
            folder=str(folder),
            checkpoint_s=every_s,
        )
        self.saver = Saver(self.session, welcome)  # type: ignore[arg-type]

    def save(self, step: int) -> None:
        self.saver.save(self.group, self.prepared, Position(step=step))

    def suspend(self, step: int) -> None:
        self.saver.suspend(self.group, self.prepared, Position(step=step))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No part is written before it is set."""
    opened = threading.Event()
    plain: Callable[..., Any] = writing.write_part

    def held_up(*args: Any) -> Any:
        assert opened.wait(30)
        return plain(*args)

    monkeypatch.setattr(writing, "write_part", held_up)
    return opened


def test_wishes_and_the_veto_of_the_busy(tmp_path: Path, gate: threading.Event) -> None:
    member = Member(tmp_path, 0, 1, every_s=0.0)
    assert member.saver.wish(1) == 0.0, "no interval, and nobody asked"
    member.saver.asked = True
    assert member.saver.wish(4) == 1.0
    member.save(1)
    assert not member.saver.asked
    member.session.checkpoint_wanted = True
    others = 3.0
    assert member.saver.wish(4) + others < 0, "whatever the others want"
    gate.set()
    member.saver.finish()
    assert member.saver.wish(4) == 1.0, "the wish that was made meanwhile is not forgotten"
    member.save(2)
    member.saver.finish()
    assert [one.asked for one in member.session.written] == [False, True]
    due = Member(tmp_path, 0, 1, every_s=1e-9)
    assert due.saver.wish(1) == 1.0


def test_suspending_in_the_middle_of_a_periodic_one_keeps_both(tmp_path: Path, gate: threading.Event) -> None:
    members = [Member(tmp_path, rank, 2, every_s=600.0) for rank in range(2)]
    for member in members:
        member.save(10)
    leaving = [threading.Thread(target=member.suspend, args=(12,)) for member in members]
    for thread in leaving:
        thread.start()
    gate.set()
    for thread in leaving:
        thread.join(30)
        assert not thread.is_alive()
    written = sorted((one for member in members for one in member.session.written), key=lambda one: one.step)
    assert [one.step for one in written] == [10, 12]
    assert [load(Path(one.path))["position"]["step"] for one in written] == [10, 12]
    assert not any(member.session.sent for member in members)


def test_a_step_that_is_being_written_is_not_written_twice(tmp_path: Path, gate: threading.Event) -> None:
    member = Member(tmp_path, 0, 1, every_s=600.0)
    member.save(10)
    gate.set()
    member.suspend(10)
    assert [one.step for one in member.session.written] == [10]


def test_nobody_waits_longer_than_the_node_has(tmp_path: Path, gate: threading.Event) -> None:
    member = Member(tmp_path, 0, 1, every_s=600.0)
    member.session.deadline_in_s = 1.1
    member.suspend(10)
    assert member.session.written == []
    gate.set()
    member.session.deadline_in_s = None
    member.saver.finish()
    assert len(member.session.written) == 1
