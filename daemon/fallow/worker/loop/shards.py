"""An inner loop: this member's shards, handed out again as long as the sums are not whole and certain.

A newcomer rehearses its first update by itself: whole, but for one batch only, and on throw-away state. That compiles,
makes the optimizers' state, starts loader processes and fixes the order in which gradients come.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fallow.core.training.shards import Duty
from fallow.model import Exit, FallowError
from fallow.worker.data.ledger import Fed
from fallow.worker.data.source import Key
from fallow.worker.data.stream_loader import copied
from fallow.worker.loop.agreement import check_parts
from fallow.worker.loop.exchange import Figures, Kind, Outcome, Part, decode_outcome, decode_part, encode
from fallow.worker.reduction.buckets import Sums
from fallow.worker.transport.waits import Interrupted

if TYPE_CHECKING:
    from fallow.worker.loop.update import Update
    from fallow.worker.loop.updates import Loop

_CHANGED = (
    "step {step}: weights or learning rates were changed inside the inner loop, which runs once for each shard and "
    "again after a loss: write that behind the inner loop (an Embedding with max_norm changes its weights in forward: "
    "leave max_norm out)"
)

_IN_FRONT = (
    "step {step}: a backward in front of the inner loop, or the capture of one by torch.cuda.graph: its gradients "
    "would be lost, since they are summed over the members in the inner loop only; write it inside, or behind it in "
    "front of the optimizer's step"
)


class InnerLoop(Iterator[Any]):
    """What `for batch in update` goes over; `phase` is empty if the update has one inner loop only."""

    def __init__(self, loop: "Loop", update: "Update", phase: str) -> None:
        assert loop.member.source is not None
        self._loop = loop
        self._member = loop.member
        self._source = loop.member.source
        self._update = update
        self.phase = phase
        self.has_begun = False
        self.in_body = False
        "the script has a batch in its hands"
        self.has_sums = False
        "all members have the sums, and the script may act"
        self.was_left = False
        "the script has left it in the middle"
        self._shard, self._weight = 0, 0.0
        "of the batch that it got last"
        self._figures = Figures()

    def note(self, figures: dict[str, Any]) -> None:
        """Figures of the shard that the script has in its hands."""
        if self._weight:
            self._figures.note(self._shard, self._weight, figures)

    def leave(self) -> str:
        """The script goes on without an end of this; returns what to say of it."""
        self.was_left = True
        self._member.reduction.drop()
        return (
            f"step {self._update.step}: the inner loop was left before its end (break, return, itertools.islice, or an "
            "exception that the script caught), where other members would wait for its sums: leave a shard out by "
            "`continue`, and leave the loop over run.updates by a break behind the inner loop"
        )

    def complete(self) -> bool:
        """Behind a backward, for the short loop: True if it was the last shard's, and all members have the sums."""
        return self.in_body


class RehearsedShards(InnerLoop):
    """A newcomer's: one batch, whose gradients stay as autograd made them. Nobody waits for it."""

    def __next__(self) -> Any:
        member, batches = self._member, self._update.batches
        if self.has_begun:
            self.in_body = False
            member.reduction.end_body()
            self._figures.send()
            member.group.wait_and_verify()
            figures = self._figures.by_shard()
            self.has_sums = True
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
    """This member's shards in one generation, from the beginning."""

    queue: list[Duty]
    "shards that the script has not got yet"
    steering: list[Any]
    weight_sample: torch.Tensor
    has_begun: bool = False
    "one of them was handed out"
    samples: int = 0
    crc: int = 0
    "both of the shards that were handed out"


class Shards(InnerLoop):
    """This member's shards, handed out again as long as the sums are not whole and certain."""

    def __init__(self, loop: "Loop", update: "Update", phase: str) -> None:
        super().__init__(loop, update, phase)
        self._attempt: _Attempt | None = None
        "in the generation at work"
        at = self._member.place.position
        update.cut = self._source.cut(at.data_epoch, at.index)

    def __next__(self) -> Any:
        if self.was_left:
            raise FallowError(self.leave(), Exit.DATA)
        if self.in_body and self.has_sums:  # since the backward of the body that is over now
            self.in_body = False
            self._member.reduction.end_body()
        while not self.has_sums:
            try:
                if self.in_body:
                    self._end_body()
                elif self._member.group.broken is not None or self._loop.generations.needs_meeting:
                    self._come_together()
                elif self._attempt is None:
                    self._deal()
                elif self._attempt.queue:
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
        if self.has_sums:
            self.in_body = True
            self._member.reduction.begin_body(0.0, final=True)  # a gradient that comes until its end is a mistake
        return self.has_sums

    # ------------------------------------------------------------------------------------------------- one attempt

    def _deal(self) -> None:
        """This member's shards in this generation, from the beginning."""
        member, at, cut = self._member, self._member.place.position, self._update.cut
        if not self.has_begun and member.reduction.has_stray_gradients():
            raise FallowError(_IN_FRONT.format(step=at.step), Exit.DATA)
        self._loop.watch.begin_step()
        self._loop.meeting.open(Kind.STEP, value=len(cut.sizes))
        self.has_begun = True
        watch = self._loop.watch
        self._attempt = _Attempt(member.duties(len(cut.sizes)), watch.steering(), watch.start_weight_sample(at.step))
        self._figures = Figures()
        if not self._update.phases_done:
            member.pace.begin_step()
        member.buffers.begin()
        # Where members must not cut the step unlike each other, they compare that before anything is sent.
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
        """The shard's batch; where the step has phases each gets a copy of its own to work on."""
        batches = self._update.batches
        if key.shard in batches:
            return copied(batches[key.shard])
        batch = self._source.fetch(key)
        self._member.pace.note_load(self._source.load_s, self._source.processes)
        if self.phase:
            batches[key.shard] = copied(batch)
        return batch

    def _record(self, shard: int) -> None:
        """In the ledger, once in each generation."""
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
        if self._shard == 0 and member.group.rank == 0:  # in every division rank 0 has shard 0; others may have a copy
            member.buffers.keep()

    # ------------------------------------------------------------------------------------------------- its end

    def _finish(self, attempt: _Attempt) -> None:
        """Wait for the sums, and for all to have them. Raises Interrupted: then others alone may be certain."""
        member, at = self._member, self._member.place.position
        if self._loop.watch.steering() != attempt.steering:
            raise FallowError(_CHANGED.format(step=at.step), Exit.DATA)
        self._loop.meeting.collect_openings(Kind.STEP)
        self._figures.send()
        parts: list[Part] = []

        def tell(sums: Sums) -> Sums:
            # Nobody acts before it has heard this member, whose state and records are complete by then.
            if not member.state_status.complete():
                raise Interrupted(member.group.broken or "the state did not come")
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
            checkpoint=member.saver.wish(member.group.size) if member.saver is not None else 0.0,
            checkpoints_asked=member.session.head_status.checkpoints_asked if member.session is not None else 0,
            pace=member.pace.value,
            weight_checksum=self._loop.watch.weight_checksum(attempt.weight_sample),
            agreement=self._loop.watch.agreement(attempt.steering),
            acts=at.acts,
            sums=sums,
            notes=self._figures.by_shard(),
        )

    def _take(self, outcome: Outcome) -> None:
        """Everybody has the sums: they become gradients, unless they are void."""
        member, at = self._member, self._member.place.position
        generation = member.reduction.sums_of - 1
        if not member.reduction.give_out(outcome.sums):
            # The same shards in the same generation: they are in the ledger already, only their batches are used up.
            member.reduction.drop()
            member.replan()
            member.buffers.restore()
            self._attempt = None
            return
        member.buffers.settle()
        member.state_status.settle()  # others told that they have what they took from here
        at.finish_operation(encode(outcome), generation)
        at.acts = 0
        self._loop.meeting.forget()
        self._loop.meeting.compared_generation = generation
        self.has_sums = True
        self._update.close(self.phase, outcome.means, outcome, generation)
        member.seed_random("behind", at.step, self.phase)

    def _come_together(self) -> None:
        """In a new generation: go on by others' sums, or hand out the shards of its division."""
        member = self._member
        self.in_body = False
        if self._attempt is not None:
            # Now, and once: members compare their state, and what this one receives may not be overwritten.
            member.buffers.restore()
        # Newcomers would do by themselves what the members have done together in this update.
        mid_update, step = self._update.made_joint_call or bool(self._update.phases_done), member.place.position.step
        depends_on_step = self._update.depends_on_step
        result = self._loop.meeting.come_together(
            Kind.STEP, rewind=member.reduction.forget, sums_of=member.reduction.sums_of, bars_newcomers=mid_update
        )
        if result.outcome is not None:
            self._take(decode_outcome(result.outcome))
            return
        # Those who trained on without this member have told of the step that they discarded.
        member.discarded_attempts += self._attempt is not None and not member.place.was_rolled_back
        self._loop.check_place(mid_update=mid_update or depends_on_step)
        at = member.place.position
        if at.step != step:
            self._update.batches.clear()
        self._update.cut = self._source.cut(at.data_epoch, at.index)
        self._attempt = None
