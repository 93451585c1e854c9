"""Between two updates: counting, checkpoints, drift, and the division of shards."""

from __future__ import annotations

import sys
import time

from fallow.worker.data.ledger import Done
from fallow.worker.handover.align import EVERY, align
from fallow.worker.loop.exchange import Outcome
from fallow.worker.loop.generations import Generations
from fallow.worker.loop.member import Member
from fallow.worker.loop.update import Update
from fallow.worker.prepared.checksum import majority_and_others
from fallow.worker.transport.waits import Interrupted

_DRIFTED = (
    "fallow: generation {generation}: this member's weights were not those of the others at step {step}; they were "
    "replaced. Does this node compute differently, or does the script change weights by hand?\n"
)


class Boundary:
    """Of one member."""

    def __init__(self, member: Member, generations: Generations) -> None:
        self._member = member
        self._generations = generations
        self._alignment = -1, 0, False
        "generation; step before which its members are not aligned again; whether this member has said that it was"

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
        """Bring weights together that have drifted apart, and divide the shards anew if paces make it worth while."""
        member = self._member
        if outcome.drifted and not self._align(outcome.weight_checksums):
            return
        assert member.source is not None
        old = member.division
        member.division = old.revised(member.source.shards, outcome.paces, member.place.position.step)
        if member.division is not old:
            member.replan()

    def _align(self, checksums: list[int]) -> bool:
        """Give all members one member's state, now and then; False: the group broke before it was done."""
        member = self._member
        group, step = member.group, member.place.position.step
        generation, until, has_warned = self._alignment
        if generation != group.generation:
            generation, until, has_warned = group.generation, 0, False
        if step < until:
            return True
        root = majority_and_others(checksums)[0][0]
        try:
            align(group, member.prepared, root)
        except Interrupted:
            return False
        was_replaced = checksums[group.rank] != checksums[root]
        self._alignment = generation, step + EVERY, has_warned or was_replaced
        if was_replaced and not has_warned:
            sys.stderr.write(_DRIFTED.format(generation=generation, step=step))
            if member.session is not None:
                member.session.say(healed=step)
        return True
