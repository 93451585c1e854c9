"""Batches that are prefetched along a plan: however plans follow each other, what is wanted comes, and once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from fallow.worker.data import prefetch, rng
from fallow.worker.data.loader import ElasticLoader
from fallow.worker.data.source import Key

SHARDS, BATCH, STEPS = 4, 2, 6


class Numbers(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return SHARDS * BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        return torch.tensor(index)


class Ahead:
    """In the place of the DataLoader over the feed: asks for as many batches in advance, but in this process."""

    def __init__(
        self,
        dataset: Any,
        batch_sampler: Any,
        collate_fn: Callable[[Any], Any],
        num_workers: int,
        prefetch_factor: int,
        **_: Any,
    ) -> None:
        self.dataset, self.feed, self.collate = dataset, iter(batch_sampler), collate_fn
        self.depth = num_workers * prefetch_factor

    def __iter__(self) -> Iterator[Any]:
        ahead = deque(next(self.feed) for _ in range(self.depth))
        for _ in range(500):
            ahead.append(next(self.feed))
            with rng.kept():
                batch = self.collate(self.dataset.__getitems__(ahead.popleft()))
            yield batch
        raise AssertionError("a batch that is wanted does not come")


def elastic(depth: int) -> ElasticLoader:
    source = DataLoader(Numbers(), batch_size=BATCH, num_workers=1, prefetch_factor=depth)
    return ElasticLoader(source, seed=3, global_batch=SHARDS * BATCH)


def mine(shards: list[int]) -> Callable[[int], list[int]]:
    return lambda count: [shard for shard in shards if shard < count]


duties = st.sets(st.integers(0, SHARDS - 1), min_size=1).map(sorted)
changes = st.lists(duties, max_size=3)
"the plans made one after another at a step; the last one counts"


@given(first=duties, steps=st.lists(changes, min_size=STEPS - 1, max_size=STEPS - 1), depth=st.integers(1, 5))
@example(first=[0, 1], steps=[[[0, 1, 2]], [[0], [0, 1]], [], [], []], depth=4)
@example(first=[0, 1], steps=[[[0, 1]]] * 5, depth=1)
def test_each_batch_that_is_wanted_comes_however_the_plans_change(
    first: list[int], steps: list[list[list[int]]], depth: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "DataLoader", Ahead)
        loader, shards, wanted, changes = elastic(depth), first, 0, 0
        loader.replan(Key(0, 0, 0), mine(shards))
        for step, plans in enumerate([[], *steps]):
            for plan in plans:
                changes += plan != shards
                shards = plan
                loader.replan(Key(0, step, 0), mine(shards))
            for shard in shards:
                key = Key(0, step, shard)
                assert loader.fetch(key).tolist() == loader.indices(key)
                wanted += 1
        assert loader.dataset.loaded // BATCH <= wanted + (changes + 1) * 2 * depth, "much is loaded in vain"
