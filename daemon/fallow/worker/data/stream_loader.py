"""The elastic loader of an IterableDataset, a stream whose samples have an order but no numbers.

Every member reads the whole stream, with its own loader processes, and uses the batches of its own shards: batch
`step * shards + shard` of an epoch belongs to this step and shard. A member reads all batches of a step before the step
begins, and enough further batches to know whether another step follows. It keeps them until the step is finished, so
that the step can be repeated with another division. A new member reads up to the members' position before it joins.

All random numbers are seeded from (seed, epoch). So every member reads an equal stream, if the data set yields equal
samples on every node and does not divide itself by rank. Members compare CRCs of the beginning of each batch's content
in every step, so a data set that violates this is detected in its first step.
"""

import copy
import functools
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from fallow.core.training.shards import Cut, check_batch, mix, shard_crc
from fallow.model import Exit, FallowError
from fallow.worker.data import rng
from fallow.worker.data.loader_processes import set_epoch, start_loading
from fallow.worker.data.source import DataPosition, Key, Source

_COMPARED_BYTES = 1024
"""Number of bytes of each tensor, array or text of a batch that go into the batch's CRC."""


class _Batch(NamedTuple):
    samples: int
    data: Any
    crc: int


class StreamLoader(Source):
    """A loader over an IterableDataset.

    Uses the dataset, collate function and worker settings of the script's loader. Calls the data set's `set_epoch` if
    it has one.

    Raises:
        FallowError: `global_batch` is not a multiple of the batch size.
    """

    def __init__(self, source: DataLoader[Any], seed: int, global_batch: int) -> None:
        assert source.batch_size is not None
        super().__init__(source.batch_size, global_batch)
        check_batch(self.batch_size, global_batch)
        self.source = source
        self.dataset = source.dataset
        self._seed = seed
        self._epoch = -1
        self._stream: Iterator[_Batch] | None = None
        "None after the end of the stream"
        self._first_number = 0
        "number of the first batch in `_batches`"
        self._batches: deque[_Batch] = deque()

    def cut(self, epoch: int, step: int) -> Cut:
        """Read a step of an epoch and return its shards.

        Raises:
            FallowError: the stream has no such step.
        """
        if self._skip(DataPosition(epoch, step)):
            # With drop_last only a full step follows.
            full = self.shards if self.source.drop_last else 1
            while len(self._batches) < self.shards + full and self._read():
                pass
            if len(self._batches) >= full:
                batches = list(islice(self._batches, self.shards))
                sizes = tuple(batch.samples for batch in batches)
                last = len(self._batches) < self.shards + full
                # The CRC of each shard covers the whole step, so that a difference shows on all members.
                content = array("q", [*sizes, last, *(batch.crc for batch in batches)]).tobytes()
                crcs = tuple(shard_crc(epoch, step, shard, content) for shard in range(len(sizes)))
                return Cut(sizes, crcs, last)
        length = self._first_number + len(self._batches)
        if step:
            raise FallowError(
                f"the stream ended after {length} batches in epoch {epoch}, where the run is at step {step} of "
                f"{self.shards} batches each: an IterableDataset must give the same samples in every process and on "
                "every node",
                Exit.DATA,
            )
        raise FallowError(
            f"the stream has only {length} batches in epoch {epoch}, too few for a step: check the dataset"
            + ("; or lower global_batch (or max nodes), or set drop_last=False" if self.source.drop_last else ""),
            Exit.DATA,
        )

    def fetch(self, key: Key) -> Any:
        """Return one batch of the step that was cut last."""
        number = key.step * self.shards + key.shard - self._first_number
        batch = self._batches[number]
        # Keep a copy: a body may change its batch, and the step may have to be repeated.
        self._batches[number] = batch._replace(data=copy_batch(batch.data))
        return batch.data

    def example(self, members: Callable[[], DataPosition]) -> Any:
        """Return the next batch at the members' position. The members may advance while this member reads."""
        at = members()
        while self._skip(at) and at != (at := members()):
            pass
        if not self._batches and not self._read():
            # The members may be in another loader's pass.
            self._open(at.epoch)
            if not self._read():
                raise FallowError("the DataLoader's stream has no samples: check the dataset", Exit.DATA)
        return copy_batch(self._batches[0].data)

    def follow(self, members: DataPosition) -> bool:
        """Read past the batches of one step, if the members have finished the step."""
        if self._epoch != members.epoch:
            return self._skip(DataPosition(members.epoch, 0))
        if self._stream is None or self._first_number >= members.step * self.shards:
            return False
        return self._skip(DataPosition(members.epoch, self._first_number // self.shards + 1))

    def _skip(self, to: DataPosition) -> bool:
        """Read up to a step and drop earlier batches; returns False if the stream ends before the step."""
        target = to.step * self.shards
        if self._epoch != to.epoch or target < self._first_number:
            self._open(to.epoch)
        while self._first_number < target and (self._batches or self._read()):
            self._batches.popleft()
            self._first_number += 1
        return self._first_number == target

    def _read(self) -> bool:
        if self._stream is None:
            return False
        with self._seeded(self._first_number + len(self._batches)):
            batch = next(self._stream, None)
        self.moved()
        if batch is None:
            self._stream = None
            return False
        self._batches.append(batch)
        return True

    def _open(self, epoch: int) -> None:
        source = self.source
        self._stream = None  # ends its processes
        self._epoch, self._first_number = epoch, 0
        self._batches.clear()
        with self._seeded(-1):
            set_epoch(self.dataset, epoch)
            self._stream = start_loading(
                source,
                self.dataset,
                batch_size=source.batch_size,
                drop_last=source.drop_last,
                collate_fn=functools.partial(_collate_batch, source.collate_fn),
            )

    @contextmanager
    def _seeded(self, batch: int) -> Iterator[None]:
        """Seed all generators of this process, and restore them on exit."""
        with rng.preserve_generators(self.generators):
            rng.seed_everything(mix(self._seed, "stream", self._epoch, batch), self.generators)
            yield


def _collate_batch(user: Callable[[Any], Any], samples: list[Any]) -> _Batch:
    batch = user(samples)
    return _Batch(len(samples), batch, content_crc(batch))


def content_crc(batch: Any) -> int:
    """Return the CRC-32 of the beginning of every tensor, array, text and number of a batch.

    For a tensor on a device only dtype and shape count: reading its values would wait for the device.
    """
    return zlib.crc32(b"".join(map(_beginning, tree_leaves(batch))))


def _beginning(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        shape = repr((leaf.dtype, *leaf.shape)).encode()
        if leaf.device.type != "cpu" or leaf.layout is not torch.strided or leaf.is_quantized:
            return shape
        flat = leaf.detach().flatten()[: max(1, _COMPARED_BYTES // leaf.element_size())]
        return shape + flat.resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, str | int | float | complex | None):
        return repr(leaf)[:_COMPARED_BYTES].encode()
    try:
        return bytes(memoryview(leaf).cast("B")[:_COMPARED_BYTES])  # a NumPy array, bytes
    except (TypeError, ValueError):
        return type(leaf).__qualname__.encode()


def copy_batch(batch: Any) -> Any:
    """Return a copy of a batch, so that a body may change the original.

    Raises:
        FallowError: an object in the batch cannot be copied.
    """
    return tree_map(_copy_leaf, batch)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        # A pinned tensor needs a pinned copy: copies to a device from pageable memory block.
        return leaf.clone().pin_memory() if leaf.is_pinned() else leaf.clone()
    try:
        return copy.deepcopy(leaf)
    except Exception as error:  # a class of the script may raise anything
        raise FallowError(
            f"a batch contains a {type(leaf).__name__}, which cannot be copied ({error}). Fallow needs a copy to "
            "repeat a step: let collate_fn return tensors, NumPy arrays or plain values",
            Exit.DATA,
        ) from None
