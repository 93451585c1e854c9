"""The elastic loader of a stream: an IterableDataset, whose samples have an order but no numbers.

Every member iterates the whole stream, with loader processes of its own, and uses the batches of its own shards: batch
`step * shards + shard` of an epoch is that shard of that step. All batches of a step are read before the step begins,
and as many more as tell whether another step follows. They are kept until the step is finished, so that it can be done
again and divided in another way. A newcomer reads its way to the members' place before it joins.

Everything random is seeded from (seed, epoch), so the same stream comes on every member, provided that the data set
gives the same on every node and does not divide itself by rank. The beginning of each sample's content goes into the
CRCs that members compare in every step, so a data set that does otherwise is found in its first step.
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
"""Bytes of each tensor, array or text of a batch that go into its CRC."""


class _Batch(NamedTuple):
    samples: int
    data: Any
    crc: int


class StreamLoader(Source):
    """A loader over an IterableDataset.

    The dataset, collate function and worker settings are those of the script's loader. If the data set has `set_epoch`,
    it is told the number of the epoch.

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
        "None: it has ended"
        self._first_number = 0
        "number of the first batch that is kept"
        self._batches: deque[_Batch] = deque()

    def cut(self, epoch: int, step: int) -> Cut:
        """Read a step of an epoch and return its shards.

        Raises:
            FallowError: the stream has no such step.
        """
        if self._skip(DataPosition(epoch, step)):
            # With drop_last another step comes only if it is a full one.
            full = self.shards if self.source.drop_last else 1
            while len(self._batches) < self.shards + full and self._read():
                pass
            if len(self._batches) >= full:
                batches = list(islice(self._batches, self.shards))
                sizes = tuple(batch.samples for batch in batches)
                last = len(self._batches) < self.shards + full
                # The whole step is in each CRC: members whose streams differ are all told so.
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
        # A body may change its batch, and the step may have to be done again.
        self._batches[number] = batch._replace(data=copy_batch(batch.data))
        return batch.data

    def example(self, members: Callable[[], DataPosition]) -> Any:
        """Return the next batch at the members' place. They may advance while this member reads."""
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
        """Read past one step's batches, if the members have finished that step."""
        if self._epoch != members.epoch:
            return self._skip(DataPosition(members.epoch, 0))
        if self._stream is None or self._first_number >= members.step * self.shards:
            return False
        return self._skip(DataPosition(members.epoch, self._first_number // self.shards + 1))

    def _skip(self, to: DataPosition) -> bool:
        """Read up to that step and drop the batches before it; return False if the stream ends before it."""
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
        """Seed all random numbers of this process, and put the generators back afterwards."""
        with rng.preserve_generators(self.generators):
            rng.seed_everything(mix(self._seed, "stream", self._epoch, batch), self.generators)
            yield


def _collate_batch(user: Callable[[Any], Any], samples: list[Any]) -> _Batch:
    batch = user(samples)
    return _Batch(len(samples), batch, content_crc(batch))


def content_crc(batch: Any) -> int:
    """Return the CRC-32 of the beginning of every tensor, array, text and number of a batch.

    Of a tensor that is not on the host only type and shape count: to read it would be to wait for the device.
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
    """Return a copy of a batch, so that a body may change the batch itself.

    Raises:
        FallowError: something in it cannot be copied.
    """
    return tree_map(_copy_leaf, batch)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        # A copy in pageable memory would make copies to a device wait.
        return leaf.clone().pin_memory() if leaf.is_pinned() else leaf.clone()
    try:
        return copy.deepcopy(leaf)
    except Exception as error:  # whatever a class of the script says
        raise FallowError(
            f"a batch holds a {type(leaf).__name__}, which cannot be copied ({error}), though a body may change it and "
            "have it once more as it was: let collate_fn return tensors, NumPy arrays or plain values",
            Exit.DATA,
        ) from None
