"""Between two updates: counting, checkpoints, drift, the division of shards, and changes of the membership."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from fallow.core.joining import other_bits
from fallow.model import Aligned, Exit, FallowError
from fallow.worker.data.ledger import Done
from fallow.worker.handover.align import EVERY, align
from fallow.worker.loop.generations import Generations
from fallow.worker.loop.meeting import Meeting
from fallow.worker.loop.member import Member
from fallow.worker.loop.opening import Kind
from fallow.worker.loop.outcome import Outcome
from fallow.worker.loop.update import Update
from fallow.worker.prepared.checksum import majority_and_others
from fallow.worker.prepared.signature import signature
from fallow.worker.transport.build import take_to_device
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Interrupted

_MEETING_S = 300.0
"""For so long the ranks of a fixed world wait for each other in front of the first step."""

_DRIFTED = (
    "fallow: generation {generation}: this member's weights were not those of the others at step {step}; they were "
    "replaced. Does this node compute differently, or does the script change weights by hand?\n"
)


class Boundary:
    """Of one member.

    Args:
        member: this worker.
        generations: its way into the next one.
        meeting: where members come together.
    """

    def __init__(self, member: Member, generations: Generations, meeting: Meeting) -> None:
        self._member = member
        self._generations = generations
        self._meeting = meeting
        self._began = time.monotonic()
        self._speed = 0.0
        self._rests = -1, 0
        "generation whose members were aligned, and the step before which they are not again: the same on all of them"
        self._aligned_in = -1
        "generation in which this member has told that it was aligned"

    def join(self) -> None:
        """Take part in the first generation of this worker."""
        member = self._member
        member.boundary = time.monotonic()
        if member.session is None:
            prepared = member.prepared
            try:
                take_to_device(member.group, prepared.device, _MEETING_S)
                _check_arithmetic(member.group, signature(prepared.devices()) if prepared.reproducible else [])
            except Interrupted as error:
                raise FallowError(
                    f"the first exchange between the ranks failed: {error}; see the other ranks' output"
                ) from None
        self._meeting.join()

    def come_together(self) -> None:
        """In front of an update: all members are here, in the generation that they have agreed on."""
        if self._generations.wanted or self._generations.fresh:
            self._meeting.come_together(Kind.STEP)
        self._began = time.monotonic()

    def finish(self, update: Update) -> None:
        """Count a finished update."""
        member, at, cut = self._member, self._member.place.position, update.cut
        assert cut is not None
        member.boundary = time.monotonic()
        member.recorded_step = -1
        member.pace.end_step()
        member.ledger.add(Done(generation=member.group.generation, step=at.step))
        at.loss = update.figures.get("loss", at.loss)
        at.finish_step(cut.samples, last=cut.last)
        now = cut.samples / max(member.boundary - self._began, 1e-9)
        self._speed = now if not self._speed else 0.9 * self._speed + 0.1 * now
        if member.session is not None:
            progress = member.session.progress
            progress.step, progress.loss, progress.samples_per_s = at.step, at.loss, self._speed
            progress.pace_s = member.pace.value
            progress.epoch = member.place.epoch
            progress.reached = at.data_epoch, at.index

    def take(self, update: Update) -> None:
        """Behind a finished update: what its outcome asks for."""
        member, outcome = self._member, update.outcome
        assert outcome is not None
        if update.generation != member.group.generation:  # not all of this one's members know of it
            return
        if outcome.checkpoint and member.saver is not None:
            at = member.place.position
            member.saver.save(member.group, member.prepared, member.plain(), at.step, at.loop_epoch)
            if member.saver.leaves_alone:
                member.saver.finish()
                self._generations.depart()
        if outcome.switch > member.group.generation:
            self._generations.due = outcome.switch
        elif member.group.broken is None:
            self._even_out(outcome)

    def _even_out(self, outcome: Outcome) -> None:
        """Bring weights together that have drifted apart, and divide the shards anew if paces make it worth while."""
        member = self._member
        if outcome.drifted and not self._align(outcome.pieces):
            return
        assert member.source is not None
        if len(outcome.paces) == member.group.size:
            old = member.division
            member.division = old.revised(member.source.shards, outcome.paces, member.place.position.step)
            if member.division is not old:
                member.replan()

    def _align(self, pieces: list[int]) -> bool:
        """Give all members one member's state, now and then; False: the group broke before it was done."""
        member = self._member
        group, step = member.group, member.place.position.step
        aligned_in, until = self._rests
        if (group.generation == aligned_in and step < until) or len(pieces) != group.size:
            return True
        root = majority_and_others(pieces)[0][0]
        try:
            align(group, member.prepared, root)
        except Interrupted:
            return False
        self._rests = group.generation, step + EVERY
        if pieces[group.rank] != pieces[root] and self._aligned_in != group.generation:
            self._aligned_in = group.generation
            sys.stderr.write(_DRIFTED.format(generation=group.generation, step=step))
            if member.session is not None:
                member.session.send(Aligned(worker=member.session.worker, generation=group.generation, step=step))
        return True


def _check_arithmetic(group: Group, lines: Sequence[str]) -> None:
    """Refuse a reproducible fixed world whose ranks would not compute the same bits; `lines`: this rank's signature."""
    first, *others = [text.decode().splitlines() for text in group.gather("\n".join(lines).encode())]
    for rank, other in enumerate(others, start=1):
        problem = other_bits(first, other)
        if problem is not None:
            raise FallowError(f"rank {rank} does not fit to rank 0: {problem}", Exit.DATA)
