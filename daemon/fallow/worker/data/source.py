"""What the loop needs of a loader, whatever its data set is like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from fallow.core.shards import Cut
from fallow.model import Exit, FallowError


class Key(NamedTuple):
    """One shard: epoch of the data, step in that epoch, shard in that step."""

    epoch: int
    step: int
    shard: int


class Reached(NamedTuple):
    """How far members are: epoch of the data, finished steps in it."""

    epoch: int
    step: int


Duties = Callable[[int], Sequence[int]]
"""Shards in a step -> the shards that this member computes."""


class Source(ABC):
    """Stands where the user's DataLoader stood. Iterated by `run.steps` only.

    Args:
        source: the user's loader, which has a batch size.
        seed: the run's seed.
        global_batch: samples in a full step.
    """

    steps: int | None
    "optimizer steps in one epoch; None: not known"

    def __init__(self, source: DataLoader[Any], seed: int, global_batch: int) -> None:
        assert source.batch_size is not None
        self.source = source
        self.dataset = source.dataset
        self.batch_size = source.batch_size
        self.global_batch = global_batch
        self.load_s = 0.0
        "seconds of this member's own work in the last batch that `fetch` gave, wherever it was done"
        self.moved: Callable[[], None] = lambda: None
        "called while something takes long, as often as it gets on"
        self.generators: Sequence[Any] = ()
        "of the script, which its data set may hold: seeded as those are that torch, numpy and `random` have"
        self._seed = seed

    @property
    def shards(self) -> int:
        """Shards in a full step."""
        return self.global_batch // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        raise FallowError("a prepared DataLoader is iterated with `for batch in run.steps(loader)`", Exit.DATA)

    @abstractmethod
    def cut(self, epoch: int, step: int) -> Cut:
        """The shards of a step of an epoch: the same on every member.

        Raises:
            FallowError: there is no such step.
        """

    @abstractmethod
    def fetch(self, key: Key, duties: Duties) -> Any:
        """One batch, collated (and pinned) as the user's loader does it; its step was cut just before."""

    @abstractmethod
    def example(self, members: Callable[[], Reached]) -> Any:
        """A batch for the rehearsal. `members`: where the others are by now, as far as is known."""

    @abstractmethod
    def replan(self, at: Key, duties: Duties) -> None:
        """What this member will want from `at` on."""

    def follow(self, members: Reached) -> bool:
        """Wait usefully for a place among members who are there; returns True if there is more to do at once."""
        return False
