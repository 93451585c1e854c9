"""What the loop needs of its data: how each step is cut into shards, and the batch of each shard."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fallow.core.training.shards import Cut, shard_crc
from fallow.model import Exit, FallowError


class Key(NamedTuple):
    """One shard: epoch of the data, step in that epoch, shard in that step."""

    epoch: int
    step: int
    shard: int


class DataPosition(NamedTuple):
    """How far the members are: epoch of the data, finished steps in that epoch."""

    epoch: int
    step: int


Duties = Callable[[int], Sequence[int]]
"""Shards in a step -> the shards that this member computes."""


class Source(ABC):
    """The data of a loop over updates. Which samples a shard has never depends on the membership.

    A full shard has `batch_size` samples, a full step `global_batch`, a multiple of that.
    """

    steps: int | None = None
    "optimizer steps in one epoch; None: the source itself knows only when an epoch ends"
    samples = -1
    "in one epoch; 0: it has no epochs; -1: known only as they come, so members may cut a step unlike each other"
    draws = False
    "`fetch` draws from the generators that the loop seeds, and has no seeds of its own"
    processes = 0
    "loader processes that work in the background; 0: `fetch` itself loads"

    def __init__(self, batch_size: int, global_batch: int) -> None:
        self.batch_size = batch_size
        self.global_batch = global_batch
        self.load_s = 0.0
        "seconds that a loader process took for the last fetched batch"
        self.moved: Callable[[], None] = lambda: None
        "called whenever a long operation makes progress"
        self.generators: Sequence[Any] = ()
        "prepared generators, which the data set may hold: seeded together with those of torch, numpy and `random`"

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
        """Return the shards of a step of an epoch: the same on every member.

        Raises:
            FallowError: there is no such step.
        """

    @abstractmethod
    def fetch(self, key: Key) -> Any:
        """Return one batch of the step that was cut last.

        The caller seeds all random numbers for the body behind this, and if it `draws`, for the shard before.
        """

    @abstractmethod
    def example(self, members: Callable[[], DataPosition]) -> Any:
        """Return a batch for the rehearsal. `members` tells where the others are by now, as far as is known."""

    def replan(self, at: Key, duties: Duties) -> None:
        """Take note of what this member will fetch, in order, from `at` on."""
        return

    def follow(self, members: DataPosition) -> bool:
        """Work usefully while this process waits to become a member. Returns True if there is more to do at once."""
        return False


class FunctionSource(Source):
    """A function that makes a batch from random numbers, as nanoGPT's `get_batch` does, in the place of a loader.

    An endless source: one call of the function is one shard, which counts as one sample.

    The loop seeds torch, numpy and `random` for the shard before it calls `fetch`. So the batch of a shard is a
    function of (seed, step, shard), on whichever member and however often it is made.

    Args:
        function: called without arguments; returns a batch, of the same size each time.
        shards: calls in one step, at least 1.
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
