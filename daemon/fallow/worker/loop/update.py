"""One optimizer step, as a script sees it, and what follows from it before the next."""

import time
from typing import TYPE_CHECKING, Any

import torch

from fallow.core.training.shards import Cut
from fallow.model import Exit, FallowError
from fallow.worker.data.ledger import Done
from fallow.worker.loop.exchange import Outcome
from fallow.worker.loop.shards import InnerLoop, RehearsedShards, Shards

if TYPE_CHECKING:
    from fallow.worker.loop.updates import Loop

_ALIGN_STEPS = 100
"""Between two hand-overs to members whose weights have come apart: unlike processors differ in nearly every step."""


class Update:
    """One optimizer step of the whole global batch. Made by `run.updates`.

    `for batch in update:` gives this member's shards. What stands behind that inner loop runs once, on every member,
    with whole gradients.
    """

    def __init__(self, loop: "Loop", *, rehearsal: bool) -> None:
        self._loop = loop
        self._kind = RehearsedShards if rehearsal else Shards
        self.began_at = time.monotonic()
        self.inner_loop: InnerLoop | None = None
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
        self.recorded_shards: set[tuple[int, int]] = set()
        "(generation, shard) that are in the ledger"
        self.figures: dict[str, float] = {}
        "means over all samples of the step, of all its inner loops so far"
        self.place_was_read = False
        "the script has looked at the step or the epoch in front of the first inner loop"
        self.made_joint_call = False
        "there was a `run.mean` or a `run.barrier` in it"
        self._settings = loop.watch.settings(loop.watch.rates())

    @property
    def step(self) -> int:
        """Its number, the same on all members."""
        return self._loop.step

    @property
    def has_begun(self) -> bool:
        """The script is inside its first inner loop, or behind that."""
        return bool(self.phases_done) or (self.inner_loop is not None and self.inner_loop.has_begun)

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
        if self.inner_loop is not None:
            if self.inner_loop.has_begun:
                raise FallowError(self.inner_loop.leave(), Exit.DATA)
            raise FallowError(f"step {self.step}: an inner loop inside an inner loop", Exit.DATA)
        if name in self.phases_done:
            what = f"phase {name!r}" if name else "the inner loop"
            raise FallowError(
                f"step {self.step}: {what} runs a second time: for a part with a sum of its own give each a name, "
                "`for batch in update.phase(name):`",
                Exit.DATA,
            )
        self.inner_loop = self._kind(self._loop, self, name)
        return self.inner_loop

    def note(self, **figures: float | torch.Tensor) -> None:
        """Inside the inner loop: the shard's mean of something; dropped if the shard is done again.

        Raises:
            FallowError: behind it, or it is no number.
        """
        if self.inner_loop is None or not self.inner_loop.in_body:
            raise FallowError("update.note belongs inside the inner loop, behind it read update.mean", Exit.DATA)
        self.inner_loop.note(figures)

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
        self.inner_loop, self.outcome, self.generation = None, outcome, generation

    # ------------------------------------------------------------------------------------------ behind the update

    def _finish(self) -> None:
        """Count it."""
        member, cut = self._loop.member, self.cut
        at, progress = member.place.position, member.progress
        member.last_step_end = time.monotonic()
        member.recorded_step = -1
        member.pace.end_step()
        member.ledger.add(Done(generation=member.group.generation, step=at.step))
        at.loss = self.figures.get("loss", at.loss)
        at.finish_step(cut.samples, last=cut.last)
        speed = cut.samples / max(member.last_step_end - self.began_at, 1e-9)
        progress.step = at.step
        progress.tell(
            epoch=member.place.epoch,
            reached=(at.data_epoch, at.index),
            loss=at.loss,
            samples_per_s=0.9 * (progress.figures.samples_per_s or speed) + 0.1 * speed,
            pace_s=member.pace.value,
        )

    def _act_on_outcome(self) -> None:
        """When it is counted: checkpoint, switch, come together, divide the shards anew."""
        outcome, member, generations = self.outcome, self._loop.member, self._loop.generations
        at, group = member.place.position, member.group
        assert outcome is not None
        if self.generation != group.generation:  # not all members of the present one know of it
            return
        if outcome.checkpoint and member.saver is not None:
            requests = outcome.checkpoints_asked
            member.saver.save(group, member.prepared, member.plain_values(), at.step, at.loop_epoch, asked=requests)
            if member.saver.leaves_alone:
                member.saver.finish()
                generations.depart()
        if outcome.switch > group.generation:
            generations.next_generation = outcome.switch
        elif group.broken is None and outcome.drifted and at.step >= generations.aligned_until:
            # Each member's optimizer acts for itself, and kernels of unlike processors may differ in a result's last
            # bit. Without `reproducible=True` that is no mistake, as it is none under DDP; but what is never brought
            # together drifts apart. So now and then members come together as at the beginning of a generation.
            generations.needs_meeting, generations.aligned_until = True, at.step + _ALIGN_STEPS
        elif group.broken is None:
            assert member.source is not None
            old = member.division
            member.division = old.revised(member.source.shards, outcome.paces, at.step)
            if member.division is not old:
                member.replan()
