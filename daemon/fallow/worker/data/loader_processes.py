"""Loader processes, run by torch's DataLoader with the settings of the script's own loader."""

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
"""A shard to load, and its sample numbers; none if its epoch is unknown."""


class LoadedShard(NamedTuple):
    """A batch, and the seconds that a loader process took for it."""

    key: Key
    load_s: float
    batch: Any


def start_loading(source: DataLoader[Any], dataset: Any, **options: Any) -> Iterator[Any]:
    """Iterate over `dataset` with the settings of `source`, in processes that end with the script."""
    with torch.device("cpu"):  # not the script's default device, which forked processes would inherit
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
    # If the garbage collector frees the iterator in a reference cycle, it may close the queues first. The processes
    # would then never get the order to end, and torch would wait 5 s for each. This keeps the queues open until then.
    weakref.finalize(loading, _release_queues, list(getattr(loading, "_index_queues", [])))
    return loading


def _release_queues(queues: list[Any]) -> None:
    """Drop the last reference to `queues`, when the iterator ends its processes."""


def set_epoch(thing: Any, epoch: int) -> None:
    """Call `set_epoch` of a data set or a sampler, if it has one."""
    tell = getattr(thing, "set_epoch", None)
    if callable(tell):
        tell(epoch)


# -------------------------------------------------------------------- code that runs in the loader processes, if any


class ShardDataset(torch.utils.data.Dataset[Any]):
    """The script's data set and collate function. Makes each batch under its own seed."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int, generators: Sequence[Any]) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._generators = list(
            generators
        )  # pickled together with the data set, so they stay the generators that it holds
        self._epoch = -1

    def __getitems__(self, requests: list[Request]) -> LoadedShard:
        ((key, indices),) = requests
        if not indices:
            return LoadedShard(key, 0.0, None)
        began = time.monotonic()
        if self._epoch != key.epoch and torch.utils.data.get_worker_info() is not None:
            # A loader process does not see the script's own calls of set_epoch. In the script's process they apply.
            self._epoch = key.epoch
            rng.seed_everything(mix(self._seed, "epoch", self._epoch), self._generators)
            set_epoch(self.dataset, self._epoch)
        rng.seed_everything(mix(self._seed, "data", *key), self._generators)
        if callable(getattr(self.dataset, "__getitems__", None)):  # as torch's DataLoader does
            samples = list(self.dataset.__getitems__(indices))
        else:
            samples = [self.dataset[index] for index in indices]
        batch = self._collate(samples)
        return LoadedShard(key, time.monotonic() - began, batch)


def _begin_loader_process(user: Callable[[int], None] | None, number: int) -> None:
    """Make this process end with the script, and run the script's `worker_init_fn`.

    A forked process holds copies of the script's sockets. If it outlived a killed script, the connections to other
    members would stay open until it has loaded its batch.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    script = multiprocessing.parent_process()
    if script is not None and not script.is_alive():
        os._exit(1)
    info = torch.utils.data.get_worker_info()
    if info is not None and isinstance(info.dataset, ShardDataset):  # the script expects its own data set there
        object.__setattr__(info, "dataset", info.dataset.dataset)  # the class of `info` forbids assignments
    if user is not None:
        user(number)
