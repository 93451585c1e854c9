"""Going over to the next generation: when, with whom, and what is reported of it."""

import sys
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from fallow.core.membership.messages import Plan, Problem, Switch
from fallow.core.training.shards import Division
from fallow.model import FallowError, Parts
from fallow.worker.checkpoint.restore import load_newest
from fallow.worker.data.ledger import LEAVING_S, Start
from fallow.worker.loop.member import Member
from fallow.worker.session.orders import Dismissed, exit_code
from fallow.worker.session.status import Voice
from fallow.worker.transport.build import Upcoming
from fallow.worker.transport.waits import Interrupted

_HEALED = (
    "fallow: generation {generation}: this member's weights were not those of the others at step {step}; they were "
    "replaced. Does this node compute differently, or does the script change weights by hand?\n"
)

_FIXED_WORLD_PLAN = Plan(generation=0, replaces=0)
"A fixed world's only generation."

_decode_parts = msgspec.msgpack.Decoder(list[bytes]).decode


class Released(SystemExit):
    """This worker has left the run between two updates; the process ends with code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Generations:
    """Of one member: which one it is in, and its way into the next."""

    def __init__(self, member: Member, on_resize: list[Callable[[], None]]) -> None:
        self._member = member
        self._on_resize = on_resize
        self._voice = Voice()
        self.plan = _FIXED_WORLD_PLAN
        "of the generation at work"
        self.needs_meeting = True
        "its members have not come together yet, or their weights have drifted apart since"
        self._computed_generation = -1
        "the generation in which this member has computed last"
        self.aligned_until = 0
        "step before which this generation's members are not brought together again, though their weights drift apart"
        self._healed_generation = -1
        "the last one in which it received others' weights in the place of its own"
        self.next_generation = 0
        "generation that all members enter behind the last step; 0: none"
        self.is_released = False
        "this worker has left the run, or was told to"
        self._is_forgotten = False
        "what this member held did not count any more when it entered the generation at work"
        self._unreported: Switch | None = None
        "that this member computes in the generation, as far as it was known on entering"
        self._began_at = 0.0
        self._parts = Parts()
        "of the pause, until the members of the next generation come together"

    @property
    def must_switch(self) -> bool:
        """This member has to enter the next one before it can do anything together with others."""
        group = self._member.group
        return (
            group.broken is not None
            or self.next_generation > 0
            or (self._member.session is not None and not group.generation)
        )

    def enter(self, *, is_asking: bool) -> None:
        """Take the next generation that is committed; its members then have to come together.

        Args:
            is_asking: this member waits in a joint call.

        Raises:
            Answered: what this member waits for was complete on a member that is gone.
            FallowError: a fixed world has broken, or the head is gone for good.
            Released: this worker is not in it.
        """
        member, session = self._member, self._member.session
        group = member.group
        if session is None:
            raise FallowError(
                f"the connection to another rank is lost ({group.broken}); a fixed world cannot go on: "
                "start it again, or run it under `fallow run`"
            )
        reached = time.monotonic()
        if not self.next_generation:  # else it has passed the boundary, and nobody cares for the old group
            self._report_break()
        group.node.leave()
        if group.broken is not None and group.generation and member.saver is not None:
            member.saver.lost()
        self.next_generation = 0
        try:
            upcoming = session.await_commit(self._wait, lambda planned: is_asking and self._answers(planned))
        except Dismissed as dismissed:
            self.is_released = True
            if dismissed.code == 0:
                raise Released from None
            raise FallowError(dismissed.reason, exit_code(dismissed.code)) from None
        member.group.retire()
        if upcoming.group is None:
            self._leave(upcoming)
        self._parts = Parts(drain=reached - member.last_step_end, group=time.monotonic() - reached)
        member.group, self.plan, self.needs_meeting = upcoming.group, upcoming.plan, True
        member.state_status.give_up()
        self._is_forgotten = not upcoming.counts(session.computed)
        if self._is_forgotten:
            member.state_status.drop(is_first=not member.place.position.op)
            session.say(has_state=False)

    def wait_on_node(self, wait: Callable[[], list[bytes]]) -> list[bytes]:
        """What the members decide by: if one worker of this node has heard it, all of them have.

        Args:
            wait: waits for it.

        Raises:
            Interrupted: none of them has.
        """
        node = self._member.group.node
        if node.size == 1:
            return wait()
        try:
            parts = wait()
        except Interrupted:
            self._report_break()  # first: a sibling may be busy, and other nodes wait
            shared_bytes = node.share(None)
            if shared_bytes is None:
                raise
            sibling_parts: list[bytes] = _decode_parts(shared_bytes)
            return sibling_parts
        node.share(msgspec.msgpack.encode(parts))
        return parts

    def _report_break(self) -> None:
        group, session = self._member.group, self._member.session
        if session is not None and group.broken is not None and group.generation:
            session.hold(group.generation, group.broken)

    def _wait(self) -> bool:
        """What there is to do while no generation is committed; True: there is more."""
        member = self._member
        step = member.place.position.step
        if (
            member.saver is not None
            and member.place.has_joined
            and member.saver.has_nothing_to_lose(member.group, step)
        ):
            self.depart()
        return member.follow()

    def _answers(self, upcoming: Upcoming) -> bool:
        """A member that waits in a joint call waits for what a member had heard that has failed since.

        It goes on with that answer as what it was, in the broken generation. In the next one it might be the main
        member, and would do once more what the other one has begun to do.
        """
        member, outcome, session = self._member, upcoming.plan.outcome, self._member.session
        if outcome is None or session is None or not member.state_status.holds:
            return False
        is_answer = outcome.generation == member.group.generation and outcome.agreed > member.place.position.op
        return is_answer and upcoming.counts(session.computed)

    def restore(self) -> dict[str, object] | None:
        """The state in the newest checkpoint that can be read; None: there is no checkpoint."""
        session = self._member.session

        def report(path: str, reason: str) -> None:
            if session is not None:
                session.say(damaged=Problem(path=path, reason=reason))

        state: dict[str, object] | None = load_newest(self.plan.checkpoints, report, self._member.move)
        return state

    def begin_generation(self, paces: list[float], parts: Parts, *, is_healed: bool, was_rolled_back: bool) -> None:
        """All members are there, and have the run's state: from here on this one computes in the generation.

        Args:
            paces: of all members, by rank.
            parts: of the pause, since the members have come together.
            is_healed: this member was as far as the others with other weights than most of them, and received theirs:
                at the beginning of the generation, or amid it.
            was_rolled_back: no member had the run's state: it is that of a checkpoint.
        """
        member, place, session = self._member, self._member.place, self._member.session
        newcomer, generation = not place.has_joined, member.group.generation
        self.needs_meeting, member.division = False, Division(tuple(paces))
        if is_healed and generation != self._healed_generation:  # of each further time nobody need hear
            self._healed_generation = generation
            sys.stderr.write(_HEALED.format(generation=generation, step=place.position.step))
            if session is not None:
                session.say(healed=place.position.step)
        if generation == self._computed_generation:
            member.replan()
            return
        self._computed_generation, self._began_at, self.aligned_until = generation, time.monotonic(), 0
        place.was_rolled_back = was_rolled_back and not newcomer
        if newcomer or (self._is_forgotten and not was_rolled_back):
            place.has_joined, place.joined_in = True, generation
            if session is not None and session.head_status.last_reply.joins:
                session.head_status.note_checkpoint(
                    session.head_status.checkpoints_asked
                )  # asked for while it was none of theirs
            member.last_step_end = self._began_at  # it was waiting before, and stands still from here on
        self._voice.speak(speaks=member.group.rank == 0)
        member.reduction.attach(member.group)
        at = place.position
        # Behind an inner loop, or between two phases, the generation before has computed the step at work.
        first_step = at.step + (member.recorded_step == at.step)
        member.ledger.add(Start(generation=generation, first_step=first_step))
        member.ledger.flush()
        member.replan()
        member.progress.step = at.step
        member.progress.tell(reached=(at.data_epoch, at.index))
        if session is not None:
            session.groups.reap_retired()
            self._unreported = Switch(
                generation=generation,
                first_step=first_step,
                parts=replace(parts, drain=self._parts.drain + parts.drain, group=self._parts.group + parts.group),
            )
        for callback in self._on_resize:
            callback()

    def report_arrival(self) -> None:
        """Say that this worker computes in the new generation, once its first batch is here."""
        arrival, self._unreported = self._unreported, None
        member, now = self._member, time.monotonic()
        intake, member.state_status.latest = member.state_status.latest, None  # it may hold a whole state
        if arrival is None:
            return
        newcomer = member.place.joined_in == arrival.generation
        switch = replace(
            arrival,
            pause_s=0.0 if newcomer else now - member.last_step_end,
            parts=replace(arrival.parts, data=now - self._began_at),
            bytes_in_pause=intake.bytes_in_pause if intake is not None else 0,
            discarded=member.discarded_attempts,
        )
        member.discarded_attempts = 0
        if intake is None:
            self._tell(switch)
        else:
            # Until all of the state is here this member cannot give it to others.
            intake.completion.add_done_callback(lambda _: self._tell(replace(switch, bytes_behind=intake.bytes_behind)))

    def _tell(self, switch: Switch) -> None:
        session = self._member.session
        assert session is not None
        if switch.generation == self._member.group.generation:
            session.say(generation=switch.generation, has_state=True, switch=switch)

    def _leave(self, upcoming: Upcoming) -> NoReturn:
        member = self._member
        self._voice.speak(speaks=False)
        if member.saver is not None and member.place.has_joined:
            at = member.place.position
            # Where the group broke behind an inner loop, the optimizer may have made a step that is not counted yet.
            if upcoming.plan.suspends and member.state_status.holds and member.recorded_step != at.step:
                member.saver.suspend(member.group, member.prepared, member.plain_values(), at.step, at.loop_epoch)
            else:
                member.saver.finish()
        self.depart(upcoming.generation)

    def depart(self, first_without: int = 0) -> NoReturn:
        """Leave the run between two updates.

        Args:
            first_without: the generation that was told to be without this worker; 0: nobody told it.

        Raises:
            Released: always.
        """
        member, session = self._member, self._member.session
        assert session is not None
        member.ledger.flush(LEAVING_S)
        session.leave(member.group.generation, first_without or member.group.generation)
        self.is_released = True
        raise Released
