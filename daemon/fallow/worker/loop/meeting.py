"""How members come together: at the beginning of each operation, and again in each new generation.

A member finishes an operation only if all members can finish it. So no member is more than one operation ahead, and a
member that is one behind needs only the outcome of that operation, a few bytes. The run's state is sent to newcomers
and to members that have only a part of it.
"""

import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from fallow.model import Exit, FallowError, Parts
from fallow.worker.handover.snapshot import load_from_host
from fallow.worker.handover.transfer import FRESH, TORN, Roles, transfer
from fallow.worker.loop import agreement
from fallow.worker.loop.agreement import Ranks
from fallow.worker.loop.exchange import JOINT, Call, Kind, Opening, exact_sum, pack, unpack
from fallow.worker.loop.generations import Generations
from fallow.worker.loop.member import Member
from fallow.worker.loop.place import Position
from fallow.worker.prepared.checksum import fingerprint, majority_and_others
from fallow.worker.prepared.modes import KINDS
from fallow.worker.session.orders import Answered, OthersEnded
from fallow.worker.transport.waits import Exchange, Interrupted

_ANSWER = struct.Struct("<d")

_IN_CALLBACK = (
    "run.mean or run.barrier in a callback of run.on_resize, where members are still coming together: note there that "
    "the membership has changed, and call it in front of the next inner loop"
)


class ScriptEndedEarly(Exception):
    """This member's script has ended while the other members are still in a run.updates loop."""


class MeetingResult(NamedTuple):
    """The operation at which all members have come together."""

    kind: Kind
    outcome: bytes | None = None
    "answer of a joint call, or the other members' outcome of an inner loop, which this member must adopt"
    generation: int | None = None
    "generation that concluded the outcome, if not the current one; it becomes `Position.concluded`"


class Meeting:
    """One member's side of coming together: it sends its opening and evaluates all members' openings."""

    def __init__(self, member: Member, generations: Generations) -> None:
        self._member = member
        self._generations = generations
        self.call = Call()
        self.compared_generation = -1
        "last generation in which all members' openings of the current call were compared; -1: none"
        self._exchange: Exchange | None = None

    # ------------------------------------------------------------------------------------------------ an opening

    def open(
        self,
        kind: Kind,
        *,
        value: float = 0.0,
        sums_of: int = 0,
        bars_newcomers: bool = False,
        has_ended: bool = False,
    ) -> None:
        """Send this member's opening to all members, once for each operation and generation.

        Args:
            kind: kind of the operation.
            value: see `Opening`.
            sums_of: see `Opening`.
            bars_newcomers: see `Opening`.
            has_ended: see `Opening`.

        Raises:
            Interrupted: the group broke.
        """
        if self._exchange is not None:
            return
        member, fresh = self._member, self._generations.needs_meeting
        state_status, place, prepared = member.state_status, member.place, member.prepared
        frozen, resting = prepared.modes.fingerprints() if fresh else (0, 0)
        own_opening = Opening(
            generation=member.group.generation,
            op=place.position.op,
            kind=kind,
            step=place.position.step,
            bars_newcomers=bars_newcomers,
            has_ended=has_ended,
            state_status=state_status.value,
            sums_of=sums_of,
            concluded=place.position.concluded,
            pauses_training=state_status.weights_in_pause,
            joined_in=place.joined_in,
            fingerprint=fingerprint(prepared.weights()) if fresh and state_status.has_state else 0,
            frozen=frozen,
            resting=resting,
            pace=member.pace.value,
            value=value,
            call=self.call,
        )
        self._exchange = member.group.tell(pack(own_opening))

    def collect_openings(self, kind: Kind) -> list[Opening]:
        """Wait for all members' openings of an operation of that kind, and return them by rank.

        Raises:
            Interrupted: the group broke, or another member's script has ended.
            ScriptEndedEarly: this member's script has ended.
            Divergence: the members are at different places of the script.
            Stranger: this newcomer is at another place than the members.
        """
        assert self._exchange is not None, "call `open` before `collect_openings`"
        fresh, wait = self._generations.needs_meeting, self._exchange.wait
        # Openings of a step decide nothing, and the workers of a node finish their shards at different times.
        texts = wait() if kind is Kind.STEP and not fresh else self._generations.wait_on_node(wait)
        openings = [unpack(text) for text in texts]
        if not fresh:
            self._check(openings, range(len(openings)))
        return openings

    def forget(self) -> None:
        """Drop the opening: the operation or the generation is over."""
        self._exchange = None

    def _check(self, openings: Sequence[Opening], ranks: Sequence[int]) -> None:
        """Check that these members are at the same place of the script."""
        group = self._member.group
        ranks = [rank for rank in ranks if openings[rank].kind != Kind.COMING]
        present = [openings[rank] for rank in ranks]
        ended = [one for one in present if one.has_ended]
        if self._member.session is not None and ended and any(one.kind != Kind.END for one in present):
            if openings[group.rank].has_ended:
                raise ScriptEndedEarly
            self._interrupt("a member's script has ended inside of the loop")
        agreement.check_places(present)
        if present and present[0].kind == Kind.STEP:
            own_place = ranks.index(group.rank) if group.rank in ranks else 0
            reason = agreement.check_calls(present, own_place)
            if reason:
                self._interrupt(reason)
            agreement.check_cuts(present)

    def _interrupt(self, reason: str) -> None:
        self._member.group.interrupt(reason)
        raise Interrupted(reason)

    # ---------------------------------------------------------------------------------------------- coming together

    def come_together(self, kind: Kind, *, rewind: Callable[[], None] = lambda: None, **opening: Any) -> MeetingResult:
        """Wait until all members are at this operation, however often the membership changes meanwhile.

        Args:
            kind: kind of the operation.
            rewind: puts this member's state back to the operation's beginning. Called before a transfer of state.
            opening: further arguments of `open`.

        Raises:
            FallowError: see `collect_openings`; or no remaining member holds the state.
            Released: this member has left the run.
        """
        member, generations = self._member, self._generations
        while True:
            try:
                if generations.must_switch:
                    self.forget()
                    generations.enter(is_asking=kind in JOINT)
                began = time.monotonic()
                self.open(kind, **opening)
                openings = self.collect_openings(kind)
                if not generations.needs_meeting:
                    return _result(kind, openings)
                ranks = agreement.ranks_of(openings)
                if ranks.lacking_outcome:
                    # Members that are one operation behind receive its outcome.
                    group, source = member.group, ranks.newest[0]
                    own = member.place.position.outcome if group.rank == source else b""
                    texts = generations.wait_on_node(partial(group.gather, own))
                    self.forget()
                    if group.rank in ranks.lacking_outcome:
                        return MeetingResult(kind, texts[source], openings[source].concluded - 1)
                    continue  # this member sends its opening when it reaches the next operation
                rewind()
                self._hand_over(openings, ranks, time.monotonic() - began)
                if kind in JOINT and not self.settle():
                    continue
                where = self._where(openings, ranks)
                if ranks.awaiting_answer or where is Kind.STEP:
                    self.forget()  # the operation begins with an opening of its own
                if member.group.rank in ranks.awaiting_answer:
                    return MeetingResult(where, member.place.position.outcome)
                if ranks.awaiting_answer:
                    continue
                result = _result(where, openings)
                if member.group.rank in ranks.stale:  # the members trained without this one
                    self._follow(result)
                    member.place.was_rolled_back = (
                        member.place.in_sync
                    )  # the script must compare its place with the members' place
                    return MeetingResult(where)
                return result
            except Interrupted:
                self.forget()

    def settle(self) -> bool:
        """Wait for all transfers from and to the workers of this node; returns False if the group breaks first."""
        if not self._member.state_status.settle():
            return False
        try:
            self._member.group.wait_for_siblings()
        except Interrupted:
            return False
        return True

    def _where(self, openings: Sequence[Opening], ranks: Ranks) -> Kind:
        """Return the members' operation. If no member holds the state, all go back to a step's beginning."""
        present = [openings[rank] for rank in ranks.newest] or [one for one in openings if not one.joined_in]
        return next((Kind(one.kind) for one in present if one.kind != Kind.COMING), Kind.STEP)

    def _hand_over(self, openings: Sequence[Opening], ranks: Ranks, waited_s: float) -> None:
        """Send the state from the members that hold it to the others. Raises Interrupted: holders still hold it."""
        member, group, state_status = self._member, self._member.group, self._member.state_status
        for rank, one in enumerate(openings):
            if one.generation != group.generation:
                raise FallowError(
                    f"rank {rank} is in generation {one.generation}, not {group.generation}: a stale process"
                )
        holders = ranks.newest
        self._check(openings, holders)
        someone_joins = bool(ranks.stale) or any(not one.joined_in for one in openings)
        if someone_joins and any(openings[rank].bars_newcomers for rank in holders):
            self._interrupt(
                "the members are amid an update, or in run.mean or run.barrier; newcomers wait until that is over"
            )
        began = time.monotonic()
        donors, healed = self._donors(openings, holders)
        usable = bool(holders or self._generations.plan.checkpoints)
        able = [rank for rank, one in enumerate(openings) if usable or one.state_status != TORN]
        state_status.weights_in_pause = any(one.pauses_training for one in openings)
        roles = Roles(
            donors=donors,
            receivers=[rank for rank in able if rank not in donors],
            has_begun=bool(holders),
            weights_in_pause=state_status.weights_in_pause or not holders or bool(healed) or bool(ranks.stale),
            modes=[kind for kind in KINDS if len({getattr(openings[rank], kind) for rank in donors}) == 1],
        )
        if not holders and group.rank == donors[0]:
            saved = self._generations.restore()
            if saved is not None:
                self.load(saved)
        plain_values = transfer(
            group,
            member.prepared,
            state_status,
            roles,
            member.plain_values,
            fingerprint=openings[donors[0]].fingerprint,
        )
        if plain_values is not None:
            self._take_plain(plain_values)
        group.wait_for_siblings()
        self._generations.begin_generation(
            [one.pace for one in openings],
            Parts(drain=waited_s, state=time.monotonic() - began),
            is_healed=group.rank in healed,
            was_rolled_back=not holders,
        )

    def _donors(self, openings: Sequence[Opening], holders: list[int]) -> tuple[list[int], list[int]]:
        """Return the ranks whose state counts, and the ranks that are equally far but hold different weights.

        In a reproducible run, more than half of the holders must agree. Otherwise different kernels may be the reason,
        and the largest side counts. Of equally large sides the one with the lowest rank counts.
        """
        if not holders and self._generations.plan.checkpoints:
            return [0], []
        if not holders:
            if self._member.state_status.value == TORN:
                raise FallowError(
                    "every member that held the state has failed before this one received all of it; "
                    "the run goes on from its newest checkpoint",
                    Exit.TEMPFAIL,
                )
            return [next(rank for rank, one in enumerate(openings) if one.state_status == FRESH)], []
        majority, minority = majority_and_others([openings[rank].fingerprint for rank in holders])
        if len(majority) <= len(minority) and self._member.prepared.reproducible:
            sums = ", ".join(f"rank {rank}: {openings[rank].fingerprint:x}" for rank in holders)
            raise FallowError(
                f"generation {self._member.group.generation}: members that are equally far hold different weights "
                f"({sums}) and none are the majority; the script changes weights outside the prepared optimizers, or "
                "the nodes compute differently (processor, torch version)"
            )
        return [holders[n] for n in majority], [holders[n] for n in minority]

    # ------------------------------------------------------------------------------------------- plain values of it

    def _take_plain(self, values: dict[str, object]) -> None:
        self._member.place.position = Position.of(values["position"])
        self._member.reduction.load(msgspec.convert(values["sums"], dict[str, object]))

    def load(self, tree: dict[str, object]) -> None:
        """Load the state of a checkpoint."""
        self._take_plain(load_from_host(self._member.prepared, tree))

    # -------------------------------------------------------------------------------------------------- joint calls

    def join(self) -> None:
        """Bring a newcomer to the members' operation."""
        self._follow(self.come_together(Kind.COMING))

    def _follow(self, result: MeetingResult) -> None:
        """Conclude the operation at which this member joins: the members have finished it."""
        if result.outcome is not None:
            self._conclude(result.kind, result.outcome)
        self._member.place.joined_at_call_end = result.kind is Kind.END

    def joint_call(self, kind: Kind, value: float = 0.0, *, has_ended: bool = False) -> float:
        """Do a mean, a barrier or the end of a call together with all members, even if members fail meanwhile.

        Returns:
            The mean of all members' values.

        Raises:
            FallowError: the others are at another place of the script, or their scripts have ended; or the caller is
                a callback of `run.on_resize`.
        """
        if self._exchange is not None:
            raise FallowError(_IN_CALLBACK, Exit.DATA)
        place = self._member.place
        begun = place.position.op
        self._member.note_call(in_call=True)
        try:
            result = self.come_together(kind, value=value, bars_newcomers=kind is not Kind.END, has_ended=has_ended)
        except Answered as answered:
            result = MeetingResult(kind, _ANSWER.pack(answered.answer))
        except OthersEnded as others:
            if others.agreed <= begun or not self._member.state_status.has_state:
                raise
            result = MeetingResult(kind, _ANSWER.pack(others.answer))
        finally:
            self._member.note_call(in_call=False)
        self._generations.report_arrival()
        if place.was_rolled_back:
            self.forget()
            return value
        if place.position.op == begun:
            assert result.outcome is not None, "members that come together in a joint call are all in it"
            self._conclude(kind, result.outcome, result.generation)
        return self.answer

    @property
    def answer(self) -> float:
        """Answer of the last operation if that was a joint call, else 0."""
        outcome = self._member.place.position.outcome
        return float(_ANSWER.unpack(outcome)[0]) if len(outcome) == _ANSWER.size else 0.0

    def _conclude(self, kind: Kind, outcome: bytes, generation: int | None = None) -> None:
        position = self._member.place.position
        position.finish_operation(outcome, self._member.group.generation if generation is None else generation)
        if kind is Kind.END:
            position.finish_call()
        self.forget()


def _result(kind: Kind, openings: Sequence[Opening]) -> MeetingResult:
    """Make the result for an operation at which all members are. A joint call's answer is the mean over its members."""
    if kind is Kind.STEP:
        return MeetingResult(kind)
    values = [one.value for one in openings if one.kind == kind]
    return MeetingResult(kind, _ANSWER.pack(exact_sum(values) / len(values)))
