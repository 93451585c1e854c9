"""One step: a body per shard of this member, the last of them final."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fallow.core.shards import Cut, lone
from fallow.model import Exit, FallowError
from fallow.worker.data import rng
from fallow.worker.data.ledger import Done, Fed
from fallow.worker.data.source import Key, Source
from fallow.worker.data.stream_loader import copied
from fallow.worker.guards.watch import Watch
from fallow.worker.handover import extra_state
from fallow.worker.loop.means import Means
from fallow.worker.loop.member import Member
from fallow.worker.loop.phases import Phases
from fallow.worker.reduction.control import Cutting, StepPlan, check_cuts
from fallow.worker.transport.group import Interrupted

_MOST = 1 << 62
"""Epochs or steps of a call beyond this, as `math.inf` is, are told as this: members send whole numbers."""


class Step:
    """Runs steps, and knows of the body at work.

    Args:
        member: this worker.
        on_batch: called when a body's batch is here, before the body.
    """

    def __init__(self, member: Member, on_batch: Callable[[], None]) -> None:
        self._member = member
        self._on_batch = on_batch
        self.final_shard = False
        self.rehearsing = False
        self.left_void = False
        "the script has left the loop in a body without gradients"
        self.left_amid = False
        "it has left it behind the first backward, body or phase of a step on this member, and before that was complete"
        self.left_whole = False
        "it has left it behind a whole step, of which `Turn.take` has not heard"
        self.trained: bool | None = None
        "a step of the call has had a gradient; None: there was no step"
        self.shards = 1
        "shards in a full step"
        self.shard = 0
        self.weight = 0.0
        self.means = Means()
        self.watch = Watch(member.prepared, member.gate, elastic=member.session is not None)
        self._examples: dict[int, Any] = {}
        "phase -> the last batch with which a body came to a backward"
        self.phases = Phases(member.gate, member.seed_random)
        self._batches: dict[int, Any] = {}
        "shard -> its batch, as long as another phase of the step needs it"
        self._fed: tuple[int, int] | None = None
        "(generation, step) whose samples are in the ledger"
        self._met: tuple[int, int] | None = None
        "(generation, run.steps call) in which the members have compared how they cut a step"
        self._call = 1, -1, -1, -1
        "of the call: epochs, steps, and the run.epochs loop and epoch that it began in, see `Cutting`"
        self._backwards = 0
        "in the body at work"
        self._bodies = 0
        "of the step, or of its phase, that are over"
        self._before: list[torch.Tensor] = []
        "the buffers, when the step or its phase began"
        self._began = 0.0
        self._speed = 0.0

    def begin_call(self, epochs: int = 1, max_steps: int | None = None) -> None:
        """A run.steps call begins."""
        most = -1 if max_steps is None else int(min(max_steps, _MOST))
        # The script may have left the loop over epochs, too, when it tells that it has left the call.
        self._call = int(min(epochs, _MOST)), most, *(self._member.place.epoch_entered or (-1, -1))
        self.left_void = self.left_amid = self.left_whole = False
        self.trained = None
        self._examples.clear()
        self._batches.clear()
        self._fed = None
        self.watch.begin_call()

    def run(self, loader: Source) -> Iterator[Any]:
        """The bodies of one step, or of one of its phases; it is finished and counted, or void if the group broke."""
        member, reducer, gate = self._member, self._member.reducer, self._member.gate
        at = member.place.position
        try:
            self._meet(loader)
        except Interrupted:
            reducer.interrupted = True
            return
        if at.phase == 0:
            self._began = time.monotonic()
        cut = loader.cut(at.data_epoch, at.index)
        samples, shards, crcs = cut.samples, len(cut.sizes), cut.crcs
        keys = [Key(at.data_epoch, at.index, shard) for shard in range(shards)]
        mine = member.duties(shards)
        pace, generation = member.pace, member.group.generation
        pace.begin_phase(member.group, first=at.phase == 0)
        alone = lone(loader.shards, member.group.size, cut.sizes)
        most = member.most(loader.shards)
        reducer.begin_step(StepPlan(at.step, samples, sum(crcs), loader.shards, at.phase, alone, most))
        self.watch.begin_step(at.step)
        self._bodies = 0
        # In its first step a newcomer's optimizers may still be under way.
        settled = self._fed is not None and self._fed[0] == generation
        reducer.agreement = self.watch.agreement(at.step, settled=settled)
        reducer.piece = self.watch.piece(at.step)
        self.means.begin_step()
        self.shards = loader.shards
        gate.single = shards == 1
        self._before = before = member.buffers()
        feeding = self._fed != (generation, at.step)
        if feeding:
            self._batches.clear()  # of another step, or of another generation's share of this one
        self._fed = generation, at.step
        for number, (shard, counts) in enumerate(mine):
            if number:
                member.restore(before)
            size = cut.sizes[shard]
            pace.begin_body(whole=size == loader.batch_size)
            batch = self._batch(loader, keys[shard])
            if counts:
                reducer.samples += size
                reducer.crc += crcs[shard]
            if counts and feeding:
                member.ledger.add(
                    Fed(
                        generation=generation,
                        epoch=at.data_epoch,
                        step=at.step,
                        shard=shard,
                        n=size,
                        total=samples,
                        crc=crcs[shard],
                    )
                )
            self.weight = size / samples if counts else 0.0
            self.final_shard = number == len(mine) - 1
            yield from self._body(batch, shard, cut)
            member.move()
            if not reducer.rounds:
                pace.lap()
            if member.group.broken is not None and not self.final_shard:
                reducer.interrupted = True
                break
            if shard == 0 and not reducer.buffers.kept and (not self.final_shard or not reducer.rounds):
                reducer.buffers.keep(member.buffers())
        else:
            missing = not reducer.rounds and not reducer.interrupted
            if missing and at.phase in self._examples and member.group.broken is None:
                # The others go on after their backward, with clipping, schedulers and the like: so must this member.
                # A body that counts nothing does that, over a batch that is known to come to a backward.
                member.restore(before)
                self.weight = 0.0
                yield from self._body(self._examples[at.phase], mine[-1].shard, cut)
            if missing and not reducer.rounds:
                self._reduce_without_backward()
        gate.in_body = False
        gate.open = True
        if reducer.rounds and not reducer.interrupted:
            self.watch.end_step(self._touched)
            self._finish(cut)
            return
        if reducer.again:
            # The same shards in the same generation: they are in the ledger already, only their batches are used up.
            self._batches.clear()
            loader.replan(keys[0], member.shards)
        else:
            self._fed = None
            member.discarded += 1
            member.ledger.drop_fed()
        member.prepared.modes.undo()
        member.restore(before)
        member.drop_gradients()

    def _body(self, batch: Any, shard: int, cut: Cut) -> Iterator[Any]:
        """One body over one shard, which weighs `self.weight`."""
        member, reducer, gate = self._member, self._member.reducer, self._member.gate
        at = member.place.position
        self.shard = shard
        self._backwards = 0
        member.prepared.scaling.begin_body()
        member.seed_random("body", at.step, shard)
        reducer.begin_body(shard, self.weight, final=self.final_shard, live=True)
        gate.open, gate.in_body, gate.stepped, gate.acted, gate.called = False, True, False, False, False
        gate.trained = gate.handmade = False
        self.phases.begin_body(at, shard)
        self.watch.begin_body(void=not self.final_shard)
        self.means.begin_body()
        self._on_batch()
        member.move()
        member.pace.restart()
        try:
            yield batch
        except GeneratorExit:
            # The user's `break`; or an exception of the body, and then there may be backwards that were not made.
            self.left_void = not self.final_shard or reducer.interrupted
            begun = self._backwards > 0 or self._bodies > 0 or at.phase > 0
            last = self.final_shard and at.phase + 1 >= len(self.phases.asked if at.phases is None else at.phases)
            self.left_amid = begun and not last
            told, whole = reducer.control, reducer.rounds and not reducer.interrupted and gate.refusal is None
            if last and whole and told is not None and not told.head.more:
                self._finish(cut)
                self.left_whole = True
            elif gate.refusal is None:  # which may be for what has become of a buffer
                member.restore(self._before)
            raise
        self.watch.end_body(void=not self.final_shard, trained=self._backwards > 0)
        self.phases.end_body()
        if self.weight and not self.final_shard:
            self.means.end_body(shard, trained=self._backwards > 0)
        if self._backwards:
            self._examples[at.phase] = batch
        self._bodies += 1

    @property
    def trains(self) -> bool:
        """Bodies of this loop, or of its phase at work, have come to a backward."""
        return self._member.place.position.phase in self._examples

    def void(self) -> None:
        """The group broke in this body before anything acted: the step is done again."""
        self._member.reducer.interrupted = True
        self._member.gate.open = False
        self._member.drop_gradients()

    def leave(self, loader: Source, *, ended: bool) -> None:
        """The script has left the loop by itself: tell those who may go on, in the exchange in which they would wait.

        Args:
            ended: it is over.

        Raises:
            EndedAlone: it is over, and some members go on.
            FallowError: some members go on.
            Interrupted: the group broke.
        """
        member, reducer = self._member, self._member.reducer
        at = member.place.position
        self._meet(loader)
        alone = lone(loader.shards, member.group.size)
        most = member.most(loader.shards)
        reducer.begin_step(StepPlan(at.step, 0, 0, loader.shards, at.phase, alone, most))
        reducer.left, reducer.ended = True, ended
        try:
            reducer.begin_body(0, 0.0, final=True, live=True)
            reducer.before_backward()
            reducer.finish_round()
        finally:
            reducer.left = reducer.ended = False
        if reducer.interrupted:
            raise Interrupted(member.group.broken or "the group broke")

    def _meet(self, loader: Source) -> None:
        """Before the first step of a call: do all members cut it alike? gloo ends a process over sums of unlike sizes.

        And before the first step with newcomers, of whom the head knows the loader of their first call only.

        Raises:
            Apart: they do not.
            Stranger: this member, a newcomer, does not.
            Interrupted: the group broke, or a newcomer does not.
        """
        group, place = self._member.group, self._member.place
        at = place.position
        if self._met == (group.generation, at.call) or (at.call_steps and not at.call):
            return
        cuts = group.all_gather(torch.tensor(Cutting(loader.shards, loader.batch_size, place.since, *self._call)))
        group.wait()
        refused = check_cuts([Cutting(*(int(value) for value in row)) for row in cuts], group.rank)
        if refused:
            group.interrupt(refused)
            raise Interrupted(refused)
        self._met = group.generation, at.call

    def _touched(self) -> list[bool]:
        control = self._member.reducer.control
        return control.touched if control is not None else []

    def rehearse(self, loader: Source) -> Iterator[Any]:
        """One body with a real batch whose results are thrown away: compiles, starts loader processes."""
        member, gate = self._member, self._member.gate
        before, extra = member.buffers(), extra_state.pack(extra_state.read(member.prepared.modules))
        at = member.place.position
        with rng.kept():
            batch = loader.example(member.reached)
            member.seed_random("body", 0, 0)
            member.reducer.begin_body(0, 0.0, final=True, live=False)
            gate.open, gate.in_body, gate.stepped, gate.called = False, True, False, False
            gate.single = loader.shards == 1
            self.phases.begin_body(at, 0, rehearsal=True)
            self.watch.begin_body(void=True, rehearsal=True)
            others = self.watch.others()
            self.rehearsing = True
            try:
                yield batch
            except GeneratorExit:
                self.left_void = True
                raise
            finally:
                self.rehearsing = False
                gate.in_body = False
            del batch
            member.prepared.order = member.reducer.take_order() or []
            self.watch.end_body(void=True, trained=False)
            self.watch.check_others(others)
            self.phases.end_body()
        member.restore(before)
        extra_state.write(member.prepared.modules, extra_state.unpack(extra))
        member.drop_gradients()
        if member.saver is not None:
            member.saver.asked = False

    def _batch(self, loader: Source, key: Key) -> Any:
        """The shard's batch; where another phase comes, the body gets a copy of its own to work on."""
        at = self._member.place.position
        batch = self._batches.pop(key.shard, None)
        if batch is None:
            batch = loader.fetch(key, self._member.shards)
            self._member.pace.loaded(loader.load_s, loader.source.num_workers)
        if at.phases is not None and at.phase + 1 >= len(at.phases):
            return batch
        self._batches[key.shard] = batch
        return copied(batch)

    def _finish(self, cut: Cut) -> None:
        member = self._member
        member.reducer.finish_step()
        self.trained = bool(self.trained) or member.reducer.used
        at = member.place.position
        member.boundary = time.monotonic()
        if not at.finish_phase(member.reducer.loss):
            return
        self._batches.clear()
        member.pace.finish_step()
        member.reducer.pace = member.pace.value
        member.ledger.add(Done(generation=member.group.generation, step=at.step))
        at.finish_step(cut.samples, last=cut.last)
        took = member.boundary - self._began
        now = cut.samples / took
        self._speed = now if not self._speed else 0.9 * self._speed + 0.1 * now
        if member.session is not None:
            progress = member.session.progress
            progress.step, progress.loss, progress.samples_per_s = at.step, at.loss, self._speed
            progress.pace_s = member.pace.value
            progress.epoch = member.place.epoch
            progress.reached = at.data_epoch, at.index

    def _reduce_without_backward(self) -> None:
        """The final body ended without a backward: contribute what there is, and do the step that others do."""
        reducer, prepared = self._member.reducer, self._member.prepared
        reducer.skipped = True
        reducer.before_backward()
        self._member.standing.complete()
        reducer.finish_round()
        while not reducer.interrupted and reducer.control is not None and reducer.control.head.more:
            reducer.next_backward()
            reducer.before_backward()
            reducer.finish_round()
        if reducer.interrupted:
            return
        if not reducer.used:
            if self._member.gate.handmade:
                raise FallowError(
                    f"step {self._member.place.position.step}: an optimizer's step on gradients that no backward() "
                    "of this step has made: they are not shared among the members, and nothing was trained; call "
                    "loss.backward(), or "
                    "`sum((p * g.detach()).sum() for p, g in zip(parameters, gradients)).backward()`",
                    Exit.DATA,
                )
            return
        if reducer.control is not None and reducer.control.head.skipped < self._member.group.size:
            raise FallowError(
                f"step {self._member.place.position.step}: this member's last body made no backward while others did, "
                "so it cannot do what they do after theirs; where a batch is left out, write "
                "`(0 * model(batch).sum()).backward()` instead of `continue`",
                Exit.DATA,
            )
        self._member.gate.open = True
        prepared.scaling.step_all(prepared.optimizers)

    def before_backward(self, root: Any) -> None:
        """An outermost backward begins on `root`."""
        gate = self._member.gate
        if not gate.in_body:
            return
        if gate.stepped:
            raise gate.refuse(
                "a backward after an optimizer's step in the same body would see other weights on a member with one "
                "shard than on one with several; put each part with a step of its own under `if run.phase(name):`, "
                "or write one run.steps loop per phase, or step once at the end"
            )
        self.watch.check_buffers()
        if gate.called:
            raise gate.refuse(
                "a prepared object's step, update, update_parameters or unscale_ before a backward of the same body "
                "would act never, or between two backwards a second time if the step is done again: call it after the "
                "last backward of the body"
            )
        reducer, modes = self._member.reducer, self._member.prepared.modes
        modes.see()
        if not self._backwards:
            self.watch.before_backward()
        if self.final_shard and not self._backwards:
            reducer.frozen, reducer.resting = modes.frozen(), modes.resting()
            self._member.ledger.begin_flush()
            if self.watch.wrote():
                # From here on the weights are sent to newcomers only while nobody computes.
                self._member.standing.whole = True
        elif self.final_shard and not gate.single and self.watch.wrote_again():
            raise gate.refuse(
                "weights were changed by hand between two backwards of a body, as in sharpness-aware minimization: the "
                "bodies before a member's last one have no gradients to do it by, and their second backward would see "
                "other weights; put each part under `if run.phase(name):`, and what changes weights behind the "
                "backward, under `if run.final_shard:`"
            )
        self.phases.before_backward()
        gate.in_backward = gate.trained = True
        self._backwards += 1
        reducer.before_backward()
        if isinstance(root, torch.Tensor) and root.numel() == 1:
            reducer.add_loss(*self._member.prepared.scaling.unscaled(root))

    def after_backward(self) -> None:
        """An outermost backward has returned."""
        gate, reducer = self._member.gate, self._member.reducer
        gate.in_backward = False
        if not gate.in_body:
            return
        # The losses' values are waited for here, so an accelerator's work on them is done, too.
        reducer.read_losses()
        self._member.pace.lap()
        try:
            if self.final_shard:
                # Others' optimizers act once this member has taken part, and they hand their state over until then. If
                # it does not come the group is broken, and the reduction says so.
                self._member.standing.complete()
            reducer.after_backward()
        except FallowError as error:
            gate.refusal = error
            raise
        if self.shard == 0 and not (self.final_shard or self.rehearsing):
            # What the body does to them later, another one would do on a member where this is the final body.
            reducer.buffers.keep(self._member.buffers())
        self._member.pace.restart()
        gate.open = self.final_shard and reducer.rounds > 0 and not reducer.interrupted

    def backward_failed(self, error: BaseException) -> None:
        """A backward has raised: the body must not go on, for a part of its gradients is counted already."""
        gate = self._member.gate
        gate.in_backward = False
        if not gate.in_body:
            return
        if isinstance(error, FallowError):
            gate.refusal = error
        else:
            gate.refuse(
                f"a backward ended with {type(error).__name__} ({error}) and the body went on, though a part of its "
                "gradients is counted already: do not catch exceptions of backward inside a run.steps loop"
            )
