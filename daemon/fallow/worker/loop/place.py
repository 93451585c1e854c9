"""Where the members are in the run, and where the script is: which `run.epochs` and `run.updates` it has begun.

A place is a `Mark`, the number of a `run.updates` call after that mark, and whether the call has begun. Places are
ordered as a script reaches them. A newcomer's script starts from the top. It skips everything before the members'
place, and is in sync when it reaches that place.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from fallow.core.membership.failures import Stranger
from fallow.model import Exit, FallowError

_ASTRAY = (
    "this newcomer's script has passed the members' place (step {step}) without reaching it: the conditions around "
    "run.updates have changed since the members evaluated them. The members go on without this newcomer. "
    "Write `for epoch in run.epochs(n):` or max_steps, not `while run.step < n`; and end a loop early by what a "
    "prepared object keeps"
)


class Mark(NamedTuple):
    """Where calls are counted from: the beginning of an epoch of a `run.epochs` loop, or the end of such a loop."""

    loop: int = 0
    "number of the current run.epochs loop, or of the next one"
    inside: bool = False
    "the place is in that loop, not before it"
    epoch: int = 0
    "epoch of that loop"


class Position(msgspec.Struct, kw_only=True):
    """Where the members are. All members have the same position; it is part of the state that a newcomer receives."""

    step: int = 0
    "number of finished optimizer steps"
    samples: int = 0
    "number of samples in these steps"
    data_epoch: int = 0
    "number of the current pass over the data; the pass and the seed determine the order of samples"
    index: int = 0
    "number of finished steps in this pass"
    op: int = 0
    "number of finished operations: inner loops and joint calls"
    outcome: bytes = b""
    "outcome of the last operation"
    concluded: int = 0
    "1 + generation that concluded the last operation; 0: no operation yet"
    acts: int = 0
    "number of steps of prepared optimizers since the last inner loop"
    passes: int = 0
    "number of finished passes in this call"
    call_steps: int = 0
    "number of finished steps in this call"
    loop: int = 0
    inside: bool = False
    loop_epoch: int = 0
    "`loop`, `inside` and `loop_epoch`: see `Mark`"
    call: int = 0
    "number, counted from the mark, of the current run.updates call or of the next one"
    loss: float | None = None
    "mean of the figure `loss` in the last step that had one"

    @property
    def mark(self) -> Mark:
        """Mark from which the call is counted."""
        return Mark(self.loop, self.inside, self.loop_epoch)

    def finish_operation(self, outcome: bytes, generation: int) -> None:
        """Count one operation that every member of that generation can finish."""
        self.op += 1
        self.outcome, self.concluded = outcome, generation + 1

    def finish_step(self, samples: int, *, last: bool) -> None:
        """Count one finished step of `samples` samples; `last`: it is the last one of its pass."""
        self.step += 1
        self.samples += samples
        self.call_steps += 1
        self.index += 1
        if last:
            self.index = 0
            self.passes += 1
            self.data_epoch += 1

    def finish_call(self) -> None:
        """Count one finished run.updates call; a pass that `max_steps` cut short is not resumed."""
        if self.index:
            self.index = 0
            self.data_epoch += 1
        self.call += 1
        self.passes = self.call_steps = 0

    def come_to(self, mark: Mark) -> None:
        """Begin an epoch, or end a loop over epochs."""
        self.loop, self.inside, self.loop_epoch = mark
        self.call = 0

    @staticmethod
    def of(saved: Any) -> "Position":
        """Make a position from the fields that a member or a checkpoint has."""
        position = msgspec.convert(saved, Position)
        # Older checkpoints count calls from the script's beginning; `loop_call` is the first call of the epoch.
        position.call -= saved.get("loop_call", 0)
        return position


class Place:
    """The script's own counters, compared with the members' position. A newcomer's script starts from the top."""

    def __init__(self, *, in_sync: bool) -> None:
        self.position = Position()
        "position of the members, replaced at each change of the membership"
        self.has_joined = False
        "this worker has received the run's state, or began with the run"
        self.joined_in = 0
        "generation in which this worker joined; 0: it has not joined"
        self.in_sync = in_sync
        "the script has reached the place that `position` names; always true in a fixed world"
        self.was_rolled_back = False
        "the members were rolled back, or trained without this worker, and the script has not compared its place since"
        self.joined_at_call_end = False
        "this newcomer received the state of members at the end of a call, before their next call"
        self._goes_back = False
        "this script was in sync before a rollback, and now goes to the members' place as a newcomer's does"
        self.mark = Mark()
        self.calls = 0
        "number of run.updates calls that the script has begun since its mark"
        self.epochs_in_loop = 1
        "number of epochs of the run.epochs loop that the script is in"
        self._has_left_loop = False
        "the script has left, by a break, the run.epochs loop that the members are in"

    @property
    def epoch(self) -> int:
        """Epoch of run.epochs if the script is in such a loop, else passes over the data."""
        return self.mark.epoch if self.mark.inside else self.position.data_epoch

    # ------------------------------------------------------------------------------------------- loops over epochs

    def epochs(self, n: int, hint: Callable[[], int], end_call: Callable[[], None]) -> Iterator[int]:
        """As `range(n)`, but a newcomer begins at the members' epoch.

        Args:
            n: number of epochs.
            hint: returns the members' epoch as the head last said.
            end_call: agrees with the other members on the end of a call that the script has left by a break.
        """
        end_call()
        if self.mark.inside:  # the script left that loop by a break, and something still refers to its generator
            self._break_loop()
            self.finish_left_loop()
        number = self.mark.loop
        if self.has_joined and number < self.position.loop:
            self._set_mark(Mark(number + 1))
            return  # the members are past this loop
        epoch = self.position.loop_epoch if self.has_joined else hint()
        if not self.is_astray:
            self._come_to(Mark(number, True, epoch))
        elif self.position.mark[:2] == (number, True):
            self._set_mark(self.position.mark)
        else:
            raise self.stranger_error()
        self.epochs_in_loop = n
        try:
            while epoch < n:
                yield epoch
                if self.mark != (number, True, epoch):
                    raise FallowError(
                        "run.epochs inside of a run.epochs loop: newcomers know the epoch of one loop only; "
                        "use `range` for the inner loop",
                        Exit.DATA,
                    )
                end_call()
                if self._skips(self.calls):
                    epoch = self.position.loop_epoch
                    if self.position.mark[:2] != (number, True):
                        break
                    self._set_mark(self.position.mark)
                elif self.is_astray:
                    raise self.stranger_error()
                else:
                    epoch += 1
                    self._come_to(Mark(number, True, epoch))
            else:
                self._come_to(Mark(number + 1))
            self._leave_loop()
        except GeneratorExit:
            if self.mark.inside and self.mark.loop == number:
                self._break_loop()
            raise

    def _come_to(self, mark: Mark) -> None:
        """Move script and members to the mark together."""
        self.position.come_to(mark)
        self._set_mark(mark)

    def _set_mark(self, mark: Mark) -> None:
        self.mark = mark
        self.calls = 0

    def _leave_loop(self) -> None:
        self.epochs_in_loop = 1
        if self.mark.inside:
            self._set_mark(Mark(self.mark.loop + 1))

    def _break_loop(self) -> None:
        self._has_left_loop = not self.is_astray
        self._leave_loop()

    def finish_left_loop(self) -> None:
        """Count a run.epochs loop that the script has left by a break, when the calls in it are over."""
        if self._has_left_loop:
            self._has_left_loop = False
            self._come_to(self.mark)

    # ------------------------------------------------------------------------------------- way to the members' place

    @property
    def is_astray(self) -> bool:
        """True if a newcomer is neither in the members' call nor directly before it.

        A newcomer directly before the members' call begins and ends loops and epochs together with the members.
        """
        at = self.position
        is_in_front = (self.mark, self.calls) == (at.mark, at.call) and not at.call_steps
        return self.has_joined and not self.in_sync and not is_in_front

    def _skips(self, call: int) -> bool:
        """True if the script, at this call, reaches the members' place in a later epoch of its loop."""
        at = self.position
        is_past = self.mark != at.mark or (self._goes_back and call > at.call)
        return not self.in_sync and self.mark.inside and is_past

    def stranger_error(self) -> FallowError:
        """The error for a newcomer, or a member after a rollback, that has missed the members' place."""
        if self._goes_back:
            return self.unreachable_error()
        return Stranger(_ASTRAY.format(step=self.position.step))

    def unreachable_error(self) -> FallowError:
        """The error for a script that cannot reach the members' place, although a new process can."""
        return FallowError(
            f"the members are at step {self.position.step}, in a part of the script that this process has left or "
            "does not reach; this process ends, and the run goes on with new processes",
            Exit.TEMPFAIL,
        )

    def begin_call(self) -> int:
        """Count one run.updates call of the script; returns its number."""
        self.calls += 1
        return self.calls - 1

    def members_are_past(self, call: int) -> bool:
        """True if the members are past this call.

        Raises:
            Stranger: this newcomer has passed the members' place.
        """
        script_place, members_place = (self.mark, call), (self.position.mark, self.position.call)
        if self._skips(call):
            return True
        if not self.in_sync and script_place > members_place:
            raise self.stranger_error()
        return script_place < members_place

    def begin_call_with_members(self) -> None:
        """Note that the script has reached the members' call."""
        self.in_sync = True
        self.joined_at_call_end = False

    def ends_call_with_members(self, call: int | None) -> bool:
        """At the end of a call: return True if the script is in sync there.

        That is so for a newcomer that joined while the members waited for each other at the end of this call. They have
        not done yet what the script does before its next call.
        """
        is_at_end = self.joined_at_call_end and (self.mark, call) == (self.position.mark, self.position.call - 1)
        if is_at_end:
            self.in_sync, self.joined_at_call_end = True, False
        return is_at_end

    def members_are_elsewhere(self, call: int | None) -> bool:
        """After a rollback, return True if the members are at another place than this call.

        The script then leaves its call and goes to the members' place as a newcomer does. Members that trained without
        this worker for a while count as rolled back.

        Args:
            call: number of the call; None: the script is after a call, where no checkpoint is made.

        Raises:
            FallowError: the script cannot reach the members' place; a new process can.
        """
        if not self.was_rolled_back:
            return False
        self.was_rolled_back = False
        at = self.position
        if (self.mark, call) == (at.mark, at.call):
            return False
        comes_there = self.mark.inside or at.call >= (self.calls if call is None else call)
        if self.mark[:2] != at.mark[:2] or not comes_there:
            raise self.unreachable_error()
        self.in_sync, self._goes_back = False, True
        return True
