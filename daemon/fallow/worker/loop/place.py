"""Where the members are in the run, and where the script is: which `run.epochs` and `run.updates` it has begun.

A place is a `Mark`, the number of a call of `run.updates` behind that mark, and whether the call is at work. Places are
ordered as a script comes to them. A newcomer's script comes from the top: it skips what is in front of the members'
place, and is in sync where the two meet.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from fallow.core.membership.failures import Stranger
from fallow.model import Exit, FallowError

_ASTRAY = (
    "this newcomer's script is past the place where the members are (step {step}) and has not come by there: the "
    "conditions around run.updates are others now than when the members came to them. The members go on without it. "
    "Write `for epoch in run.epochs(n):` or max_steps, not `while run.step < n`; and end a loop early by what a "
    "prepared object keeps"
)


class Mark(NamedTuple):
    """From where calls are counted: the beginning of an epoch of a `run.epochs` loop, or the place behind a loop."""

    loop: int = 0
    "number of the run.epochs loop, or of the next one"
    inside: bool = False
    "in that loop, not in front of it"
    epoch: int = 0
    "of that loop"


class Position(msgspec.Struct, kw_only=True):
    """Where the members are: replicated on each of them, part of the state that a newcomer receives."""

    step: int = 0
    "finished optimizer steps"
    samples: int = 0
    "samples consumed by them"
    data_epoch: int = 0
    "number of the pass over data in progress; with the seed it fixes the order of samples"
    index: int = 0
    "finished steps in this pass"
    op: int = 0
    "finished operations: inner loops and joint calls"
    outcome: bytes = b""
    "what the last of them concluded"
    concluded: int = 0
    "generation + 1 in which it did"
    acts: int = 0
    "steps of prepared optimizers since the last inner loop"
    passes: int = 0
    "finished passes in this call"
    call_steps: int = 0
    "finished steps in this call"
    loop: int = 0
    inside: bool = False
    loop_epoch: int = 0
    "these three: see `Mark`"
    call: int = 0
    "number behind that mark of the run.updates call in progress, or of the next one"
    loss: float | None = None
    "mean of the figure `loss` in the last step that had one"

    @property
    def mark(self) -> Mark:
        """Of the call."""
        return Mark(self.loop, self.inside, self.loop_epoch)

    def finish_operation(self, outcome: bytes, generation: int) -> None:
        """Count one operation that every member of that generation can finish."""
        self.op += 1
        self.outcome, self.concluded = outcome, generation + 1

    def finish_step(self, samples: int, *, last: bool) -> None:
        """Count one finished step of `samples` samples; `last`: of its pass."""
        self.step += 1
        self.samples += samples
        self.call_steps += 1
        self.index += 1
        if last:
            self.index = 0
            self.passes += 1
            self.data_epoch += 1

    def finish_call(self) -> None:
        """Count one finished run.updates call; a pass that `max_steps` cut short is not taken up again."""
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
        """From its fields, as members and checkpoints give them."""
        position = msgspec.convert(saved, Position)
        # Checkpoints of older versions count calls from the script's beginning, and tell where the epoch began.
        position.call -= saved.get("loop_call", 0)
        return position


class Place:
    """The script's own counters. Not replicated: a newcomer's script comes from the top and meets the members."""

    def __init__(self, *, in_sync: bool) -> None:
        self.position = Position()
        "of the run, replaced at each change of the membership"
        self.has_joined = False
        "this worker has taken part in a first exchange"
        self.joined_in = 0
        "generation of that exchange"
        self.in_sync = in_sync
        "the script has reached the place that `position` names; from the start in a fixed world"
        self.was_rolled_back = False
        "the members were rolled back, or trained without this worker; this script has not yet looked where they are"
        self.joined_at_call_end = False
        "its state is the members' of the moment in which a call of theirs ended, and they have not begun another one"
        self._goes_back = False
        "this script was in sync, and since then it comes to the members' place as a newcomer's does"
        self.mark = Mark()
        self.calls = 0
        "run.updates calls that the script has begun behind its mark"
        self.epochs_in_loop = 1
        "epochs of the run.epochs loop that the script is in"
        self._has_left_loop = False
        "the script has left by itself the run.epochs loop that the members are in"

    @property
    def epoch(self) -> int:
        """Epoch of run.epochs if the script is in such a loop, else passes over the data."""
        return self.mark.epoch if self.mark.inside else self.position.data_epoch

    # ------------------------------------------------------------------------------------------- loops over epochs

    def epochs(self, n: int, hint: Callable[[], int], end_call: Callable[[], None]) -> Iterator[int]:
        """As `range(n)`, but a newcomer begins at the members' epoch, of which the head gives a `hint`.

        `end_call` agrees with the others on the end of a call that the script has left by itself.
        """
        end_call()
        if self.mark.inside:  # left by break, though somebody still holds what that loop goes over
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
                        "run.epochs inside of a run.epochs loop: where newcomers begin can be told of one loop only; "
                        "write `range` for the inner one",
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
        """The script does so together with the members."""
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
        """Count a run.epochs loop that the script has left by itself, now that the calls in it are over."""
        if self._has_left_loop:
            self._has_left_loop = False
            self._come_to(self.mark)

    # ------------------------------------------------------------------------------------- towards the members' place

    @property
    def is_astray(self) -> bool:
        """True of a newcomer that has neither come to the members' call nor is in front of it.

        One in front of it does what they do between two calls: it begins and ends loops and epochs with them.
        """
        at = self.position
        is_in_front = (self.mark, self.calls) == (at.mark, at.call) and not at.call_steps
        return self.has_joined and not self.in_sync and not is_in_front

    def _skips(self, call: int) -> bool:
        """True if the script, at a call of that number, comes to the members' place with another turn of its loop."""
        at = self.position
        is_past = self.mark != at.mark or (self._goes_back and call > at.call)
        return not self.in_sync and self.mark.inside and is_past

    def stranger_error(self) -> FallowError:
        """What to say of such a newcomer, or of a member that the rolled back run has not met again."""
        if self._goes_back:
            return self.unreachable_error()
        return Stranger(_ASTRAY.format(step=self.position.step))

    def unreachable_error(self) -> FallowError:
        """What to say where the script cannot come to the members' place, and another process can."""
        return FallowError(
            f"the members are at step {self.position.step}, in a part of the script that this process has left or "
            "does not come to; it ends, and the run goes on with new processes",
            Exit.TEMPFAIL,
        )

    def begin_call(self) -> int:
        """Count one run.updates call of the script; returns its number."""
        self.calls += 1
        return self.calls - 1

    def members_are_past(self, call: int) -> bool:
        """True if the members are past this call.

        Raises:
            Stranger: this newcomer is past the members' place.
        """
        script_place, members_place = (self.mark, call), (self.position.mark, self.position.call)
        if self._skips(call):
            return True
        if not self.in_sync and script_place > members_place:
            raise self.stranger_error()
        return script_place < members_place

    def begin_call_with_members(self) -> None:
        """The script is in the call that the members are in."""
        self.in_sync = True
        self.joined_at_call_end = False

    def ends_call_with_members(self, call: int | None) -> bool:
        """The script has come to the end of that call: True if it is in sync there.

        That is where a newcomer came while the members waited for each other there: what the script does from there on
        to the next call, they have not done yet.
        """
        is_at_end = self.joined_at_call_end and (self.mark, call) == (self.position.mark, self.position.call - 1)
        if is_at_end:
            self.in_sync, self.joined_at_call_end = True, False
        return is_at_end

    def members_are_elsewhere(self, call: int | None) -> bool:
        """After a rollback, inside the call of that number: True if the members are in another place than here.

        `call` is None behind a call, which is no place of a checkpoint. The script then leaves its call and comes to
        that place as a newcomer does. The same after a while in which the members trained without this worker.

        Raises:
            FallowError: it cannot come there; another process can.
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
