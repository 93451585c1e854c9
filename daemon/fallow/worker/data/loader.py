"""The elastic loader: fetches any shard of any step and epoch, as the script's own DataLoader would.

The samples of a shard depend only on (seed, epoch) and the fixed layout. The membership decides only which shards this
process fetches. With `num_workers`, loader processes load ahead along the plan. If the plan changes, shards that are
already loading continue to load, and shards that are no longer needed are discarded when they arrive.
"""

import functools
import operator
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fallow.core.training.shards import Cut, Layout, make_layout, mix, shard_crc
from fallow.model import Exit, FallowError
from fallow.worker.data import rng
from fallow.worker.data.loader_processes import LoadedShard, Request, ShardDataset, set_epoch, start_loading
from fallow.worker.data.source import DataPosition, Duties, Key, Source

_MAX_SAMPLES, _MAX_PASSES = 10_000_000, 16
"""A sampler of the script counts as endless if it yields more samples than this number, more passes over the data set
than this number, and more samples than its length."""


def check_loader(loader: DataLoader[Any]) -> None:
    """Raise if a loader cannot be cut into shards.

    Raises:
        FallowError: names the unsupported feature and what to write instead.
    """
    advice: str | None = None
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            advice = "its IterableDataset makes the batches (batch_size=None): have it give samples, and set batch_size"
        elif not loader.in_order:
            advice = "with in_order=False its batches come in no fixed order: remove that"
    elif isinstance(loader.sampler, DistributedSampler):
        advice = "it has a DistributedSampler: remove it (shuffle=True instead), Fallow divides the samples itself"
    elif loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        advice = "it has a batch_sampler of its own or none: give batch_size=... and, if need be, a sampler"
    if advice is not None:
        raise FallowError(f"prepare: this DataLoader cannot be made elastic: {advice}", Exit.DATA)


class ElasticLoader(Source):
    """A loader over a map-style data set, whose samples have numbers.

    Uses the dataset, sampler, collate function and worker settings of the script's loader.

    Raises:
        FallowError: the sampler's order does not depend on the epoch alone, or the sizes do not fit.
    """

    def __init__(self, source: DataLoader[Any], seed: int, global_batch: int) -> None:
        assert source.batch_size is not None
        super().__init__(source.batch_size, global_batch)
        self.source, self.dataset = source, source.dataset
        self.processes = source.num_workers
        self.seed = seed
        self._loading: set[Key] = set()
        "shards that were requested, and neither fetched nor discarded yet"
        self._ready: dict[Key, LoadedShard] = {}
        self._arriving: Iterator[LoadedShard] | None = None
        self._order = functools.lru_cache(maxsize=2)(self._make_order)  # two: prefetching reaches into the next epoch
        first = self._order(0)
        if not type(source.sampler).__module__.startswith("torch.") and self._make_order(0) != first:
            raise FallowError(
                f"prepare: the sampler {type(source.sampler).__name__} gives another order each time it is iterated, "
                "so members would not agree on it: draw from torch, numpy.random or random, which are seeded, and "
                "shuffle a copy of its list; or give it a set_epoch(epoch) from which the order follows",
                Exit.DATA,
            )
        self.layout: Layout = make_layout(len(first), self.batch_size, global_batch, source.drop_last)
        self.steps, self.samples = self.layout.steps, self.layout.length

    def __len__(self) -> int:
        """Return the optimizer steps in one epoch."""
        return self.layout.steps

    def order(self, epoch: int) -> "array[int]":
        """Return the sample numbers of an epoch, in order. Equal on every member and for every membership.

        Raises:
            FallowError: the epoch has another number of samples than the first epoch.
        """
        order = self._order(epoch)
        if len(order) != self.layout.length:
            raise FallowError(
                f"the sampler {type(self.source.sampler).__name__} gives {len(order)} samples in epoch {epoch} and "
                f"gave {self.layout.length} in the first one: every epoch must have the same number of them; "
                "repeat some, or leave some out",
                Exit.DATA,
            )
        return order

    def indices(self, key: Key) -> list[int]:
        """Return the sample numbers of one shard."""
        first, end = self.layout.bounds(key.step, key.shard)
        return self.order(key.epoch)[first:end].tolist()

    def cut(self, epoch: int, step: int) -> Cut:
        """Return the shards of a step of an epoch."""
        bounds = [self.layout.bounds(step, shard) for shard in range(self.layout.shards_in(step))]
        order = memoryview(self.order(epoch))
        return Cut(
            tuple(end - first for first, end in bounds),
            tuple(shard_crc(epoch, step, shard, order[first:end]) for shard, (first, end) in enumerate(bounds)),
            step + 1 == self.layout.steps,
        )

    def replan(self, at: Key, duties: Duties) -> None:
        """Set the plan: load the shards that this member will fetch from `at` on, in order."""
        self._at, self._duties = at, duties
        self._plan = self._keys()
        dropped = [key for key in self._ready if not self._wants(key)]
        for key in dropped:
            del self._ready[key]
        # So that a later plan may load these shards again.
        self._loading.difference_update(dropped)

    def example(self, members: Callable[[], DataPosition]) -> Any:
        """Return the first shard of the first epoch."""
        first = Key(0, 0, 0)
        self.replan(first, lambda shards: [0])
        return self.fetch(first)

    def fetch(self, key: Key) -> Any:
        """Return one batch, collated by the script's loader, and pinned if there is an accelerator."""
        source = self.source
        if self._arriving is None:
            dataset = ShardDataset(self.dataset, source.collate_fn, self.seed, self.generators)
            if self.processes:
                requests = self._requests()
                self._arriving = start_loading(source, dataset, batch_sampler=requests, collate_fn=_identity)
            else:
                self._arriving = map(
                    dataset.__getitems__, self._requests()
                )  # torch's loader takes 30 us more per batch
        while key not in self._ready:
            loaded = next(self._arriving)
            if loaded.key == key or self._wants(loaded.key):
                self._ready[loaded.key] = loaded
            else:
                self._loading.discard(loaded.key)
        self._loading.discard(key)
        _, load_s, batch = self._ready.pop(key)
        if self.processes:
            self.load_s = load_s
        elif source.pin_memory and torch.accelerator.is_available():
            batch = torch.utils.data._utils.pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]
        return batch

    def _requests(self) -> Iterator[list[Request]]:
        """Yield the shards to load, in order. Never ends: a loader process's StopIteration would be permanent."""
        while True:
            key = next(key for key in self._plan if key not in self._loading)
            self._loading.add(key)
            try:
                indices = self.indices(key)
            except Exception:
                # The epoch may be beyond the last one. If not, the loop calls `order` for it and gets the error.
                indices = []
            yield [(key, indices)]

    def _wants(self, key: Key) -> bool:
        return key >= self._at and key.shard in self._duties(self.layout.shards_in(key.step))

    def _keys(self) -> Iterator[Key]:
        epoch, step, first = self._at
        while True:
            for shard in self._duties(self.layout.shards_in(step)):
                if shard >= first:
                    yield Key(epoch, step, shard)
            first = 0
            step += 1
            if step == self.layout.steps:
                epoch, step = epoch + 1, 0

    def _make_order(self, epoch: int) -> "array[int]":
        sampler, seed = self.source.sampler, mix(self.seed, "order", epoch)
        if isinstance(sampler, SequentialSampler):
            return array("q", range(len(sampler)))
        of_sampler = getattr(sampler, "generator", None)
        generator = of_sampler if isinstance(of_sampler, torch.Generator) else torch.Generator(device="cpu")
        with rng.preserve_generators([generator]), generator.device:
            rng.seed_everything(seed)
            generator.manual_seed(seed)
            if isinstance(sampler, RandomSampler) and not sampler.replacement:
                size = len(sampler.data_source)
                if sampler.num_samples == size:  # in one call, faster than torch's iterator
                    return array("q", torch.randperm(size, generator=generator).cpu().numpy().tobytes())
            set_epoch(sampler, epoch)  # the script may call set_epoch only after prefetching has begun
            return self._numbers(sampler)

    def _numbers(self, sampler: Iterable[Any]) -> "array[int]":
        """Read a sampler to its end."""
        kind = type(sampler)
        size, declared_length = _length(self.dataset), _length(sampler)
        most = sys.maxsize
        if not kind.__module__.startswith("torch."):
            most = min(most, max(_MAX_SAMPLES, _MAX_PASSES * size, declared_length + 1))
        numbers = array("q", map(operator.index, islice(sampler, most)))
        if len(numbers) == most:
            raise FallowError(
                f"the sampler {kind.__name__} does not end: {most} samples for a data set of {size}. Have it end after "
                "one pass; `epochs` and `max_steps` of run.updates say how long to train",
                Exit.DATA,
            )
        return numbers


def _length(thing: Any) -> int:
    """Return len(thing); 0 if it has no length or an infinite one."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError, OverflowError, ValueError):
        return 0


def _identity(loaded: LoadedShard) -> LoadedShard:
    return loaded
