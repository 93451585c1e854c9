"""The elastic loader: any shard of any step of any epoch, fetched as the user's DataLoader would.

Which samples a shard holds is a function of (seed, epoch) and the fixed layout. What the membership changes is only
which shards this process asks for. With `num_workers` the batches are prefetched along the current plan; after a change
of plan those that are still wanted are used and the others thrown away.
"""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fallow.core.shards import Cut, Layout, make_layout, mix, shard_crc
from fallow.model import Exit, FallowError
from fallow.worker.data import rng
from fallow.worker.data.source import Duties, Key, Reached, Source


class ElasticLoader(Source):
    """A loader over a data set whose samples have numbers.

    Args:
        source: the user's loader; its dataset, sampler, collate function and worker settings are used.
        seed: the run's seed.
        global_batch: samples in a step; a multiple of the batch size.
    """

    def __init__(self, source: DataLoader[Any], seed: int, global_batch: int) -> None:
        super().__init__(source, seed, global_batch)
        self._prefetch: _Prefetcher | None = None
        first = self._ordered(0)
        if not type(source.sampler).__module__.startswith("torch.") and self._ordered(0) != first:
            raise FallowError(
                f"prepare: the sampler {type(source.sampler).__name__} gives another order each time it is iterated, "
                "so members would not agree on it: draw from torch, numpy.random or random, which are seeded, or give "
                "it a set_epoch(epoch) from which the order follows",
                Exit.DATA,
            )
        self._cached = {0: first}
        self.layout: Layout = make_layout(len(first), self.batch_size, global_batch, source.drop_last)
        self.steps = self.layout.steps

    def __len__(self) -> int:
        """Optimizer steps in one epoch."""
        return self.layout.steps

    def order(self, epoch: int) -> array[int]:
        """Sample numbers of an epoch, in order: the same on every member and for every membership.

        Raises:
            FallowError: they are not as many as in the first epoch.
        """
        if epoch not in self._cached:
            order = self._ordered(epoch)
            if len(order) != self.layout.length:
                raise FallowError(
                    f"the sampler {type(self.source.sampler).__name__} gives {len(order)} samples in epoch {epoch} and "
                    f"gave {self.layout.length} in the first one: every epoch must have the same number of them; "
                    "repeat some, or leave some out",
                    Exit.DATA,
                )
            # Two, because prefetching looks into the next epoch.
            for old in sorted(self._cached)[:-1]:
                del self._cached[old]
            self._cached[epoch] = order
        return self._cached[epoch]

    def _ordered(self, epoch: int) -> array[int]:
        return array("q", _order(self.source, epoch, mix(self._seed, "order", epoch)))

    def indices(self, key: Key) -> list[int]:
        """Sample numbers of one shard."""
        first, end = self.layout.bounds(key.step, key.shard)
        return self.order(key.epoch)[first:end].tolist()

    def cut(self, epoch: int, step: int) -> Cut:
        """The shards of a step of an epoch."""
        shards = range(self.layout.shards_in(step))
        bounds = [self.layout.bounds(step, shard) for shard in shards]
        order = memoryview(self.order(epoch))
        return Cut(
            tuple(end - first for first, end in bounds),
            tuple(shard_crc(epoch, step, shard, order[slice(*bounds[shard])]) for shard in shards),
            step + 1 == self.layout.steps,
        )

    def replan(self, at: Key, duties: Duties) -> None:
        """Tell the prefetching processes what this member will want from `at` on."""
        if self._prefetch is not None:
            self._prefetch.replan(at, duties)

    def example(self, members: Callable[[], Reached]) -> Any:
        """The first shard of all."""
        return self.fetch(Key(0, 0, 0), lambda shards: [0])

    def fetch(self, key: Key, duties: Duties) -> Any:
        """One batch, collated (and pinned) as the user's loader does it."""
        if self.source.num_workers:
            if self._prefetch is None:
                self._prefetch = _Prefetcher(self, key, duties)
            self.load_s, batch = self._prefetch.take(key)
            return batch
        began = time.monotonic()
        rng.seed_everything(self.data_seed(key), self.generators)
        batch = self.source.collate_fn(_samples(self.dataset, self.indices(key)))
        if self.source.pin_memory and torch.cuda.is_available():
            batch = torch.utils.data._utils.pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]
        self.load_s = time.monotonic() - began
        return batch

    def data_seed(self, key: Key) -> int:
        """Seed for the dataset's own random numbers (augmentation) in one shard."""
        return mix(self._seed, "data", *key)

    def close(self) -> None:
        """Stop prefetching processes, if any."""
        self._prefetch = None


def check_loader(loader: DataLoader[Any]) -> None:
    """Refuse what cannot be cut into shards.

    Raises:
        FallowError: the text names the feature and what to write instead.
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


def _order(loader: DataLoader[Any], epoch: int, seed: int) -> list[int]:
    sampler = loader.sampler
    if isinstance(sampler, SequentialSampler):
        return list(range(len(sampler)))
    generator = torch.Generator().manual_seed(seed)
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        size = len(sampler.data_source)
        if sampler.num_samples == size:
            return list(torch.randperm(size, generator=generator).tolist())
    its = getattr(sampler, "generator", None)
    own = its if isinstance(its, torch.Generator) else generator
    before = own.get_state()
    set_epoch = getattr(sampler, "set_epoch", None)
    with rng.kept():
        rng.seed_everything(seed)
        own.manual_seed(seed)
        if callable(set_epoch):
            set_epoch(epoch)  # the script's call, if there is one, may come after prefetching has begun
        order = [int(index) for index in sampler]
    own.set_state(before)
    return order


def _samples(dataset: Any, indices: Sequence[int]) -> list[Any]:
    if callable(getattr(dataset, "__getitems__", None)):
        return list(dataset.__getitems__(list(indices)))
    return [dataset[index] for index in indices]


# -------------------------------------------------------------------------------------------------- prefetching


class _Tagged(NamedTuple):
    key: tuple[int, ...]
    began: float
    samples: list[Any]


class _TaggedDataset(torch.utils.data.Dataset[Any]):
    """Runs in the loader's processes: an index list begins with (seed, key) and seeds all generators first."""

    def __init__(self, dataset: Any, generators: Sequence[Any]) -> None:
        self.dataset = dataset
        self._generators = list(generators)  # come with the data set, so they are the ones that it holds there

    def __getitems__(self, tagged: list[Any]) -> _Tagged:
        (seed, key), *indices = tagged
        began = time.monotonic()
        rng.seed_everything(seed, self._generators)
        return _Tagged(key, began, _samples(self.dataset, indices) if indices else [])


def _begin(user: Callable[[int], None] | None, number: int) -> None:
    """In a loader process: the script's code there finds its own data set in `get_worker_info`, not the tagged one."""
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, _TaggedDataset)
    object.__setattr__(info, "dataset", info.dataset.dataset)  # its class forbids assignments
    if user is not None:
        user(number)


def _collate(user: Callable[[Any], Any], tagged: _Tagged) -> tuple[tuple[int, ...], float, Any]:
    batch = user(tagged.samples) if tagged.samples else None
    return tagged.key, time.monotonic() - tagged.began, batch


class _Feed:
    """A batch sampler whose future can change. It never ends: a loader process's StopIteration would be permanent."""

    def __init__(self, loader: ElasticLoader) -> None:
        self._loader = loader
        self.flying: set[Key] = set()
        self._plan: Iterator[Key] = iter(())

    def replan(self, at: Key, duties: Duties) -> None:
        self._plan = _keys(self._loader.layout, at, duties)

    def __iter__(self) -> Iterator[list[Any]]:
        while True:
            key = next(k for k in self._plan if k not in self.flying)
            self.flying.add(key)
            yield [(self._loader.data_seed(key), tuple(key)), *self._indices(key)]

    def _indices(self, key: Key) -> list[int]:
        try:
            return self._loader.indices(key)
        except Exception:
            # It may be beyond the last epoch. If the epoch comes, the loop asks for its order first and is told why.
            return []


def _keys(layout: Layout, at: Key, duties: Duties) -> Iterator[Key]:
    epoch, step, first = at
    while True:
        for shard in duties(layout.shards_in(step)):
            if shard >= first:
                yield Key(epoch, step, shard)
        first = 0
        step += 1
        if step == layout.steps:
            epoch, step = epoch + 1, 0


class _Prefetcher:
    """A DataLoader over the feed, and the batches that arrived before they were wanted."""

    def __init__(self, loader: ElasticLoader, at: Key, duties: Duties) -> None:
        source = loader.source
        self._feed = _Feed(loader)
        self._feed.replan(at, duties)
        self._duties = duties
        self._at = at
        self._layout = loader.layout
        self._ready: dict[Key, tuple[float, Any]] = {}
        inner: DataLoader[Any] = DataLoader(
            _TaggedDataset(loader.dataset, loader.generators),
            batch_sampler=self._feed,
            num_workers=source.num_workers,
            collate_fn=functools.partial(_collate, source.collate_fn),
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=functools.partial(_begin, source.worker_init_fn),
            multiprocessing_context=source.multiprocessing_context,
            prefetch_factor=source.prefetch_factor,
        )
        self._batches = iter(inner)

    def replan(self, at: Key, duties: Duties) -> None:
        self._feed.replan(at, duties)
        self._at, self._duties = at, duties
        kept = {key: batch for key, batch in self._ready.items() if self._wanted(key)}
        # What is thrown away does not fly any more: a later plan that wants it has to ask for it again.
        self._feed.flying -= self._ready.keys() - kept.keys()
        self._ready = kept

    def take(self, key: Key) -> tuple[float, Any]:
        while key not in self._ready:
            raw, load_s, batch = next(self._batches)
            arrived = Key(*raw)
            if self._wanted(arrived) or arrived == key:
                self._ready[arrived] = load_s, batch
            else:
                self._feed.flying.discard(arrived)
        self._feed.flying.discard(key)
        return self._ready.pop(key)

    def _wanted(self, key: Key) -> bool:
        return key >= self._at and key.shard in self._duties(self._layout.shards_in(key.step))
