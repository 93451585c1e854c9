"""One optimizer step as the script sees it, and what the member does between two steps."""

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from fallow.core.training.shards import Cut
from fallow.model import Exit, FallowError
from fallow.worker.data.ledger import StepFinished
from fallow.worker.loop.exchange import Outcome
from fallow.worker.loop.pace import node_paces
from fallow.worker.loop.shards import InnerLoop, RehearsedShards, Shards

if TYPE_CHECKING:
    from fallow.worker.loop.updates import Loop

_ALIGN_STEPS = 100
"""Least number of steps between two alignments of drifted weights: different processors differ in nearly every step."""

_NO_NUMBER = "fallow: step {step}: the mean of the figure `loss` is nan, and was not before. The run goes on\n"
_ROLL_BACK = (
    "fallow: its next checkpoints take the place of older ones: `fallow rollback RUN --to STEP` goes back to one from "
    "before that step\n"
)


class Update:
    """One optimizer step of the whole global batch. Made by `run.updates`.

    `for batch in update:` yields this member's shards. The code after that inner loop runs once on every member, with
    the gradients of the whole global batch.
    """

    def __init__(self, loop: "Loop", *, rehearsal: bool) -> None:
        self._loop = loop
        self._kind = RehearsedShards if rehearsal else Shards
        self.began_at = time.monotonic()
        self.inner_loop: InnerLoop | None = None
        "the current inner loop; None: between two inner loops"
        self.phases_done: list[str] = []
        "names of the phases whose sums are complete"
        self.outcome: Outcome | None = None
        "outcome of the last phase; None: no phase is complete, or this is a rehearsal"
        self.generation = -1
        "generation that concluded the outcome"
        self.cut = Cut((), (), last=False)
        "the shards of the step; a rehearsal has none"
        self.batches: dict[int, Any] = {}
        "shard -> batch, kept for further phases"
        self.recorded_shards: set[tuple[int, int]] = set()
        "(generation, shard) pairs that are in the ledger"
        self.figures: dict[str, float] = {}
        "means over all samples of the step, from all inner loops so far"
        self.place_was_read = False
        "the script has read `step` or `epoch` before the first inner loop"
        self.made_joint_call = False
        "the script has called `run.mean` or `run.barrier` in this update"
        self._settings = loop.watch.settings(loop.watch.rates())

    @property
    def step(self) -> int:
        """Number of the step, the same on all members."""
        return self._loop.step

    @property
    def has_begun(self) -> bool:
        """True once the script has begun the first inner loop."""
        return bool(self.phases_done) or (self.inner_loop is not None and self.inner_loop.has_begun)

    @property
    def depends_on_step(self) -> bool:
        """True if the code before the inner loop cannot serve another step, for example if it set a learning rate."""
        watch = self._loop.watch
        return self.place_was_read or self._settings != watch.settings(watch.rates())

    @property
    def epoch(self) -> int:
        """Epoch of `run.epochs`; outside of it, the number of finished passes over the data."""
        return self._loop.epoch

    def __iter__(self) -> InnerLoop:
        return self.phase("")

    def phase(self, name: str) -> InnerLoop:
        """Iterate over the shards for one phase: a part of the step with its own gradients and optimizer, as in a GAN.

        Args:
            name: name of the phase. All members must run the same phases in the same order.

        Raises:
            FallowError: another inner loop is not over, or the step has had this phase.
        """
        if self.inner_loop is not None:
            if self.inner_loop.has_begun:
                raise FallowError(self.inner_loop.leave(), Exit.DATA)
            raise FallowError(f"step {self.step}: an inner loop inside an inner loop", Exit.DATA)
        if name in self.phases_done:
            what = f"phase {name!r}" if name else "the inner loop"
            raise FallowError(
                f"step {self.step}: {what} runs a second time: give each part that has its own sum a name, "
                "`for batch in update.phase(name):`",
                Exit.DATA,
            )
        self.inner_loop = self._kind(self._loop, self, name)
        return self.inner_loop

    def note(self, **figures: float | torch.Tensor) -> None:
        """Inside the inner loop: note figures of the shard, each a mean over its samples.

        Figures of an attempt that is discarded do not count.

        Raises:
            FallowError: the call is outside of the inner loop, or a figure is no number.
        """
        if self.inner_loop is None or not self.inner_loop.in_body:
            raise FallowError("update.note belongs inside the inner loop, behind it read update.mean", Exit.DATA)
        self.inner_loop.note(figures)

    def mean(self, name: str) -> float:
        """After the inner loop: return a figure's mean over all samples of the step. Shards without it count as 0.

        Raises:
            FallowError: no shard has noted the figure.
        """
        if name not in self.figures:
            raise FallowError(
                f"update.mean({name!r}) belongs behind an inner loop with update.note({name}=...) in it", Exit.DATA
            )
        return self.figures[name]

    def close(self, phase: str, means: dict[str, float], outcome: Outcome | None = None, generation: int = -1) -> None:
        """Note that the sums of an inner loop are complete. A rehearsal has no `outcome`."""
        self.phases_done.append(phase)
        self.figures |= means
        if outcome is not None:
            self._loop.member.recorded_step = self.step
        self.inner_loop, self.outcome, self.generation = None, outcome, generation

    # ------------------------------------------------------------------------------------------ behind the update

    def _finish(self) -> None:
        """Count the step and report its figures."""
        member, cut = self._loop.member, self.cut
        at, progress = member.place.position, member.progress
        member.last_step_end = time.monotonic()
        member.recorded_step = -1
        member.pace.end_step()
        member.ledger.add(StepFinished(generation=member.group.generation, step=at.step))
        loss = self.figures.get("loss", at.loss)
        if math.isnan(loss or 0.0) and not math.isnan(at.loss or 0.0):  # told again after a rollback
            self._loop.tell(_NO_NUMBER + _ROLL_BACK * (member.session is not None))
        at.loss = loss
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
        """After the count: make a checkpoint, switch, align weights, or divide the shards anew."""
        outcome, member, generations = self.outcome, self._loop.member, self._loop.generations
        at, group = member.place.position, member.group
        assert outcome is not None
        if self.generation != group.generation:  # not all members of the current generation know the outcome
            return
        if outcome.checkpoint and member.saver is not None:
            requests = outcome.checkpoints_asked
            member.saver.save(group, member.prepared, member.plain_values(), at.step, at.loop_epoch, requests=requests)
            if member.saver.leaves_alone:
                member.saver.finish()
                generations.depart()
        if outcome.switch > group.generation:
            generations.next_generation = outcome.switch
        elif outcome.drifted and at.step >= generations.aligned_until:
            # Each member steps its own optimizer, and kernels of different processors may differ in a result's last
            # bit. Without `reproducible=True` that is no error, as under DDP. But the weights drift apart, so members
            # come together every now and then, as at the beginning of a generation.
            generations.needs_meeting, generations.aligned_until = True, at.step + _ALIGN_STEPS
        else:
            assert member.source is not None
            old = member.division
            member.division = old.revised(member.source.shards, node_paces(outcome.paces, member.nodes), at.step)
            if member.division is not old:
                member.replan()
