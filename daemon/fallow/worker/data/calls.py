"""A function that makes a batch from random numbers, as nanoGPT's `get_batch` does, in the place of a loader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fallow.core.shards import Cut, shard_crc
from fallow.model import Exit, FallowError
from fallow.worker.data.source import Duties, Key, Reached, Source


class Calls(Source):
    """An endless source: one call of the function is one shard, which counts as one sample.

    The loop seeds torch, numpy and `random` for the shard before it calls `fetch`. So the batch of a shard is a
    function of (seed, step, shard), on whichever member and however often it is made.

    Args:
        function: called without arguments; returns a batch, of the same size each time.
        shards: calls in one step, at least 1.

    Raises:
        FallowError: `shards` is not a whole number above 0.
    """

    samples = 0

    def __init__(self, function: Callable[[], Any], shards: int) -> None:
        if not isinstance(shards, int) or shards < 1:
            raise FallowError(f"run.updates: shards={shards!r} is not a whole number above 0", Exit.USAGE)
        super().__init__(1, shards)
        self._function = function

    def cut(self, epoch: int, step: int) -> Cut:
        """Return the same number of shards for every step; no step is the last one."""
        crcs = tuple(shard_crc(epoch, step, shard, b"") for shard in range(self.shards))
        return Cut((1,) * self.shards, crcs, last=False)

    def fetch(self, key: Key, duties: Duties) -> Any:
        """Call the function."""
        began = time.monotonic()
        batch = self._function()
        self.load_s = time.monotonic() - began
        return batch

    def example(self, members: Callable[[], Reached]) -> Any:
        """Call the function."""
        return self._function()
