"""When members take part in checkpoints: interval, wishes, vetoes, and suspending in the middle of a periodic one."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import builders
from fallow.core.membership.messages import Checkpoint, Order, Problem
from fallow.core.protocol import BeatReply, Setup
from fallow.core.training.saving import Saving
from fallow.worker.checkpoint import writer as writing
from fallow.worker.checkpoint.saver import Saver
from fallow.worker.prepared.objects import Prepared
from fallow.worker.session.head_status import HeadStatus
from fallow.worker.session.orders import Orders
from fallow.worker.session.status import Progress
from fallow.worker.transport.group import Group


class Session:
    """What a saver needs of the conversation with the head."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.head_status = HeadStatus()
        self.progress = Progress()
        self.orders = Orders(1, 0)
        self.written: list[Checkpoint] = []
        self.unsaved: list[Problem] = []

    def hear(self, silent_s: float = 0.0, **news: Any) -> None:
        """The head says how the run stands, and then nothing for `silent_s`."""
        self.head_status.take(BeatReply(term=1, **news))
        self.head_status.note_silence(silent_s)

    def say(self, saved: Checkpoint | None = None, unsaved: Problem | None = None) -> None:
        self.written += [saved] if saved is not None else []
        self.unsaved += [unsaved] if unsaved is not None else []


class Member:
    """One of `size` members of generation 3."""

    def __init__(
        self, folder: Path, rank: int, size: int, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.session = Session(builders.setup(folder, checkpoint_s=every_s))
        self.prepared = Prepared()
        torch.manual_seed(0)
        self.prepared.add(torch.nn.Linear(30, 20))
        self.group = Group(3, rank, size, None)
        self.saver = Saver(self.session, clock)  # type: ignore[arg-type]

    def save(self, step: int, requests: int = 0) -> None:
        self.saver.save(self.group, self.prepared, {"step": step}, step, 0, requests=requests)

    def suspend(self, step: int) -> None:
        self.saver.suspend(self.group, self.prepared, {"step": step}, step, 0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No part is written before it is set."""
    opened = threading.Event()
    plain: Callable[..., Any] = writing.write_part

    def held_up(*args: Any) -> Any:
        assert opened.wait(120)
        return plain(*args)

    monkeypatch.setattr(writing, "write_part", held_up)
    return opened


def test_a_member_that_leaves_without_a_head_wishes_a_checkpoint_and_then_has_nothing_to_lose(tmp_path: Path) -> None:
    member = Member(tmp_path, 0, 1, every_s=0.0)
    member.session.hear(silent_s=60.0, ends_in_s=60.0)
    assert member.saver.vote(2) == 0.0, "there is time"
    member.session.hear(silent_s=60.0, ends_in_s=20.0)
    assert member.saver.vote(2) == 1.0
    assert not member.saver.has_nothing_to_lose(member.group, 4)
    member.save(4)
    member.saver.finish()
    assert member.saver.has_nothing_to_lose(member.group, 4)
    assert not member.saver.has_nothing_to_lose(member.group, 5)
    member.session.hear()
    assert not member.saver.has_nothing_to_lose(member.group, 4), "the head is back"


def test_wishes_and_the_veto_of_the_busy(tmp_path: Path, gate: threading.Event) -> None:
    member = Member(tmp_path, 0, 1, every_s=0.0)
    member.session.hear(checkpoints_asked=4)
    assert member.saver.vote(1) == 0.0, "no interval, and nobody asked since this member came"
    member.saver.is_requested = True
    assert member.saver.vote(4) == 1.0
    member.save(1)
    assert not member.saver.is_requested
    member.session.hear(checkpoints_asked=5)
    others = 3.0
    assert member.saver.vote(4) + others < 0, "whatever the others want"
    gate.set()
    member.saver.finish()
    assert member.saver.vote(4) == 1.0, "the wish that was made meanwhile is not forgotten"
    member.save(2, requests=member.session.head_status.checkpoints_asked)
    assert member.saver.vote(4) <= 0.0
    member.saver.finish()
    assert [one.by_hand for one in member.session.written] == [False, True]
    due = Member(tmp_path, 0, 1, every_s=1e-9)
    assert due.saver.vote(1) == 1.0


def test_parts_that_nobody_puts_together_do_not_pile_up(tmp_path: Path) -> None:
    """The first member's file system does not answer, and the others write theirs with each retry."""
    member = Member(tmp_path, 1, 2, every_s=600.0)
    for step in (10, 12, 14, 16):
        member.save(step)
        member.saver.finish()
    folders = sorted(path.name[-6:] for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["14.tmp", "16.tmp"]


def test_nobody_waits_longer_than_the_node_has(tmp_path: Path, gate: threading.Event) -> None:
    member = Member(tmp_path, 0, 1, every_s=600.0)
    member.session.hear(ends_in_s=1.1)
    member.suspend(10)
    assert member.session.written == []
    assert [(one.generation, one.step) for one in member.session.unsaved] == [(3, 10)], "nobody else finishes it"
    gate.set()
    member.session.hear(ends_in_s=600.0)
    member.saver.finish()
    assert len(member.session.written) == 1


@pytest.mark.parametrize("left_s", [1.0, 10.5])
def test_a_checkpoint_of_which_the_index_alone_is_missing_when_the_node_goes_away_is_not_called_unwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float
) -> None:
    """Nor is the index waited for until the head gives up who has not left: its import may take that long."""
    indexing, node_end = threading.Event(), threading.Event()
    monkeypatch.setattr(writing, "write_index", lambda *_: (indexing.set(), node_end.wait(120)))
    member = Member(tmp_path, 0, 1, every_s=0.0)
    member.save(4)
    assert indexing.wait(120)
    member.session.hear(ends_in_s=left_s)
    began = time.monotonic()
    member.saver.finish()
    node_end.set()
    assert time.monotonic() - began < 5.0
    assert ([saved.step for saved in member.session.written], member.session.unsaved) == ([4], [])


def test_one_that_another_member_gave_up_is_due_when_the_head_says(tmp_path: Path) -> None:
    clock = builders.Clock()
    member = Member(tmp_path, 1, 2, 600.0, clock)
    member.save(10)
    member.saver.finish()
    member.session.head_status.checkpoint_due_at = clock.now + 10
    clock.now += 11
    assert member.saver.vote(2) == 0.0
    member.session.orders.obey(Order(node=1, term=1, edition=1, unsaved=(3, 10)))
    assert member.saver.vote(2) == 1.0
    member.save(12)
    member.saver.finish()
    assert member.saver.vote(2) == 0.0, "that was the one before"


def test_without_a_head_the_interval_runs_from_the_last_one(tmp_path: Path) -> None:
    clock = builders.Clock()
    member = Member(tmp_path, 0, 1, 600.0, clock)
    for step in (1, 2):
        clock.now += 599
        assert member.saver.vote(1) == 0.0
        clock.now += 1
        assert member.saver.vote(1) == 1.0
        member.save(step)
        member.saver.finish()


def test_a_file_system_that_does_not_answer_is_told_of_and_vetoes_nothing(
    tmp_path: Path, gate: threading.Event
) -> None:
    clock = builders.Clock()
    member = Member(tmp_path, 0, 1, 0.0, clock)
    member.save(10)
    clock.now += writing.STUCK_S - 1
    assert member.saver.vote(4) == -4.0
    clock.now += 2
    assert member.saver.vote(4) == 0.0
    member.save(11)
    (told,) = member.session.unsaved
    assert (told.generation, told.step) == (3, 11), "nothing else is begun there"
    assert "has not answered for 1200 s" in told.reason
    member.suspend(12)
    assert member.saver.vote(4) == 0.0
    gate.set()
    deadline = time.monotonic() + 120
    while [one.step for one in member.session.written] != [10, 13]:
        assert time.monotonic() < deadline, "it answers again"
        member.save(13)
        member.saver.finish()


def test_what_fails_is_tried_again_ever_later_but_within_the_interval() -> None:
    saving = Saving()
    saving.note_begin(1000.0)
    assert saving.due_in_s(600.0, 1000.0) == 600.0
    now, waits = 1600.0, []
    for _ in range(9):
        saving.note_failure(now)
        waits.append(saving.due_in_s(600.0, now))
        now += waits[-1]
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0, 600.0]
    saving.note_written(now, took_s=30.0)
    assert saving.due_in_s(600.0, now) == 570.0, "complete when the interval is over"
    saving.note_written(now - 50, took_s=30.0)
    assert saving.due_in_s(600.0, now) == 570.0, "an older one that was heard of later"
    saving.note_written(now, took_s=1000.0)
    assert saving.due_in_s(600.0, now) == 300.0
