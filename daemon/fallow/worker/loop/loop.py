"""The loop: calls of `run.steps`, made of rehearsal, steps and turns."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import nullcontext
from typing import Any

from fallow.core.failures import Apart
from fallow.model import Exit, FallowError, WorkerReady
from fallow.model.bounds import MOST
from fallow.worker.data.source import Source
from fallow.worker.guards.additions import additions_seen
from fallow.worker.guards.clipping import nothing_may_be_clipped
from fallow.worker.guards.unprepared import acting_seen
from fallow.worker.loop.member import Member
from fallow.worker.loop.step import Step
from fallow.worker.loop.together import Kind
from fallow.worker.loop.together import ask as ask_all
from fallow.worker.loop.turn import Turn
from fallow.worker.prepared.objects import signature_of
from fallow.worker.prepared.signature import signature
from fallow.worker.reduction.capture import backward_seen
from fallow.worker.reduction.compiled import graphs_cut_at_buckets
from fallow.worker.reduction.reducer import EndedAlone

_AMID = (
    "step {step}: the run.steps loop was left in the middle of a step (break, return, itertools.islice, or an "
    "exception that the script caught), which is then lost, and with other members another one would be: leave it "
    "under `if run.final_shard:`, behind its last run.phase, or in front of the backward by run.step; for a number of "
    "steps give run.steps max_steps"
)


class Loop:
    """Drives bodies over shards and changes generations between steps."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._turn = Turn(member)
        self.step = Step(member, self._turn.report_arrival)
        self._open: Source | None = None
        "loader of the call whose end the members have not agreed on"
        self.left = False
        "the script has left it by itself"

    def steps(self, loader: Source, epochs: int, max_steps: int | None) -> Generator[Any, None, None]:
        """Bodies of one `run.steps` call, see `Run.steps`."""
        member, place, gate, step = self._member, self._member.place, self._member.gate, self.step
        if gate.in_body:
            raise gate.refuse(
                "run.steps inside the body of another run.steps loop: loops cannot be nested, nor read side by side "
                "with zip; make one dataset that gives both parts of a batch, or write one loop after the other"
            )
        self.end_call()
        call = place.begin_call()
        if place.elsewhere(call):
            return
        member.loader = loader
        loader.moved = member.move
        member.move()
        alone = member.session is None and member.group.size == 1
        overlap = nullcontext() if alone else graphs_cut_at_buckets()
        seen = backward_seen(step.before_backward, step.after_backward, step.backward_failed)
        gate.untrained = False
        acting, growing = acting_seen(step.watch.acts), additions_seen(step.watch.adds)
        with seen, overlap, nothing_may_be_clipped(), acting, growing:
            try:
                step.begin_call(epochs, max_steps)
                if not place.joined:
                    if member.session is not None:
                        yield from step.rehearse(loader)
                        self._announce(loader, epochs, max_steps)
                    self._turn.join()
                    if member.session is not None:
                        call = place.meet(call)
                if place.behind(call):
                    self._turn.settle()
                    return  # the members are past this call
                place.begin_call_with_members()
                member.catch_up.put_back(member.prepared)
                self._open = loader
                member.replan()  # this loader may have missed changes while another one was at work
                while True:
                    while self._wants_more(epochs, max_steps):
                        yield from step.run(loader)
                        self._turn.take()
                        if place.elsewhere(call):
                            self._turn.settle()
                            self._open = None
                            return
                    if self._agree_on_end():
                        break
                    if place.elsewhere(call):
                        self._turn.settle()
                        self._open = None
                        return
                member.ledger.flush()
                gate.untrained = step.trained is False
            except GeneratorExit:
                # The user's `break`, or an exception on its way through the loop. Nothing is waited for here: those
                # who come to the end of the call by it agree on that when they do the next thing together.
                if self._open is not None:
                    self.left = place.position.left = True
                raise
            finally:
                member.rest()
                member.ledger.drop_fed()  # of a step that has not come to its reduction: the next call does it
                member.move(in_loop=False)
                step.final_shard = False
                step.watch.end_call()
                gate.in_body = gate.in_backward = gate.stepped = False
                gate.open = place.in_sync and not place.wrong_epoch
                member.seed_random("between", place.position.step)

    def _wants_more(self, epochs: int, max_steps: int | None) -> bool:
        at = self._member.place.position
        return not at.left and at.passes < epochs and (max_steps is None or at.call_steps < max_steps)

    def _agree_on_end(self, *, script: bool = False) -> bool:
        """All members are at the end of the call; False: they went back to a checkpoint instead."""
        loader, place = self._open, self._member.place
        assert loader is not None

        def ask() -> float:
            if not place.position.left:
                return ask_all(self._member.group, Kind.END, 0.0)
            # The others may be in the next step, and learn it there.
            self.step.leave(loader, ended=script)
            return 0.0

        if not self._turn.agree(Kind.END, 0.0, ask):
            return False
        place.position.finish_call(place.agreed)
        self._open = None
        return True

    def end_call(self, *, script: bool = False) -> None:
        """Agree on the end of a call that the script has left by itself, before anything else is done together.

        Args:
            script: it is the script's end, too.

        Raises:
            FallowError: the others go on in it.
            EndedAlone: so they do, and it is the script's end.
        """
        if self._open is not None and not self._member.gate.in_body:
            self.left = False
            group = self._member.group
            if group.pending and group.broken is None:
                # In the middle of an exchange: the next one would be taken for its end.
                if script:
                    raise EndedAlone
                raise FallowError(
                    f"step {self._member.place.position.step}: an exception left the step in the middle of its "
                    "reduction, where the other members wait for this one; catch it inside of the body, or let it end "
                    "the script",
                    Exit.DATA,
                )
            if self.step.left_amid and sys.exc_info()[0] is None:  # else that is what the script ends by
                self._left_amid(script)
            if self.step.left_whole:
                self.step.left_whole = False
                self._turn.take_left()
            self._member.place.position.left = True
            self._agree_on_end(script=script)
            self._open = None
            self._went_back()
        if not self._member.gate.in_body:
            self._member.place.finish_left_loop()

    def _left_amid(self, script: bool) -> None:
        text = _AMID.format(step=self._member.place.position.step)
        if not script:
            raise Apart(text)
        # By a break or by `sys.exit`, whose code must not become another one.
        sys.stderr.write(f"fallow: {text}\n")

    def together(self, kind: Kind, value: float) -> float:
        """The mean of the members' values, outside of `run.steps`."""
        self.end_call()
        place = self._member.place
        if place.begin_asking():
            self._member.catch_up.put_back(self._member.prepared)
            self._member.gate.open = True
            if place.answered:
                return place.answer
        if place.in_sync and self._turn.agree(kind, value, lambda: ask_all(self._member.group, kind, value)):
            return place.answer
        self._went_back()
        return value

    def _went_back(self) -> None:
        """Behind a call: if the members went back to a checkpoint, the script comes to it as a newcomer's does."""
        if self._member.place.elsewhere(None):
            self._turn.settle()
            self._member.gate.open = False

    def _announce(self, loader: Source, epochs: int, max_steps: int | None) -> None:
        """Rehearsed: tell the head, with a signature of the state."""
        session = self._member.session
        assert session is not None
        ends = [max_steps, None if loader.steps is None else loader.steps * epochs]
        total = min((end for end in ends if end is not None), default=None)
        if total is not None:
            total *= self._member.place.epochs_in_loop
            total = total if total <= MOST else None
        session.progress.total_steps = total
        prepared = self._member.prepared
        layout = prepared.layout()
        if self.step.phases.asked:
            layout.append(f"phases {', '.join(self.step.phases.asked)}")
        session.announce(
            WorkerReady(
                worker=session.worker,
                signature=signature_of(layout),
                layout=layout,
                arithmetic=signature(prepared.devices()) if prepared.reproducible else [],
                shards=loader.shards,
                global_batch=loader.global_batch,
                total_steps=total,
            )
        )
