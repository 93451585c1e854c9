"""Between two updates: counting, checkpoints, drift, and the division of shards."""

from __future__ import annotations

import time

from fallow.worker.data.ledger import Done
from fallow.worker.loop.exchange import Outcome
from fallow.worker.loop.generations import Generations
from fallow.worker.loop.member import Member
from fallow.worker.loop.update import Update

_ALIGN_STEPS = 100
"""Between two hand-overs to members whose weights have come apart: unlike processors differ in nearly every step."""


class Boundary:
    """Of one member."""

    def __init__(self, member: Member, generations: Generations) -> None:
        self._member = member
        self._generations = generations
        self._aligned_at = -1, 0
        "generation and step in which its members' weights were last brought together"

    def finish(self, update: Update) -> None:
        """Count a finished update."""
        member, at, progress, cut = self._member, self._member.place.position, self._member.progress, update.cut
        member.boundary = time.monotonic()
        member.recorded_step = -1
        member.pace.end_step()
        member.ledger.add(Done(generation=member.group.generation, step=at.step))
        at.loss = update.figures.get("loss", at.loss)
        at.finish_step(cut.samples, last=cut.last)
        speed = cut.samples / max(member.boundary - update.began, 1e-9)
        progress.step = at.step
        progress.tell(
            epoch=member.place.epoch,
            reached=(at.data_epoch, at.index),
            loss=at.loss,
            samples_per_s=0.9 * (progress.told.samples_per_s or speed) + 0.1 * speed,
            pace_s=member.pace.value,
        )

    def act_on(self, update: Update) -> None:
        """Behind a finished update: what its outcome asks for."""
        member, generations, outcome = self._member, self._generations, update.outcome
        assert outcome is not None
        if update.generation != member.group.generation:  # not all members of the present one know of it
            return
        if outcome.checkpoint and member.saver is not None:
            at = member.place.position
            asked = outcome.checkpoints_asked
            member.saver.save(member.group, member.prepared, member.plain(), at.step, at.loop_epoch, asked=asked)
            if member.saver.leaves_alone:
                member.saver.finish()
                generations.depart()
        if outcome.switch > member.group.generation:
            generations.due = outcome.switch
        elif member.group.broken is None:
            self._even_out(outcome)

    def _even_out(self, outcome: Outcome) -> None:
        """Bring weights together that have drifted apart, and divide the shards anew if paces make it worth while.

        Each member's optimizer acts for itself, and kernels of unlike processors may differ in a result's last bit.
        Without `reproducible=True` that is no mistake, as it is none under DDP; but what is never brought together
        drifts apart. So now and then members come together as at the beginning of a generation.
        """
        member = self._member
        generation, step = member.group.generation, member.place.position.step
        aligned_in, aligned_at = self._aligned_at
        if outcome.drifted and (generation != aligned_in or step >= aligned_at + _ALIGN_STEPS):
            self._aligned_at, self._generations.fresh = (generation, step), True
            return
        assert member.source is not None
        old = member.division
        member.division = old.revised(member.source.shards, outcome.paces, step)
        if member.division is not old:
            member.replan()
