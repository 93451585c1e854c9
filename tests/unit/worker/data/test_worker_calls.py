"""A function in the place of a loader."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from fallow.core.training.shards import mix
from fallow.model import FallowError
from fallow.worker.data import rng
from fallow.worker.data.source import Calls, Key, Reached

TEXT = torch.arange(1000)


def get_batch() -> tuple[torch.Tensor, float]:
    starts = torch.randint(len(TEXT) - 8, (4,))
    return torch.stack([TEXT[start : start + 8] for start in starts]), random.random() + np.random.rand()


def fetch(source: Calls, key: Key) -> tuple[list[Any], float]:
    """As the loop does it: under the shard's seed."""
    rng.seed_everything(mix(7, "body", key.step, key.shard))
    batch, number = source.fetch(key)
    return batch.tolist(), number


def test_a_batch_is_a_function_of_its_shard() -> None:
    keys = [Key(0, step, shard) for step in range(3) for shard in range(2)]
    one, other = Calls(get_batch, 2), Calls(get_batch, 2)
    batches = {key: fetch(one, key) for key in keys}
    assert {key: fetch(other, key) for key in reversed(keys)} == batches
    assert len({number for _, number in batches.values()}) == len(keys)


def test_steps_are_alike_and_never_end() -> None:
    source = Calls(get_batch, 3)
    assert (source.steps, source.shards, source.batch_size, source.global_batch) == (None, 3, 1, 3)
    assert source.processes == 0
    cuts = [source.cut(0, step) for step in (0, 1, 10**9)]
    assert all(cut.sizes == (1, 1, 1) and not cut.last for cut in cuts)
    assert len({crc for cut in cuts for crc in cut.crcs}) == 9, "each shard of each step has a name of its own"


def test_the_rehearsal_has_a_batch() -> None:
    source = Calls(get_batch, 1)
    assert source.example(lambda: Reached(0, 40))[0].shape == (4, 8)
    assert not source.follow(Reached(0, 40))


@pytest.mark.parametrize("shards", [0, -1, 1.5, "two"])
def test_a_step_has_at_least_one_call(shards: Any) -> None:
    with pytest.raises(FallowError, match=r"run\.updates: shards=.* is not a whole number above 0"):
        Calls(get_batch, shards)
