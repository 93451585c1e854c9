"""Loader processes: torch's DataLoader runs them, with the settings of the script's own loader."""

import ctypes
import functools
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from fallow.core.training.shards import mix
from fallow.worker.data import rng
from fallow.worker.data.source import Key

_PR_SET_PDEATHSIG = 1

Request = tuple[Key, list[int]]
"""A shard to load, and its sample numbers (none: its epoch is unknown)."""


class LoadedShard(NamedTuple):
    """A batch, and what it took."""

    key: Key
    load_s: float
    batch: Any


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
    weakref.finalize(loading, _release_queues, list(getattr(loading, "_index_queues", [])))
    return loading


def _release_queues(queues: list[Any]) -> None:
    """The iterator ends its processes now, and `queues` end with it."""


def set_epoch(thing: Any, epoch: int) -> None:
    """Tell a data set or a sampler the epoch, if it can be told."""
    tell = getattr(thing, "set_epoch", None)
    if callable(tell):
        tell(epoch)


# ---------------------------------------------------------------------------------- in the loader processes, if any


class ShardDataset(torch.utils.data.Dataset[Any]):
    """The script's data set and collate function, asked for one batch under a seed of its own."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int, generators: Sequence[Any]) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._generators = list(generators)  # travel together with the data set, so they are those that it holds
        self._epoch = -1

    def __getitems__(self, requests: list[Request]) -> LoadedShard:
        ((key, indices),) = requests
        if not indices:
            return LoadedShard(key, 0.0, None)
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
        return LoadedShard(key, time.monotonic() - began, batch)


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
    if info is not None and isinstance(info.dataset, ShardDataset):  # the script's code expects its own data set there
        object.__setattr__(info, "dataset", info.dataset.dataset)  # the class of `info` forbids assignments
    if user is not None:
        user(number)
