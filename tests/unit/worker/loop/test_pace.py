"""A member's own speed, and a loader that follows when the shares change."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fallow.core.training.shards import duties
from fallow.core.training.shares import divide
from fallow.worker.data.loader import ElasticLoader
from fallow.worker.data.source import Key
from fallow.worker.loop import pace
from fallow.worker.loop.pace import ENOUGH, Pace


class Clock:
    """In the place of module `time`; the test turns it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Event:
    """In the place of `torch.Event`, on a device whose own clock runs behind: it reaches an event when told to."""

    reached = 0.0
    "all that the device has done by now"
    made = 0.0
    "all that it was given to do"

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing
        assert device.type == "cuda"

    def record(self) -> None:
        self.at = Event.made

    def query(self) -> bool:
        return Event.reached >= self.at

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query(), "torch raises then"
        return (end.at - self.at) * 1000


class Bodies:
    """Steps whose bodies take as long as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
        self.clock = Clock()
        self.device = device
        self.pace = Pace(torch.device(device))
        monkeypatch.setattr(pace, "time", self.clock)
        Event.reached = Event.made = 0.0
        monkeypatch.setattr(torch, "Event", Event)

    def spend(self, seconds: float) -> None:
        self.clock.now += seconds if self.device == "cpu" else 0.001
        Event.made += seconds

    def step(self, *bodies: float, load_s: float = 0.0, processes: int = 0, tail: float = 0.0) -> float:
        self.pace.begin_step()
        for seconds in bodies:
            self.pace.begin_body(is_full=True)
            self.spend(7.0 if processes else load_s)
            self.pace.loaded(load_s, processes)
            self.spend(seconds)
            self.pace.end_body()
            self.spend(5.0)  # waiting for others
        self.spend(tail)
        self.pace.end_step()
        return self.pace.value


def test_a_pace_is_told_after_some_steps_and_outliers_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bodies(monkeypatch)
    assert [run.step(9.0)] + [run.step(1.0, 2.0, 3.0) for _ in range(ENOUGH - 1)] == [0.0] * (ENOUGH - 1) + [2.0]
    assert run.step(2.0, 2.0) == run.step(50.0) == run.step(2.0) == 2.0


def test_waiting_for_others_and_what_stands_behind_the_bodies_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bodies(monkeypatch)
    assert [run.step(1.0, 1.0, tail=4.0) for _ in range(ENOUGH)][-1] == 1.0


@pytest.mark.parametrize(("processes", "seconds"), [(0, 4.0), (1, 3.0), (2, 1.5), (4, 1.0)])
def test_loading_counts_where_it_holds_bodies_up(
    monkeypatch: pytest.MonkeyPatch, processes: int, seconds: float
) -> None:
    run = Bodies(monkeypatch)
    assert [run.step(1.0, 1.0, load_s=3.0, processes=processes) for _ in range(ENOUGH)][-1] == seconds


def test_smaller_shards_and_unfinished_steps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bodies(monkeypatch)
    for _ in range(ENOUGH):
        run.pace.begin_step()
        run.pace.begin_body(is_full=True)
        run.spend(40.0)
        run.pace.end_body()  # and then the group breaks
        run.step(2.0)
        run.pace.begin_step()
        run.pace.begin_body(is_full=False)
        run.spend(0.1)
        run.pace.end_body()
        run.pace.end_step()
    assert run.pace.value == 2.0


def test_a_body_that_a_loss_cut_off_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bodies(monkeypatch)
    for _ in range(ENOUGH):
        run.pace.begin_step()
        run.pace.begin_body(is_full=True)
        run.spend(40.0)
        run.step(2.0)
    assert run.pace.value == 2.0


def test_on_a_device_bodies_are_measured_there_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bodies(monkeypatch, "cuda")
    assert [run.step(2.0, 4.0, tail=9.0) for _ in range(ENOUGH)] == [0.0] * ENOUGH, "it has not reached them"
    Event.reached = Event.made
    assert run.pace.value == 3.0
    for _ in range(100):
        run.step(6.0)
    assert run.pace.value == 3.0
    assert len(run.pace._unread) < 20, "events of a device that is far behind pile up"
    Event.reached = Event.made
    assert run.pace.value == 6.0


@pytest.mark.parametrize(("processes", "seconds"), [(0, 4.0), (1, 3.0), (4, 1.0)])
def test_on_a_device_loading_counts_likewise(monkeypatch: pytest.MonkeyPatch, processes: int, seconds: float) -> None:
    run = Bodies(monkeypatch, "cuda")
    for _ in range(ENOUGH):
        run.step(1.0, 1.0, load_s=3.0, processes=processes)
    Event.reached = Event.made
    assert run.pace.value == pytest.approx(seconds)


class Counted(Dataset):
    """Notes each load in memory that all processes share."""

    def __init__(self, size: int) -> None:
        self.loads = torch.zeros(size, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.loads)

    def __getitem__(self, index: int) -> int:
        self.loads[index] += 1
        return index


def test_prefetching_follows_new_shares_and_throws_little_away() -> None:
    processes, ahead, steps = 2, 2, 24
    dataset = Counted(20 * 2 * steps)
    source = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=processes, prefetch_factor=ahead)
    loader = ElasticLoader(source, seed=3, global_batch=40)
    # Rank 1 of 4, while one and another is slow.
    history = [[1, 1, 1, 1]] * 5 + [[1, 3, 1, 1]] * 4 + [[2, 1, 1, 1]] * 6 + [[1, 1, 1, 1]] * 9
    now = history[0]

    def mine(shards: int) -> list[int]:
        return [duty.shard for duty in duties(divide(shards, now), 1)]

    loader.replan(Key(0, 0, 0), mine)
    changes = wanted = 0
    for step, paces in enumerate(history):
        if paces != now:
            now = paces
            changes += 1
            loader.replan(Key(0, step, 0), mine)
        for shard in mine(20):
            key = Key(0, step, shard)
            assert loader.fetch(key).tolist() == loader.indices(key)
            assert 0 < loader.load_s < 30
            wanted += 1
    flying = processes * ahead
    loaded = int(dataset.loads.sum()) // 2
    assert wanted <= loaded <= wanted + (changes + 1) * flying
