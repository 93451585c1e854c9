"""The loop's interface to its data: how each step is cut into shards, and the batch of each shard."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fallow.core.training.shards import Cut, shard_crc
from fallow.model import Exit, FallowError


class Key(NamedTuple):
    """One shard: epoch of the data, step in the epoch, shard in the step."""

    epoch: int
    step: int
    shard: int


class DataPosition(NamedTuple):
    """Position of the members: epoch of the data, finished steps in the epoch."""

    epoch: int
    step: int


Duties = Callable[[int], Sequence[int]]
"""Function: number of shards in a step -> the shards that this member computes."""


class Source(ABC):
    """The data of a loop over updates. The samples of a shard never depend on the membership.

    A full shard has `batch_size` samples. A full step has `global_batch` samples, a multiple of `batch_size`.
    """

    steps: int | None = None
    "optimizer steps in one epoch; None: unknown until the epoch ends"
    samples = -1
    "samples in one epoch; 0: endless; -1: unknown until read, so members may cut a step differently"
    draws = False
    "True if `fetch` uses the generators that the loop seeds, and has no seeds of its own"
    processes = 0
    "number of background loader processes; 0: `fetch` itself loads"

    def __init__(self, batch_size: int, global_batch: int) -> None:
        self.batch_size = batch_size
        self.global_batch = global_batch
        self.load_s = 0.0
        "seconds that a loader process took for the last fetched batch"
        self.moved: Callable[[], None] = lambda: None
        "callback for progress of a long operation"
        self.generators: Sequence[Any] = ()
        "prepared generators, which the data set may use; seeded together with those of torch, numpy and `random`"

    @property
    def shards(self) -> int:
        """Shards in a full step."""
        return self.global_batch // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        raise FallowError(
            "a prepared DataLoader is iterated with `for update in run.updates(loader): for batch in update:`",
            Exit.DATA,
        )

    @abstractmethod
    def cut(self, epoch: int, step: int) -> Cut:
        """Return the shards of a step of an epoch. Equal on every member.

        Raises:
            FallowError: there is no such step.
        """

    @abstractmethod
    def fetch(self, key: Key) -> Any:
        """Return one batch of the step that was cut last.

        If `draws`, the caller seeds all generators for the shard before this call. It seeds them for the body after it.
        """

    @abstractmethod
    def example(self, members: Callable[[], DataPosition]) -> Any:
        """Return a batch for the rehearsal. `members` returns the latest known position of the other members."""

    def replan(self, at: Key, duties: Duties) -> None:
        """Set the shards that this member will fetch from `at` on, in order."""
        return

    def follow(self, members: DataPosition) -> bool:
        """Read ahead while this process waits to become a member. Returns True if more can be read now."""
        return False


class FunctionSource(Source):
    """Source of a function that makes random batches, as nanoGPT's `get_batch` does. Endless.

    One call of the function is one shard, which counts as one sample. The loop seeds torch, numpy and `random` for the
    shard before it calls `fetch`. So the batch depends only on (seed, step, shard), not on the member.

    Args:
        function: called without arguments; returns a batch, always of one size.
        shards: number of calls in one step, at least 1.
    """

    samples = 0
    draws = True

    def __init__(self, function: Callable[[], Any], shards: int) -> None:
        if not isinstance(shards, int) or shards < 1:
            raise FallowError(f"run.updates: shards={shards!r} is not a whole number above 0", Exit.USAGE)
        super().__init__(1, shards)
        self._function = function

    def cut(self, epoch: int, step: int) -> Cut:
        crcs = tuple(shard_crc(epoch, step, shard, b"") for shard in range(self.shards))
        return Cut((1,) * self.shards, crcs, last=False)

    def fetch(self, key: Key) -> Any:
        return self._function()

    def example(self, members: Callable[[], DataPosition]) -> Any:
        return self._function()
