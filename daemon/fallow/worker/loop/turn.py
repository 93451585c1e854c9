"""Turns: what happens between two steps, where alone the membership changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec
import torch

from fallow.core.shares import Division
from fallow.model import Active, Aligned, CheckpointDamaged, FallowError, Left, Parts, Prepare
from fallow.worker.api.fixed import check_arithmetic
from fallow.worker.checkpoint.restore import load_newest
from fallow.worker.data.ledger import LEAVING_S, Start
from fallow.worker.handover.align import EVERY, align, source
from fallow.worker.handover.intake import Intake
from fallow.worker.handover.standing import FRESH
from fallow.worker.handover.switch import exchange
from fallow.worker.loop.member import Member
from fallow.worker.loop.together import Asking, Kind, told
from fallow.worker.prepared.signature import signature
from fallow.worker.session.session import Answered, OthersEnded
from fallow.worker.transport.group import Group, Interrupted
from fallow.worker.transport.upcoming import Upcoming

_ALONE = Prepare(term=0, generation=0, replaces=0, members=[], interrupt=False, timeout_s=0.0)
"A fixed world's only generation."

_DRIFTED = (
    "fallow: generation {generation}: this member's weights were not those of the others at step {step}; they were "
    "replaced. Does this node compute differently, or does the script change weights by hand?\n"
)


class SwitchedOut(Exception):
    """This worker is not in the new generation. Turned into `fallow.Released` by the public API."""


class Turn:
    """Checkpoints and changes of the generation of one member."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._arrival: _Arrival | None = None
        self._align_from = 0
        "no alignment before this step: the same on all members"
        self._aligned_in = -1
        "generation in which this member has told that it was aligned"

    def take(self) -> None:
        """Between two steps: write a checkpoint, change the generation, or neither."""
        member, reducer = self._member, self._member.reducer
        finished = self._finished()
        if finished and reducer.checkpoint and member.saver is not None:
            member.saver.save(member.group, member.prepared, member.place.position)
            if member.saver.leaves_alone:
                member.saver.finish()
                self._depart()
        planned = self._planned()
        if planned or member.group.broken is not None:
            self._switch(planned)
        elif finished and not self._even_out():
            self._switch(planned=False)

    def take_left(self) -> None:
        """The script has left the loop behind a whole step: keep up with members that have not.

        Neither checkpoint nor change of the generation: the script may have changed the state since.
        """
        if self._finished() and not self._planned() and self._member.group.broken is None:
            self._even_out()

    def _finished(self) -> bool:
        """A whole step is behind this member, which all have finished alike."""
        member, reducer = self._member, self._member.reducer
        stands = reducer.control is not None and not reducer.interrupted and not member.place.doubtful
        return stands and member.place.position.phase == 0

    def _planned(self) -> bool:
        """All members have told in that step that they change the generation behind it."""
        return self._finished() and self._member.reducer.switch == self._member.group.size

    def _even_out(self) -> bool:
        """What the members do with each other behind each step; False: the group broke before it was done."""
        reducer = self._member.reducer
        control = reducer.control
        if reducer.drift and control is not None and control.drifted and not self._align(control.pieces):
            return False
        self._divide()
        return self._lay_out()

    def join(self) -> None:
        """Take part in the first generation of this worker."""
        member = self._member
        if member.session is not None:
            member.boundary = time.monotonic()
            self._switch(planned=True)
            return
        prepared, _ = member.prepared, member.reducer  # which has chosen the kernels that the signature tells
        try:
            check_arithmetic(member.group, signature(prepared.devices()) if prepared.reproducible else [])
            self._enter(member.group, _ALONE, Parts())
        except Interrupted as error:
            raise FallowError(
                f"the first exchange between the ranks failed: {error}; see the other ranks' output"
            ) from None

    def _align(self, pieces: list[int]) -> bool:
        """Bring members together whose weights differ, now and then; False: the group broke before it was done.

        Args:
            pieces: checksums of their weights, by rank.
        """
        member = self._member
        group, step = member.group, member.place.position.step
        if step < self._align_from:
            return True
        root = source(pieces)
        try:
            align(group, member.prepared, root)
        except Interrupted:
            return False
        self._align_from = step + EVERY
        if pieces[group.rank] != pieces[root] and self._aligned_in != group.generation:
            self._aligned_in = group.generation
            sys.stderr.write(_DRIFTED.format(generation=group.generation, step=step))
            if member.session is not None:
                member.session.send(Aligned(worker=member.session.worker, generation=group.generation, step=step))
        return True

    def _divide(self) -> None:
        """Divide the shards anew if the members' paces, which all have just been told, make it worth while."""
        member, control = self._member, self._member.reducer.control
        assert member.loader is not None
        assert control is not None
        old = member.division
        member.division = old.revised(member.loader.shards, control.paces, member.place.position.step)
        if member.division is not old:
            member.replan()

    def _lay_out(self) -> bool:
        """After the first step of a fixed world, which has no rehearsal: gradients come as on the first rank."""
        group, reducer = self._member.group, self._member.reducer
        came = reducer.take_order()
        if came is None or group.size == 1:
            return True
        order = torch.tensor(came)
        group.broadcast(order, 0)
        try:
            group.wait()
        except Interrupted:
            return False
        reducer.attach(group, order.tolist())
        return True

    def _switch(self, planned: bool) -> None:
        """Go over to the next committed generation, as often as it takes until one stands."""
        member, session = self._member, self._member.session
        if session is None:
            raise FallowError(
                f"the connection to another rank is lost ({member.group.broken}); a fixed world cannot go on: "
                "start it again, or run it under `fallow run`"
            )
        reached = time.monotonic()
        if not planned:
            session.hold(member.group.generation, member.group.broken or "interrupted")
            if member.saver is not None:
                member.saver.lost()
        while True:
            upcoming = session.await_commit(self._wait, self._answers)
            taken = time.monotonic()
            if upcoming.group is None:
                self._leave(upcoming)
            else:
                parts = Parts(drain=reached - member.boundary, group=taken - reached)
                try:
                    self._enter(upcoming.group, upcoming.prepare, parts)
                    return
                except Interrupted as error:
                    session.hold(upcoming.prepare.generation, str(error))

    def _wait(self) -> bool:
        """What there is to do while no generation is committed; True: there is more."""
        member = self._member
        saver = member.saver if member.place.joined else None
        if saver is not None and saver.has_nothing_to_lose(member.group, member.place.position):
            self._depart()
        return member.follow()

    def _answers(self, prepare: Prepare) -> bool:
        """This member waits outside of bodies for what a member had heard that has failed since.

        It goes on with that answer as what it was, in the broken generation. In the next one it might be the main
        member, and would do once more what the other one has begun to do.
        """
        member, outcome = self._member, prepare.outcome
        if outcome is None or prepare.rollback or member.place.asking is None or not member.standing.holds:
            return False
        return outcome.generation == member.group.generation and outcome.agreed > member.place.agreed

    def _enter(self, group: Group, prepare: Prepare, parts: Parts) -> None:
        """First exchange of a generation, after which this worker computes in it."""
        member, place = self._member, self._member.place
        newcomer = not place.joined
        member.standing.give_up()
        member.catch_up.put_back(member.prepared)
        if prepare.rollback:
            member.standing.value = FRESH
        done = exchange(
            group,
            member.prepared,
            place.position,
            member.standing,
            lambda: load_newest(prepare.checkpoints, self._unusable, self._alive),
            member.pace.value,
            told(place.agreed, place.answer, place.asking, holds=place.in_sync and member.standing.holds),
            doubtful=place.doubtful,
        )
        entered = time.monotonic()
        place.went_back = prepare.rollback and not newcomer
        if group.rank in done.healed:
            sys.stderr.write(_DRIFTED.format(generation=group.generation, step=done.position.step))
        member.group = group
        self._align_from = 0
        member.division = Division(tuple(done.paces))
        place.position = done.position
        place.agreed, place.answer, place.doubtful = done.agreed, done.answer, False
        if prepare.rollback:
            place.over = None
        elif place.asking is None and done.over is not None:
            place.over = done.over
        if newcomer:
            place.joined, place.since = True, group.generation
            member.boundary = entered  # it was waiting before, and stands still from here on
        member.voice.speak(speaks=group.rank == 0)
        member.reducer.attach(group, member.prepared.order)
        member.prepared.acts[:] = [0] * len(member.prepared.acts)
        at = place.position
        member.ledger.add(Start(generation=group.generation, first_step=at.step))
        member.ledger.flush()
        member.replan()
        if member.session is not None:
            member.session.progress.step = at.step
            member.session.progress.reached = at.data_epoch, at.index
            member.session.reap_retired()
            self._arrival = _Arrival(
                newcomer,
                at.step,
                done.intake,
                group.rank in done.healed,
                Parts(
                    drain=parts.drain + done.drain_s,
                    group=parts.group + done.group_s,
                    state=done.state_s,
                ),
                entered,
            )
        for callback in member.on_resize:
            callback()

    def _alive(self) -> None:
        if self._member.session is not None:
            self._member.session.progress.move()

    def _unusable(self, path: str, reason: str) -> None:
        session = self._member.session
        if session is not None:
            session.send(CheckpointDamaged(worker=session.worker, path=path, reason=reason))

    def report_arrival(self) -> None:
        """Tell the head that this worker computes in the new generation, once its first batch is here."""
        arrival, self._arrival = self._arrival, None
        member, session = self._member, self._member.session
        if arrival is None or session is None:
            return
        now = time.monotonic()
        old = arrival.parts
        intake = arrival.intake
        message = Active(
            worker=session.worker,
            generation=member.group.generation,
            first_step=arrival.step,
            pause_s=0.0 if arrival.newcomer else now - member.boundary,
            parts=Parts(drain=old.drain, group=old.group, state=old.state, data=now - arrival.entered),
            bytes_received=intake.bytes_in_pause if intake is not None else 0,
            steps_discarded=member.discarded,
            healed=arrival.healed,
        )
        member.discarded = 0
        if intake is None:
            self._tell(message)
        else:
            # Until all of the state is here this member cannot give it to others.
            intake.when_complete(lambda: self._tell(msgspec.structs.replace(message, bytes_behind=intake.bytes_behind)))

    def _tell(self, message: Active) -> None:
        session = self._member.session
        assert session is not None
        if message.generation == self._member.group.generation:
            session.send(message)
            session.progress.generation = message.generation

    def settle(self) -> None:
        """After the last step of a call: the script may do with the state what it likes from here on."""
        self.report_arrival()
        while not self._settled():
            self._switch(planned=False)
            self.report_arrival()

    def _settled(self) -> bool:
        """All of the state is here; False: it will not come from this generation."""
        member = self._member
        if not member.standing.settle():
            return False
        if not member.place.in_sync:
            member.catch_up.keep(member.prepared)
        return True

    def agree(self, kind: Kind, value: float, ask: Callable[[], float]) -> bool:
        """Do something together outside of bodies, however often the membership changes meanwhile.

        Args:
            kind: of it.
            value: this member's part, for those who must conclude from what they have.
            ask: does it in the current group; what it gives is then `Place.answer`.

        Returns:
            False: the members went back to a checkpoint instead.

        Raises:
            FallowError: the others are in another place of the script, or have left it.
        """
        place = self._member.place
        been = kind is Kind.END and place.over == place.position.call
        number = place.agreed - been
        place.asking = Asking(number, kind, value)
        try:
            while True:
                self.report_arrival()
                try:
                    if self._settled():
                        if place.agreed > number:
                            return True
                        place.answer = ask()
                        place.agreed = number + 1
                        return True
                except Interrupted:
                    pass
                try:
                    self._switch(planned=False)
                except Answered as answered:
                    place.agreed, place.answer = answered.agreed, answered.answer
                    return True
                except OthersEnded as ended:
                    if ended.agreed > place.agreed:
                        place.agreed, place.answer = ended.agreed, ended.answer
                    if place.agreed == number or not self._member.standing.holds:
                        raise
                    return True
                if place.went_back:
                    return False
        finally:
            place.asking = None

    def _leave(self, upcoming: Upcoming) -> None:
        member, session = self._member, self._member.session
        assert session is not None
        member.voice.speak(speaks=False)
        if member.saver is not None:
            if upcoming.prepare.members:
                member.saver.finish()
            elif member.standing.holds:
                member.saver.suspend(member.group, member.prepared, member.place.position)
        self._depart()

    def _depart(self) -> NoReturn:
        member, session = self._member, self._member.session
        assert session is not None
        member.ledger.flush(LEAVING_S)
        step = member.place.position.step
        session.deliver(Left(worker=session.worker, generation=member.group.generation, step=step), 2.0)
        raise SwitchedOut


class _Arrival:
    """A switch that has not been reported yet."""

    def __init__(
        self, newcomer: bool, step: int, intake: Intake | None, healed: bool, parts: Parts, entered: float
    ) -> None:
        self.newcomer = newcomer
        self.step = step
        self.intake = intake
        self.healed = healed
        self.parts = parts
        self.entered = entered
