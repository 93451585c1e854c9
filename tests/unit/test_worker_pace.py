"""A member's own speed, and a loader that follows when the shares change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fallow.core.shards import duties
from fallow.core.shares import divide
from fallow.worker.data.loader import ElasticLoader
from fallow.worker.data.source import Key
from fallow.worker.loop.loop import pace as pace_module
from fallow.worker.loop.pace import ENOUGH, Pace
from fallow.worker.transport.group import Group


class Bodies:
    """Steps under a clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.group = Group(1, 0, 1, None)
        self.pace = Pace()
        monkeypatch.setattr(pace_module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def step(
        self, *bodies: float, load_s: float = 0.0, processes: int = 0, waits: float = 0.0, tail: float = 0.0
    ) -> float:
        self.pace.begin_phase(self.group, first=True)
        for seconds in bodies:
            self.pace.begin_body(whole=True)
            self.pace.loaded(load_s, processes)
            self.now += 7.0  # waiting for the batch
            self.pace.restart()
            self.now += seconds + waits
            self.group.waited_s += waits
            self.pace.lap()
        self.now += tail
        self.pace.finish_step()
        return self.pace.value


def test_a_pace_is_told_after_some_steps_and_outliers_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bodies(monkeypatch)
    assert [run.step(9.0)] + [run.step(1.0, 2.0, 3.0) for _ in range(ENOUGH - 1)] == [0.0] * (ENOUGH - 1) + [2.0]
    assert run.step(2.0, 2.0) == run.step(50.0) == run.step(2.0) == 2.0


def test_waiting_for_others_and_the_optimizer_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bodies(monkeypatch)
    assert [run.step(1.0, 1.0, waits=30.0, tail=4.0) for _ in range(ENOUGH)][-1] == 1.0


@pytest.mark.parametrize(("processes", "seconds"), [(0, 4.0), (1, 3.0), (2, 1.5), (4, 1.0)])
def test_loading_counts_where_it_holds_bodies_up(monkeypatch: pytest.MonkeyPatch, processes, seconds) -> None:
    run = Bodies(monkeypatch)
    assert [run.step(1.0, 1.0, load_s=3.0, processes=processes) for _ in range(ENOUGH)][-1] == seconds


def test_smaller_shards_and_unfinished_steps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Bodies(monkeypatch)
    for _ in range(ENOUGH):
        run.pace.begin_phase(run.group, first=True)
        run.pace.begin_body(whole=True)
        run.pace.restart()
        run.now += 40.0
        run.pace.lap()  # and then the group breaks
        run.step(2.0)
        run.pace.begin_phase(run.group, first=True)
        run.pace.begin_body(whole=False)
        run.pace.restart()
        run.now += 0.1
        run.pace.lap()
        run.pace.finish_step()
    assert run.pace.value == 2.0


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

    changes = wanted = 0
    for step, paces in enumerate(history):
        if paces != now:
            now = paces
            changes += 1
            loader.replan(Key(0, step, 0), mine)
        for shard in mine(20):
            key = Key(0, step, shard)
            assert loader.fetch(key, mine).tolist() == loader.indices(key)
            assert 0 < loader.load_s < 30
            wanted += 1
    flying = processes * ahead
    loaded = int(dataset.loads.sum()) // 2
    assert wanted <= loaded <= wanted + (changes + 1) * flying
    loader.close()
