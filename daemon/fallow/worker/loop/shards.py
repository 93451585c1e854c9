"""An inner loop: this member's shards, handed out again until all members have complete sums.

A newcomer rehearses one update by itself, on one batch, and its state is restored afterwards. The rehearsal compiles
the model, makes the optimizers' state and starts loader processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch

from fallow.core.training.shards import Duty
from fallow.model import Exit, FallowError
from fallow.worker.data.ledger import Fed
from fallow.worker.data.source import Key
from fallow.worker.data.stream_loader import copy_batch
from fallow.worker.loop.agreement import check_parts
from fallow.worker.loop.exchange import Figures, Kind, Outcome, Part, decode_outcome, decode_part, encode
from fallow.worker.reduction.buckets import Sums
from fallow.worker.transport.waits import Interrupted

if TYPE_CHECKING:
    from fallow.worker.loop.update import Update
    from fallow.worker.loop.updates import Loop

_CHANGED = (
    "step {step}: weights or learning rates were changed inside the inner loop, which runs once for each shard and "
    "again after a member is lost: change them after the inner loop (an Embedding with max_norm changes its "
    "weights in forward: leave max_norm out)"
)

_IN_FRONT = (
    "step {step}: a backward in front of the inner loop, or the capture of one by torch.cuda.graph: its gradients "
    "would be lost, because only the inner loop sums gradients over the members; write the backward inside the inner "
    "loop, or between the inner loop and the optimizer's step"
)

_GATHERED = (
    "fallow: step {step}: no prepared optimizer has stepped behind the last inner loop, and its gradients are still "
    "there. This inner loop replaces them: to gather more gradients, take a larger global_batch, or more shards\n"
)


class Ending(Enum):
    """How the last attempt at the shards of an inner loop ended."""

    AGAIN = auto()
    "without the sums, or no attempt has ended yet: the shards are handed out again"
    WHOLE = auto()
    "all members have the sums, and the script may step its optimizers"
    LEFT = auto()
    "the script has left the inner loop before its end, which is refused"


class InnerLoop(Iterator[Any]):
    """The iterator of `for batch in update`. `phase` is empty if the update has only one inner loop."""

    def __init__(self, loop: "Loop", update: "Update", phase: str) -> None:
        assert loop.member.source is not None
        self._loop = loop
        self._member = loop.member
        self._source = loop.member.source
        self._update = update
        self.phase = phase
        self.has_begun = False
        self.in_body = False
        "the script works on a batch"
        self.ending = Ending.AGAIN
        self._shard, self._weight = 0, 0.0
        "shard and weight of the last batch that the script received"
        self._figures = Figures()

    def note(self, figures: dict[str, Any]) -> None:
        """Note figures of the shard that the script works on."""
        if self._weight:
            self._figures.note(self._shard, self._weight, figures)

    def leave(self) -> str:
        """Note that the script has left the inner loop before its end. Returns the error text for that."""
        self.ending = Ending.LEFT
        self._member.reduction.drop()
        return (
            f"step {self._update.step}: the inner loop was left before its end (break, return, itertools.islice, or an "
            "exception that the script caught), where other members would wait for its sums: leave a shard out by "
            "`continue`, and leave the loop over run.updates by a break behind the inner loop"
        )

    def complete(self) -> bool:
        """Return True if the last shard's backward is over and all members have the sums. For the short loop."""
        return self.in_body


class RehearsedShards(InnerLoop):
    """The inner loop of a rehearsal: one batch, whose gradients are not summed. No member waits for it."""

    def __next__(self) -> Any:
        member, batches = self._member, self._update.batches
        if self.has_begun:
            self.in_body = False
            member.reduction.end_body()
            self._figures.send()
            member.group.wait_and_verify()
            figures = self._figures.by_shard()
            self.ending = Ending.WHOLE
            self._update.close(self.phase, {name: sum(by_shard.values()) for name, by_shard in figures.items()})
            raise StopIteration
        self.has_begun, self._weight = True, 1.0
        if 0 not in batches:
            member.seed_random("batch", 0, 0)
            batches[0] = self._source.example(member.reached)
        member.seed_random("body", 0, self.phase, 0)
        member.reduction.begin(self.phase)
        member.reduction.begin_body(0.0, final=True, live=False)
        self.in_body = True
        return batches[0]


@dataclass(slots=True)
class _Attempt:
    """One attempt at an inner loop: this member's shards in one generation."""

    queue: list[Duty]
    "shards that were not handed out yet"
    steering: list[Any]
    weight_sample: torch.Tensor
    has_begun: bool = False
    "a shard was handed out"
    samples: int = 0
    crc: int = 0
    "`samples` and `crc`: sums over the shards that were handed out"


class Shards(InnerLoop):
    """This member's shards, handed out again until all members have complete sums."""

    def __init__(self, loop: "Loop", update: "Update", phase: str) -> None:
        super().__init__(loop, update, phase)
        self._attempt: _Attempt | None = None
        "the attempt in the current generation; None: not begun"
        at = self._member.place.position
        update.cut = self._source.cut(at.data_epoch, at.index)

    def __next__(self) -> Any:
        if self.ending is Ending.LEFT:
            raise FallowError(self.leave(), Exit.DATA)
        if self.in_body and self.ending is Ending.WHOLE:  # the short loop finished at the end of this body's backward
            self.in_body = False
            self._member.reduction.end_body()
        while self.ending is Ending.AGAIN:
            try:
                if self.in_body:
                    self._end_body()
                elif self._member.group.broken is not None or self._loop.generations.needs_meeting:
                    self._come_together()
                elif self._attempt is None:
                    self._deal()
                elif self._attempt.queue:
                    self._member.group.wait_for_siblings()
                    return self._hand_out(self._attempt)
                else:
                    self._finish(self._attempt)
            except Interrupted:
                continue
        raise StopIteration

    def complete(self) -> bool:
        if not self.in_body or self._attempt is None or self._attempt.queue:
            return False
        try:
            self._end_body()
            self._finish(self._attempt)
        except Interrupted:
            self._come_together()
        if self.ending is Ending.WHOLE:
            self.in_body = True
            self._member.reduction.begin_body(
                0.0, final=True
            )  # a further gradient before the end of the body is a mistake
        return self.ending is Ending.WHOLE

    # ------------------------------------------------------------------------------------------------- one attempt

    def _deal(self) -> None:
        """Begin an attempt with all of this member's shards in this generation."""
        member, at, cut = self._member, self._member.place.position, self._update.cut
        if not self.has_begun and member.reduction.has_stray_gradients():
            raise FallowError(_IN_FRONT.format(step=at.step), Exit.DATA)
        if not self.has_begun and not at.acts and member.prepared.optimizers and member.reduction.has_leftovers():
            self._loop.tell_once(_GATHERED)
        self._loop.watch.begin_step()
        self._loop.meeting.open(Kind.STEP, value=len(cut.sizes))
        self.has_begun = True
        watch = self._loop.watch
        self._attempt = _Attempt(member.duties(len(cut.sizes)), watch.steering(), watch.start_weight_sample(at.step))
        self._figures = Figures()
        if not self._update.phases_done:
            member.pace.begin_step()
        member.buffers.begin()
        # In a reproducible run members compare how they cut the step before they send any gradient.
        compared = self._loop.meeting.compared_generation == member.group.generation and self._source.samples >= 0
        waits = member.prepared.reproducible and not compared
        member.reduction.begin(self.phase, member.division.shares(len(cut.sizes)), leave_at_end=waits)

    def _hand_out(self, attempt: _Attempt) -> Any:
        member, at = self._member, self._member.place.position
        duty = attempt.queue.pop(0)
        size = self._update.cut.sizes[duty.shard]
        if attempt.has_begun:
            member.buffers.restore()
        attempt.has_begun = True
        self._shard, self._weight = duty.shard, size / self._update.cut.samples if duty.counts else 0.0
        member.reduction.begin_body(self._weight, final=not attempt.queue)
        member.pace.begin_body(is_full=size == self._source.batch_size)
        if self._source.draws:
            member.seed_random("batch", at.step, duty.shard)
        batch = self._batch(Key(at.data_epoch, at.index, duty.shard))
        if duty.counts:
            attempt.samples += size
            attempt.crc += self._update.cut.crcs[duty.shard]
            self._record(duty.shard)
        member.seed_random("body", at.step, self.phase, duty.shard)
        self._loop.generations.report_arrival()
        member.move()
        self.in_body = True
        return batch

    def _batch(self, key: Key) -> Any:
        """Return the shard's batch. If the step has phases, each phase gets a copy of its own."""
        batches = self._update.batches
        if key.shard in batches:
            return copy_batch(batches[key.shard])
        batch = self._source.fetch(key)
        self._member.pace.note_load(self._source.load_s, self._source.processes)
        if self.phase:
            batches[key.shard] = copy_batch(batch)
        return batch

    def _record(self, shard: int) -> None:
        """Write the shard into the ledger, once in each generation."""
        at, generation, recorded = (
            self._member.place.position,
            self._member.group.generation,
            self._update.recorded_shards,
        )
        if (generation, shard) in recorded:
            return
        recorded.add((generation, shard))
        self._member.ledger.add(
            Fed(
                generation=generation,
                epoch=at.data_epoch,
                step=at.step,
                shard=shard,
                n=self._update.cut.sizes[shard],
                total=self._update.cut.samples,
                crc=self._update.cut.crcs[shard],
            )
        )

    def _end_body(self) -> None:
        member, self.in_body = self._member, False
        member.pace.end_body()
        member.move()
        member.reduction.end_body()
        if (
            self._shard == 0 and member.group.rank == 0
        ):  # rank 0 has shard 0 in every division; other members may have a copy
            member.buffers.keep()

    # ------------------------------------------------------------------------------------------------- its end

    def _finish(self, attempt: _Attempt) -> None:
        """Wait until all members have the sums. Raises Interrupted: other members may have concluded nevertheless."""
        member, at = self._member, self._member.place.position
        if self._loop.watch.steering() != attempt.steering:
            raise FallowError(_CHANGED.format(step=at.step), Exit.DATA)
        self._loop.meeting.collect_openings(Kind.STEP)
        self._figures.send()
        parts: list[Part] = []

        def tell(sums: Sums) -> Sums:
            # Members wait for this part before they act. So this member's state and ledger must be complete first.
            if not member.state_status.complete():
                raise Interrupted(member.group.broken or "the state did not arrive")
            member.ledger.flush()
            own = encode(self._part(attempt, sums))
            parts[:] = map(decode_part, self._loop.generations.wait_on_node(lambda: member.group.gather(own)))
            check_parts(parts, at.step, self._update.cut, drift=not member.prepared.reproducible)
            return Sums.merge([part.sums for part in parts])

        sums = member.reduction.finish(tell)
        self._take(Outcome.of(parts, sums))

    def _part(self, attempt: _Attempt, sums: Sums) -> Part:
        member, at = self._member, self._member.place.position
        return Part(
            place=(at.op, at.step, *self._update.phases_done, self.phase),
            samples=attempt.samples,
            crc=attempt.crc,
            switch=member.session.orders.switch_offered if member.session is not None else 0,
            checkpoint=member.saver.vote(member.group.size) if member.saver is not None else 0.0,
            checkpoints_asked=member.session.head_status.checkpoints_asked if member.session is not None else 0,
            pace=member.pace.value,
            weight_checksum=self._loop.watch.weight_checksum(attempt.weight_sample),
            agreement=self._loop.watch.agreement(attempt.steering),
            acts=at.acts,
            sums=sums,
            notes=self._figures.by_shard(),
        )

    def _take(self, outcome: Outcome) -> None:
        """All members have the sums: make them gradients, unless they are void."""
        member, at = self._member, self._member.place.position
        generation = member.reduction.sums_of - 1
        if not member.reduction.give_out(outcome.sums):
            # The ledger has these shards of this generation already; only their batches must be loaded again.
            member.reduction.drop()
            member.replan()
            member.buffers.restore()
            self._attempt = None
            return
        member.buffers.settle()
        member.state_status.settle()  # the receivers of this member's state have confirmed all of it
        at.finish_operation(encode(outcome), generation)
        at.acts = 0
        self._loop.meeting.forget()
        self._loop.meeting.compared_generation = generation
        self.ending = Ending.WHOLE
        self._update.close(self.phase, outcome.means, outcome, generation)
        member.seed_random("behind", at.step, self.phase)

    def _come_together(self) -> None:
        """In a new generation: adopt the other members' outcome, or hand out the shards of the new division."""
        member = self._member
        self.in_body = False
        if self._attempt is not None:
            # Restore before the meeting: members compare their state, and received state must not be overwritten.
            member.buffers.restore()
        # Amid an update no newcomer may join: it would do alone what the members have done together.
        mid_update, step = self._update.made_joint_call or bool(self._update.phases_done), member.place.position.step
        depends_on_step = self._update.depends_on_step
        result = self._loop.meeting.come_together(
            Kind.STEP, rewind=member.reduction.forget, sums_of=member.reduction.sums_of, bars_newcomers=mid_update
        )
        if result.outcome is not None:
            self._take(decode_outcome(result.outcome))
            return
        # After a rollback the other members report the attempt that was discarded.
        member.discarded_attempts += self._attempt is not None and not member.place.was_rolled_back
        self._loop.check_place(mid_update=mid_update or depends_on_step)
        at = member.place.position
        if at.step != step:
            self._update.batches.clear()
        self._update.cut = self._source.cut(at.data_epoch, at.index)
        self._attempt = None
