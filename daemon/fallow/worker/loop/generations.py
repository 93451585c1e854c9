"""The switch into the next generation: when a member switches, with which members, and what it reports."""

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
from fallow.worker.data.ledger import LEAVE_PATIENCE_S, Start
from fallow.worker.loop.member import Member
from fallow.worker.loop.pace import node_paces
from fallow.worker.session.orders import Dismissed, exit_code
from fallow.worker.session.status import Voice
from fallow.worker.transport.build import Upcoming
from fallow.worker.transport.waits import Interrupted

_HEALED = (
    "fallow: generation {generation}: at step {step} this member's weights differed from the other members' weights "
    "and were replaced. Either this node computes differently or the script changes weights by hand.\n"
)

_FIXED_WORLD_PLAN = Plan(generation=0, replaces=0)
"Plan of a fixed world's only generation."

_decode_parts = msgspec.msgpack.Decoder(list[bytes]).decode


class Released(SystemExit):
    """This worker has left the run between two updates; the process ends with code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Generations:
    """The generation that this member is in, and its switch into the next one."""

    def __init__(self, member: Member, on_resize: list[Callable[[], None]]) -> None:
        self._member = member
        self._on_resize = on_resize
        self._voice = Voice()
        self.plan = _FIXED_WORLD_PLAN
        "plan of the current generation"
        self.needs_meeting = True
        "the members have not compared their state in this generation, or their weights have drifted apart since"
        self._computed_generation = -1
        "last generation in which this member has computed; -1: none"
        self.aligned_until = 0
        "before this step, drifting weights do not make the members compare their state again"
        self._healed_generation = -1
        "last generation in which this member's weights were replaced; -1: none"
        self.next_generation = 0
        "generation that all members enter after the last step; 0: none"
        self.is_released = False
        "this worker has left the run, or the head has told it to leave"
        self._is_forgotten = False
        "the state that this member held was obsolete when it entered the current generation"
        self._unreported: Switch | None = None
        "report of the switch into the current generation, as far as it was known then; None: reported"
        self._began_at = 0.0
        self._parts = Parts()
        "parts of the pause until the members of the next generation come together"

    @property
    def must_switch(self) -> bool:
        """True if this member must enter the next generation before it can exchange anything with others."""
        group = self._member.group
        return (
            group.broken is not None
            or self.next_generation > 0
            or (self._member.session is not None and not group.generation)
        )

    def enter(self, *, is_asking: bool) -> None:
        """Wait for the next committed generation and enter it. Its members then have to come together.

        Args:
            is_asking: this member waits in a joint call.

        Raises:
            Answered: the joint call was complete on a member that has failed; the exception has its answer.
            FallowError: a fixed world has broken, or the head is silent for too long.
            Released: the generation is without this worker.
        """
        member, session = self._member, self._member.session
        group = member.group
        if session is None:
            raise FallowError(
                f"the connection to another rank is lost ({group.broken}); a fixed world cannot go on: "
                "start it again, or run it under `fallow run`"
            )
        reached = time.monotonic()
        if not self.next_generation:  # else this member has passed the boundary, and the old group does not matter
            self._report_break()
        group.node.leave()
        if group.broken is not None and group.generation and member.saver is not None:
            member.saver.note_member_loss()
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
        if upcoming.ranks is not None:
            member.nodes, member.siblings = upcoming.ranks.nodes, upcoming.ranks.siblings
        member.state_status.give_up()
        self._is_forgotten = not upcoming.counts(session.computed)
        if self._is_forgotten:
            member.state_status.drop(is_first=not member.place.position.op)
            session.say(has_state=False)

    def wait_on_node(self, wait: Callable[[], list[bytes]]) -> list[bytes]:
        """Wait for all members' messages. If one worker of this node receives them, all workers of the node do.

        Args:
            wait: waits for the messages and returns them, by rank.

        Raises:
            Interrupted: no worker of this node has received the messages.
        """
        node = self._member.group.node
        if node.size == 1:
            return wait()
        try:
            parts = wait()
        except Interrupted:
            self._report_break()  # first: the head hears of it as soon as the last sibling has reported it, too
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
        """Do what can be done while no generation is committed. Return True if more work is left."""
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
        """Return True if a failed member had the answer of the joint call in which this member waits.

        This member then takes the answer and goes on in the broken generation. In the next generation it might be the
        main member, and would repeat what the failed main member has begun to do.
        """
        member, outcome, session = self._member, upcoming.plan.outcome, self._member.session
        if outcome is None or session is None or not member.state_status.has_state:
            return False
        is_answer = outcome.generation == member.group.generation and outcome.agreed > member.place.position.op
        return is_answer and upcoming.counts(session.computed)

    def restore(self) -> dict[str, object] | None:
        """Load the newest readable checkpoint; None if the run has no checkpoint."""
        session = self._member.session

        def report(path: str, reason: str) -> None:
            if session is not None:
                session.say(damaged=Problem(path=path, reason=reason))

        state: dict[str, object] | None = load_newest(self.plan.checkpoints, report, self._member.move)
        return state

    def begin_generation(self, paces: list[float], parts: Parts, *, is_healed: bool, was_rolled_back: bool) -> None:
        """Begin to compute in the generation: all members are present and have the run's state.

        Args:
            paces: seconds per shard of all members, by rank.
            parts: parts of the pause since the members have come together.
            is_healed: this member's weights differed from the majority's and were replaced. That happens at the
                beginning of a generation or amid it.
            was_rolled_back: no member held the run's state, so all members loaded a checkpoint.
        """
        member, place, session = self._member, self._member.place, self._member.session
        newcomer, generation = not place.has_joined, member.group.generation
        self.needs_meeting, member.division = False, Division(node_paces(paces, member.nodes))
        if is_healed and generation != self._healed_generation:  # reported once a generation
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
                )  # requests from before this worker joined are not its own
            member.last_step_end = self._began_at  # until now it was waiting; its pause begins here
        self._voice.speak(speaks=member.group.rank == 0)
        member.reduction.attach(member.group)
        at = place.position
        # After an inner loop, or between two phases, the generation before has computed the current step.
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
        """Report to the head that this worker computes in the new generation. Call when its first batch is loaded."""
        arrival, self._unreported = self._unreported, None
        member, now = self._member, time.monotonic()
        intake, member.state_status.latest = member.state_status.latest, None  # the intake may hold a whole state
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
            # This member cannot donate state before it has all of it.
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
            # If the group broke after an inner loop, the optimizer may have made a step that is not counted yet.
            if upcoming.plan.suspends and member.state_status.has_state and member.recorded_step != at.step:
                member.saver.suspend(member.group, member.prepared, member.plain_values(), at.step, at.loop_epoch)
            else:
                member.saver.finish()
        self.depart(upcoming.generation)

    def depart(self, first_without: int = 0) -> NoReturn:
        """Leave the run between two updates.

        Args:
            first_without: the generation in which the head leaves this worker out; 0: the worker leaves by itself.

        Raises:
            Released: always.
        """
        member, session = self._member, self._member.session
        assert session is not None
        member.ledger.flush(LEAVE_PATIENCE_S)
        session.leave(member.group.generation, first_without or member.group.generation)
        self.is_released = True
        raise Released
