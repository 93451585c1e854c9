"""Batches loaded along a plan that may change: ahead by loader processes, else one by one as they are wanted.

torch's DataLoader runs the processes. Its batch sampler is a feed whose future can be replaced. What is already loading
stays, and what arrives and is not wanted any more is thrown away.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from fallow.core.training.shards import mix
from fallow.worker.data import rng
from fallow.worker.data.source import Duties, Key

if TYPE_CHECKING:
    from fallow.worker.data.loader import ElasticLoader

_PR_SET_PDEATHSIG = 1

_Request = tuple[Key, list[int]]
"""A shard to load, and its sample numbers (none: its epoch is unknown)."""


class _LoadedShard(NamedTuple):
    key: Key
    load_s: float
    batch: Any


class Prefetcher:
    """Loads batches in the order of the plan, and keeps those that arrive before they are wanted.

    The prefetcher is the batch sampler of a DataLoader. Its iterator never ends: a loader process's StopIteration would
    be permanent.
    """

    def __init__(self, loader: ElasticLoader) -> None:
        self._loader = loader
        self._loading: set[Key] = set()
        "requested, and neither taken nor thrown away since"
        self._ready: dict[Key, _LoadedShard] = {}
        self._arriving: Iterator[_LoadedShard] | None = None

    def replan(self, at: Key, duties: Duties) -> None:
        """Load what a member with these duties wants from `at` on."""
        self._at, self._duties = at, duties
        self._plan = self._keys()
        dropped = [key for key in self._ready if not self._wants(key)]
        for key in dropped:
            del self._ready[key]
        # A later plan that wants these shards again has to load them again.
        self._loading.difference_update(dropped)

    def take(self, key: Key) -> tuple[float, Any]:
        """Return (seconds that it took to load, batch) of a shard of the plan; wait for it if need be."""
        if self._arriving is None:
            source = self._loader.source
            dataset = _ShardDataset(source.dataset, source.collate_fn, self._loader.seed, self._loader.generators)
            if source.num_workers:
                self._arriving = start_loading(source, dataset, batch_sampler=self, collate_fn=_unchanged)
            else:
                self._arriving = map(dataset.__getitems__, self)  # torch's own way costs 30 us more a batch
        while key not in self._ready:
            loaded = next(self._arriving)
            if loaded.key == key or self._wants(loaded.key):
                self._ready[loaded.key] = loaded
            else:
                self._loading.discard(loaded.key)
        self._loading.discard(key)
        _, load_s, batch = self._ready.pop(key)
        return load_s, batch

    def __iter__(self) -> Iterator[list[_Request]]:
        while True:
            key = next(key for key in self._plan if key not in self._loading)
            self._loading.add(key)
            try:
                indices = self._loader.indices(key)
            except Exception:
                # It may be beyond the last epoch. If the epoch comes, the loop asks for its order first, and is told.
                indices = []
            yield [(key, indices)]

    def _wants(self, key: Key) -> bool:
        return key >= self._at and key.shard in self._duties(self._loader.layout.shards_in(key.step))

    def _keys(self) -> Iterator[Key]:
        epoch, step, first = self._at
        layout = self._loader.layout
        while True:
            for shard in self._duties(layout.shards_in(step)):
                if shard >= first:
                    yield Key(epoch, step, shard)
            first = 0
            step += 1
            if step == layout.steps:
                epoch, step = epoch + 1, 0


def start_loading(source: DataLoader[Any], dataset: Any, **options: Any) -> Iterator[Any]:
    """Iterate a loader with the settings of `source` over `dataset`, in processes that end with the script."""
    with torch.device("cpu"):  # whatever the script's default device is; forked processes take that over
        inner: DataLoader[Any] = DataLoader(
            dataset,
            num_workers=source.num_workers,
            pin_memory=source.pin_memory and torch.accelerator.is_available(),
            timeout=source.timeout,
            worker_init_fn=functools.partial(_begin_loader_process, source.worker_init_fn),
            multiprocessing_context=source.multiprocessing_context,
            prefetch_factor=source.prefetch_factor,
            generator=torch.Generator(device="cpu").manual_seed(torch.initial_seed()),
            **options,
        )
        loading = iter(inner)
    # A garbage collection of an iterator in a reference cycle closes its queues first. The order to end would then
    # never reach the processes, and torch would wait 5 s for each. Queues that are kept alive stay open until then.
    weakref.finalize(loading, _let_go, list(getattr(loading, "_index_queues", [])))
    return loading


def _let_go(queues: list[Any]) -> None:
    """The iterator ends its processes now, and `queues` end with it."""


# ---------------------------------------------------------------------------------- in the loader processes, if any


class _ShardDataset(torch.utils.data.Dataset[Any]):
    """The script's data set and collate function, asked for one batch under a seed of its own."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int, generators: Sequence[Any]) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._generators = list(generators)  # travel together with the data set, so they are those that it holds
        self._epoch = -1

    def __getitems__(self, requests: list[_Request]) -> _LoadedShard:
        ((key, indices),) = requests
        if not indices:
            return _LoadedShard(key, 0.0, None)
        began = time.monotonic()
        if self._epoch != key.epoch and torch.utils.data.get_worker_info() is not None:
            # A loader process does not see the script's own calls. In the script's process those count, as they are.
            self._epoch = key.epoch
            rng.seed_everything(mix(self._seed, "epoch", self._epoch), self._generators)
            set_epoch(self.dataset, self._epoch)
        rng.seed_everything(mix(self._seed, "data", *key), self._generators)
        if callable(getattr(self.dataset, "__getitems__", None)):  # as torch's DataLoader asks for samples
            samples = list(self.dataset.__getitems__(indices))
        else:
            samples = [self.dataset[index] for index in indices]
        batch = self._collate(samples)
        return _LoadedShard(key, time.monotonic() - began, batch)


def set_epoch(thing: Any, epoch: int) -> None:
    """Tell a data set or a sampler the epoch, if it can be told."""
    tell = getattr(thing, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def _unchanged(loaded: _LoadedShard) -> _LoadedShard:
    return loaded


def _begin_loader_process(user: Callable[[int], None] | None, number: int) -> None:
    """End with the script, however it ends, and run its `worker_init_fn`.

    A forked process holds copies of the script's sockets. Were it to outlive a script that was killed, the other
    members would not see their connections close before it has loaded its batch.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    script = multiprocessing.parent_process()
    if script is not None and not script.is_alive():
        os._exit(1)
    info = torch.utils.data.get_worker_info()
    if info is not None and isinstance(info.dataset, _ShardDataset):  # the script's code expects its own data set there
        object.__setattr__(info, "dataset", info.dataset.dataset)  # the class of `info` forbids assignments
    if user is not None:
        user(number)
