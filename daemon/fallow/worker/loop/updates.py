"""The loop over updates: calls of `run.updates`, and joint calls between them."""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from math import inf
from typing import Any

import torch

from fallow.core.membership.failures import Divergence
from fallow.core.membership.messages import Contract, other_bits
from fallow.model import Exit, FallowError
from fallow.model.bounds import MOST
from fallow.worker.data import rng
from fallow.worker.data.source import Source
from fallow.worker.guards.watch import Watch
from fallow.worker.handover.snapshot import Snapshot
from fallow.worker.loop.exchange import Call, Kind
from fallow.worker.loop.generations import Generations
from fallow.worker.loop.meeting import Meeting, ScriptEndedEarly
from fallow.worker.loop.member import Member
from fallow.worker.loop.update import Update
from fallow.worker.prepared.objects import Prepared, signature_of
from fallow.worker.prepared.signature import signature
from fallow.worker.reduction.buckets import graphs_cut_at_buckets
from fallow.worker.session.session import Session
from fallow.worker.transport.device import asynchronous
from fallow.worker.transport.gloo import reason
from fallow.worker.transport.group import Group
from fallow.worker.transport.waits import Interrupted

_MEETING_S = 300.0
"""Time for which the ranks of a fixed world wait for each other before the first step."""


class Loop:
    """Runs updates over shards, and changes the membership between two updates."""

    def __init__(self, member: Member, on_resize: list[Callable[[], None]]) -> None:
        self.member = member
        self.watch = Watch(member.prepared)
        self.generations = Generations(member, on_resize)
        self.meeting = Meeting(member, self.generations)
        self._catch_up = CatchUp()
        self.update: Update | None = None
        "the current update; None: between two updates"
        self._in_call = False
        "the script is in a run.updates call"
        self._call: int | None = None
        "number of the call on whose end the members have not agreed; None: no such call"
        self.is_rehearsing = False
        self._rehearsed_step = 0
        "the members' step when the rehearsal began, as the head last said"
        self.is_short_loop = False
        "the short loop runs the updates; its gate decides which objects may step"
        self._written_warnings: set[str] = set()
        self._had_strays: dict[int, bool] = {}
        "id of a stepping optimizer -> before its step there were gradients that no inner loop had summed"

    # ------------------------------------------------------------------------------------------------ a call

    def updates(self, source: Source, epochs: int, max_steps: int | None) -> Generator[Update, None, None]:
        """Yield the updates of one `run.updates` call, see `Run.updates`."""
        member, place, session = self.member, self.member.place, self.member.session
        if self._in_call:
            raise FallowError(
                "run.updates inside of another loop over run.updates: loops cannot be nested, nor read side by side "
                "with zip; make one dataset that gives both parts of a batch, write one loop after the other, or give "
                "each part of a step a phase",
                Exit.DATA,
            )
        self.end_call()
        call = place.begin_call()
        if place.members_are_elsewhere(call):
            return
        member.source = source
        source.moved = member.move
        member.move()
        self.watch.begin_call()
        _ = member.reduction  # it raises its errors before this member meets others
        self.meeting.call, self.meeting.compared_generation = self._call_to_compare(source, epochs, max_steps), -1
        is_alone = session is None and member.group.size == 1
        self._in_call = True
        try:
            with nullcontext() if is_alone else graphs_cut_at_buckets():
                if not place.has_joined:
                    if session is not None:
                        if session.head_status.rehearsal_reply.joins:
                            yield from self._rehearse(session.head_status.rehearsal_reply.step)
                        self._announce(session, source, epochs, max_steps)
                    else:
                        _check_fixed_world(member.group, member.prepared)
                    member.last_step_end = time.monotonic()
                    self.meeting.join()
                if place.members_are_past(call):
                    self._settle(call)
                    return  # the members are past this call
                place.begin_call_with_members()
                self._catch_up.put_back()
                self._call = call
                member.replan()  # this source may have missed changes while the script used another one
                yield from self._run(epochs, max_steps)
                self._call = None
        except GeneratorExit:
            # The user's `break`, or an exception on its way through the loop. Nothing waits here: members that leave
            # the call by a break agree on its end at their next operation.
            update = self.update
            if update is not None and update.inner_loop is None and update.phases_done:
                self._close(update)
            raise
        finally:
            self._in_call = False
            member.move(in_loop=False)
            member.seed_random("between", place.position.step)

    def _run(self, epochs: int, max_steps: int | None) -> Generator[Update, None, None]:
        """Yield updates until the call is over, or the members are elsewhere."""
        member, place = self.member, self.member.place
        while True:
            while place.position.passes < epochs and (max_steps is None or place.position.call_steps < max_steps):
                # Siblings see a loss at different times, and code in front of the inner loop may need all of them.
                leaves = self.generations.must_switch and member.group.node.size == 1
                if leaves or self.generations.next_generation or self.generations.needs_meeting:
                    self.meeting.come_together(Kind.STEP)
                if self._goes_elsewhere(self._call):
                    return
                self.update = update = Update(self, rehearsal=False)
                member.seed_random("in front", place.position.step)
                yield update
                self._close(update)
                update._act_on_outcome()
            self.meeting.joint_call(Kind.END)
            if not place.was_rolled_back:
                break
            if self._goes_elsewhere(self._call):
                return
        member.ledger.flush()

    def _goes_elsewhere(self, call: int | None) -> bool:
        """After a rollback, return True if the members are at another place. The script then goes there."""
        is_elsewhere = self.member.place.members_are_elsewhere(call)
        if is_elsewhere:
            self._settle(call)
        return is_elsewhere

    def check_place(self, *, mid_update: bool) -> None:
        """Inside of an update, after a rollback: check that the script can go on here at the members' step.

        Args:
            mid_update: the script has done something in this update that it cannot repeat for another step.

        Raises:
            FallowError: the script cannot go on; a new process can.
        """
        place = self.member.place
        was_rolled_back = place.was_rolled_back
        if place.members_are_elsewhere(self._call) or (was_rolled_back and mid_update):
            raise place.unreachable_error()

    def _close(self, update: Update) -> None:
        """Finish an update, when the script asks for the next one or leaves the loop."""
        self._check_whole(update)
        update._finish()
        self.member.move()
        self.update = None

    def _check_whole(self, update: Update) -> None:
        if update.inner_loop is not None:
            raise FallowError(update.inner_loop.leave(), Exit.DATA)
        if not update.phases_done:
            raise FallowError(
                f"step {update.step}: an update without its inner loop: `for batch in update: ...backward()` in front "
                "of the optimizer's step; neither make a list of run.updates nor of an update",
                Exit.DATA,
            )

    @property
    def step(self) -> int:
        """Number of finished optimizer steps, for the script."""
        self._note_reading()
        return self._rehearsed_step if self.is_rehearsing else self.member.place.position.step

    @property
    def epoch(self) -> int:
        """Epoch of `run.epochs`, else the number of finished passes over the data; for the script."""
        self._note_reading()
        return self.member.place.epoch

    def _note_reading(self) -> None:
        if self.update is not None and not self.update.has_begun:
            self.update.place_was_read = True

    # -------------------------------------------------------------------------------------------------- newcomers

    def _rehearse(self, step: int) -> Generator[Update, None, None]:
        """Yield the update that a newcomer rehearses. Prepared objects are restored afterwards in any case.

        Args:
            step: the members' step, as the head last said.
        """
        member = self.member
        self._rehearsed_step = step
        self.is_rehearsing = True
        self.update = update = Update(self, rehearsal=True)
        try:
            before = Snapshot(member.prepared)
            try:
                with rng.preserve_generators():
                    yield update
            finally:
                before.restore()
                for _, parameter in member.prepared.parameters():
                    parameter.grad = None
                if member.saver is not None:
                    member.saver.is_requested = False
            self._check_whole(update)
        finally:
            self.is_rehearsing, self.update = False, None

    def _announce(self, session: Session, source: Source, epochs: int, max_steps: int | None) -> None:
        """Tell the head that this worker is ready, with the contract that it offers."""
        prepared = self.member.prepared
        ends = [max_steps, None if source.steps is None else source.steps * epochs]
        total = min((end for end in ends if end is not None), default=inf) * self.member.place.epochs_in_loop
        total_steps = int(total) if total <= MOST else None
        self.member.progress.tell(total_steps=total_steps)
        layout = prepared.layout()
        session.announce(
            Contract(
                signature=signature_of(layout),
                layout=tuple(layout),
                arithmetic=tuple(signature(prepared.devices())) if prepared.reproducible else (),
                shards=source.shards,
                global_batch=source.global_batch,
                total_steps=total_steps,
            ),
            prepared.device,
        )

    def _settle(self, call: int | None) -> None:
        """Keep the received state while the script goes to the members' place: the members are past this call."""
        self.generations.report_arrival()
        while not self.meeting.settle():
            self.meeting.join()
        if self.member.place.ends_call_with_members(call):
            self._catch_up.put_back()
        elif not self.member.place.in_sync:
            self._catch_up.keep(self.member.prepared)

    def _call_to_compare(self, source: Source, epochs: int, max_steps: int | None) -> Call:
        # Members send whole numbers, and a limit may be `math.inf`. The script may have left the loop over epochs, too,
        # when it reports that it has left the call.
        mark = self.member.place.mark
        loop, epoch = (mark.loop, mark.epoch) if mark.inside else (-1, -1)
        most = -1 if max_steps is None else int(min(max_steps, MOST))
        return Call(source.shards, source.batch_size, source.samples, int(min(epochs, MOST)), most, loop, epoch)

    # ------------------------------------------------------------------------------------------ between the calls

    def end_call(self, *, script: bool = False) -> None:
        """Agree on the end of a call that the script has left by a break. Call before the next operation.

        Args:
            script: the script ends, too.

        Raises:
            FallowError: the other members go on in the call.
            ScriptEndedEarly: the other members go on in the call, and `script` is true.
        """
        place = self.member.place
        if self._call is not None and not self._in_call:
            update = self.update
            if update is not None and update.inner_loop is not None:
                text = update.inner_loop.leave()
                if script:  # by `sys.exit`, say, whose code must not become another one
                    sys.stderr.write(f"fallow: {text}\n")
                    raise ScriptEndedEarly
                if sys.exc_info()[0] is None:
                    raise Divergence(text)
                if update.inner_loop.has_begun:  # the others may be waiting for its sums
                    raise FallowError(text, Exit.DATA)  # not `Divergence`: this node may be to blame
            self.update = self._call = None
            self.meeting.joint_call(Kind.END, has_ended=script)
            self._goes_elsewhere(None)
        if not self._in_call:
            place.finish_left_loop()

    def tell(self, text: str) -> None:
        """Write a text with the step to standard error, on rank 0."""
        if self.member.group.rank == 0:
            sys.stderr.write(text.format(step=self.member.place.position.step))

    def tell_once(self, text: str) -> None:
        """Like `tell`, but nothing the second time."""
        if text not in self._written_warnings:
            self.tell(text)
        self._written_warnings.add(text)

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that a prepared optimizer may step now.

        Raises:
            FallowError: the gradients are not complete.
        """
        update = self.update
        if update is None:
            return
        if not self.is_rehearsing:
            self.member.place.position.acts += 1
        if self.is_short_loop:
            return
        if update.inner_loop is not None:
            if not update.inner_loop.has_begun or not update.inner_loop.in_body:
                raise FallowError(update.inner_loop.leave(), Exit.DATA)
            raise FallowError(
                f"step {update.step}: an optimizer's step inside the inner loop, or after a break from it: gradients "
                "are complete when the inner loop has ended; step the optimizer after it",
                Exit.DATA,
            )
        if not update.phases_done:
            raise FallowError(
                f"step {update.step}: an optimizer's step in front of the inner loop: there are no gradients yet",
                Exit.DATA,
            )
        self._had_strays[id(optimizer)] = self._has_strays(update)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After an optimizer's step: accept the gradients that its closure has made.

        Raises:
            FallowError: the closure's gradients are the only ones of this step.
        """
        if self.update is not None and not self._had_strays.pop(id(optimizer), True) and self._has_strays(self.update):
            self.member.reduction.accept_gradients()

    def _has_strays(self, update: Update) -> bool:
        """Return True if there are gradients that no inner loop has summed."""
        reduction = self.member.reduction
        has_strays = reduction.has_stray_gradients()
        if reduction.has_no_gradients and has_strays:
            raise FallowError(
                f"step {update.step}: no shard made a backward inside the inner loop, and a backward after it "
                "trains this member alone: `for batch in update: loss_fn(model(batch)).backward()`; neither make a "
                "list of an update nor keep its batches for later",
                Exit.DATA,
            )
        return has_strays

    def joint_call(self, kind: Kind, value: float) -> float:
        """Return the mean of the members' values. Legal between inner loops, and outside of all calls."""
        if self.is_rehearsing:
            return value
        if self._in_call:
            if self.update is not None and self.update.inner_loop is not None:
                raise FallowError(
                    f"run.{kind.name.lower()} inside the inner loop: write update.note(x=...) there and "
                    "update.mean('x') after it",
                    Exit.DATA,
                )
            if self.update is not None:
                self.update.made_joint_call = True
            answer = self.meeting.joint_call(kind, value)
            self.check_place(mid_update=True)
            return answer
        self.end_call()
        if not self.member.place.in_sync:
            return value
        answer = self.meeting.joint_call(kind, value)
        self._goes_elsewhere(None)
        return answer


class CatchUp:
    """The received state of prepared objects, kept while the script goes to the members' place.

    On its way the script runs the lines between two `run.updates` calls, which the members have run before. A line may
    step a scheduler, set a learning rate, freeze a layer, call eval(), change weights by hand or the statistics of a
    BatchNorm by a forward, clear an optimizer's state or restart a moving average. The received state contains all
    these changes already. So it is restored when the script reaches the members' place.
    """

    def __init__(self) -> None:
        self._state: Snapshot | None = None
        "the received state; None: nothing is kept"
        self._optimizers: list[torch.optim.Optimizer] = []
        "optimizers that add no groups meanwhile: the received state has the members' groups already"

    def keep(self, prepared: Prepared) -> None:
        """Keep the prepared objects' present state, unless a state is kept already."""
        if self._state is None:
            self._state = Snapshot(prepared)
            self._optimizers = list(prepared.optimizers)
            for optimizer in self._optimizers:
                setattr(optimizer, "add_param_group", _added_already)  # noqa: B010  # mypy forbids assigning to a method

    def put_back(self) -> None:
        """Restore the kept state. Call at the members' place, or before members compare their state."""
        state, self._state = self._state, None
        if state is not None:
            for optimizer in self._optimizers:
                delattr(optimizer, "add_param_group")
            state.restore()


def _added_already(*args: Any, **kwargs: Any) -> None:
    """Replaces `Optimizer.add_param_group`."""


def _check_fixed_world(group: Group, prepared: Prepared) -> None:
    """Check the connections and devices of a fixed world's ranks; in a reproducible world also their arithmetic.

    The world was built before the script chose its device, so the device's transport is made here.
    """
    device = prepared.device
    own = [device.type, *(signature(prepared.devices()) if prepared.reproducible else ())]
    try:
        first, *signatures = [text.decode().splitlines() for text in group.gather("\n".join(own).encode())]
        for rank, other in enumerate(signatures, start=1):
            if other[0] != first[0]:
                raise FallowError(
                    f"rank {rank} trains on a device of type {other[0]}, rank 0 on {first[0]}: move the model to the "
                    "same type of device on all ranks before run.prepare",
                    Exit.DATA,
                )
            problem = other_bits(first[1:], other[1:])
            if problem is not None:
                raise FallowError(f"rank {rank} does not fit to rank 0: {problem}", Exit.DATA)
        if asynchronous(device):
            group.connect_transport(device, _MEETING_S)
    except Interrupted as error:
        raise FallowError(
            f"the first exchange between the ranks failed: {error}; see the other ranks' output"
        ) from None
    except RuntimeError as error:
        raise FallowError(
            f"rank {group.rank} of {group.size}: {reason(error)}; see the other ranks' output", Exit.UNAVAILABLE
        ) from None
