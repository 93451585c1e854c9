"""Between two updates: counting, checkpoints, drift, and the division of shards."""

from __future__ import annotations

import time

from fallow.worker.data.ledger import Done
from fallow.worker.loop.generations import Generations
from fallow.worker.loop.member import Member
from fallow.worker.loop.update import Update

_ALIGN_STEPS = 100
"""Between two hand-overs to members whose weights have come apart: unlike processors differ in nearly every step."""


def finish(member: Member, update: Update) -> None:
    """Count a finished update."""
    at, progress, cut = member.place.position, member.progress, update.cut
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


def act_on(update: Update, member: Member, generations: Generations) -> None:
    """Behind a finished update: what its outcome asks for."""
    outcome, at = update.outcome, member.place.position
    assert outcome is not None
    if update.generation != member.group.generation:  # not all members of the present one know of it
        return
    if outcome.checkpoint and member.saver is not None:
        asked = outcome.checkpoints_asked
        member.saver.save(member.group, member.prepared, member.plain(), at.step, at.loop_epoch, asked=asked)
        if member.saver.leaves_alone:
            member.saver.finish()
            generations.depart()
    if outcome.switch > member.group.generation:
        generations.due = outcome.switch
    elif member.group.broken is None and outcome.drifted and at.step >= generations.aligned_until:
        # Each member's optimizer acts for itself, and kernels of unlike processors may differ in a result's last bit.
        # Without `reproducible=True` that is no mistake, as it is none under DDP; but what is never brought together
        # drifts apart. So now and then members come together as at the beginning of a generation.
        generations.fresh, generations.aligned_until = True, at.step + _ALIGN_STEPS
    elif member.group.broken is None:
        assert member.source is not None
        old = member.division
        member.division = old.revised(member.source.shards, outcome.paces, at.step)
        if member.division is not old:
            member.replan()
