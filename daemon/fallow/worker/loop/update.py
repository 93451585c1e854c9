"""One optimizer step, as a script sees it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from fallow.core.training.shards import Cut
from fallow.model import Exit, FallowError
from fallow.worker.loop.exchange import Outcome
from fallow.worker.loop.shards import InnerLoop, RehearsedShards, Shards

if TYPE_CHECKING:
    from fallow.worker.loop.updates import Loop


class Update:
    """One optimizer step of the whole global batch. Made by `run.updates`.

    `for batch in update:` gives this member's shards. What stands behind that inner loop runs once, on every member,
    with whole gradients.
    """

    def __init__(self, loop: Loop, *, rehearsal: bool) -> None:
        self._loop = loop
        self._kind = RehearsedShards if rehearsal else Shards
        self.began = time.monotonic()
        self.open: InnerLoop | None = None
        "the inner loop at work"
        self.phases_done: list[str] = []
        "phases that are whole"
        self.outcome: Outcome | None = None
        "of the last of them"
        self.generation = -1
        "in which its members have concluded that"
        self.cut = Cut((), (), last=False)
        "its shards; a rehearsal has none"
        self.batches: dict[int, Any] = {}
        "shard -> its batch, where another phase may need it"
        self.recorded: set[tuple[int, int]] = set()
        "(generation, shard) that are in the ledger"
        self.figures: dict[str, float] = {}
        "means over all samples of the step, of all its inner loops so far"
        self.place_was_read = False
        "the script has looked at the step or the epoch in front of the first inner loop"
        self.asked = False
        "there was a `run.mean` or a `run.barrier` in it"
        self._settings = loop.watch.settings(loop.watch.rates())

    @property
    def step(self) -> int:
        """Its number, the same on all members."""
        return self._loop.step

    @property
    def begun(self) -> bool:
        """The script is inside its first inner loop, or behind that."""
        return bool(self.phases_done) or (self.open is not None and self.open.begun)

    @property
    def depends_on_step(self) -> bool:
        """What the script did in front of the inner loop is of no use for another step: it may have set a rate, say."""
        watch = self._loop.watch
        return self.place_was_read or self._settings != watch.settings(watch.rates())

    @property
    def epoch(self) -> int:
        """Epoch of `run.epochs`, else passes over the data."""
        return self._loop.epoch

    def __iter__(self) -> InnerLoop:
        return self.phase("")

    def phase(self, name: str) -> InnerLoop:
        """The shards once more, for a part of the step with a sum and an optimizer step of its own, as in a GAN.

        Args:
            name: of the phase; every member goes through the same ones in the same order.

        Raises:
            FallowError: another inner loop is not over, or this one was there already.
        """
        if self.open is not None:
            if self.open.begun:
                raise FallowError(self.open.leave(), Exit.DATA)
            raise FallowError(f"step {self.step}: an inner loop inside an inner loop", Exit.DATA)
        if name in self.phases_done:
            what = f"phase {name!r}" if name else "the inner loop"
            raise FallowError(
                f"step {self.step}: {what} runs a second time: for a part with a sum of its own give each a name, "
                "`for batch in update.phase(name):`",
                Exit.DATA,
            )
        self.open = self._kind(self._loop, self, name)
        return self.open

    def note(self, **figures: float | torch.Tensor) -> None:
        """Inside the inner loop: the shard's mean of something; dropped if the shard is done again.

        Raises:
            FallowError: behind it, or it is no number.
        """
        if self.open is None or not self.open.inside:
            raise FallowError("update.note belongs inside the inner loop, behind it read update.mean", Exit.DATA)
        self.open.note(figures)

    def mean(self, name: str) -> float:
        """Behind the inner loop: the mean over all samples of the step; shards without the figure count as 0.

        Raises:
            FallowError: no shard has noted it.
        """
        if name not in self.figures:
            raise FallowError(
                f"update.mean({name!r}) belongs behind an inner loop with update.note({name}=...) in it", Exit.DATA
            )
        return self.figures[name]

    def close(self, phase: str, means: dict[str, float], outcome: Outcome | None = None, generation: int = -1) -> None:
        """An inner loop is whole; `outcome` is what its members have concluded, if it is none of a rehearsal."""
        self.phases_done.append(phase)
        self.figures |= means
        if outcome is not None:
            self._loop.member.recorded_step = self.step
        self.open, self.outcome, self.generation = None, outcome, generation
