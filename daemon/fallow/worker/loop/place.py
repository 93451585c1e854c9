"""Where the members are in the run, and where the script is: which `run.epochs` and `run.updates` it has begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from fallow.core.membership.failures import Stranger
from fallow.model import Exit, FallowError

_ASTRAY = (
    "this newcomer's script is past the place where the members are (step {step}) and has not come by there: the "
    "conditions around run.updates are others now than when the members came to them. The members go on without it. "
    "Write `for epoch in run.epochs(n):` or max_steps, not `while run.step < n:`; and end a loop early by what a "
    "prepared object keeps"
)


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
    call: int = 0
    "number of the call of run.updates in progress, or the next one"
    op: int = 0
    "finished operations: inner loops and joint calls"
    outcome: bytes = b""
    "what the last of them concluded"
    concluded: int = 0
    "generation + 1 in which it did"
    acts: int = 0
    "steps of prepared optimizers since the last inner loop"
    outside_since: int | None = None
    "`op` when the call before ended, or this epoch began; None: in a call"
    passes: int = 0
    "finished passes in this call"
    call_steps: int = 0
    "finished steps in this call"
    loop: int = 0
    "number of the run.epochs loop in progress, or the next one"
    inside: bool = False
    "in that loop, not in front of it"
    loop_epoch: int = 0
    "its current epoch"
    loop_call: int = 0
    "number of the first run.updates call in that epoch, or since the loop before"
    loss: float | None = None
    "mean of the figure `loss` in the last step that had one"

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
        self.outside_since = self.op
        if self.index:
            self.index = 0
            self.data_epoch += 1
        self.call += 1
        self.passes = self.call_steps = 0

    def enter_epoch(self, epoch: int | None) -> None:
        """Enter an epoch of the current run.epochs loop; None: count that loop as finished."""
        self.outside_since = self.op
        self.loop += epoch is None
        self.inside = epoch is not None
        self.loop_epoch = epoch or 0
        self.loop_call = self.call


class Place:
    """The script's own counters. Not replicated: a newcomer's script comes from the top and meets the members."""

    def __init__(self, *, in_sync: bool) -> None:
        self.position = Position()
        "of the run, replaced at each change of the membership"
        self.joined = False
        "this worker has taken part in a first exchange"
        self.since = 0
        "generation of that exchange"
        self.in_sync = in_sync
        "the script has reached the place that `position` names; from the start in a fixed world"
        self.wrong_epoch = False
        "`epochs` handed out another epoch than the members are in"
        self.went_back = False
        "the members were rolled back, or trained without this worker; this script has not yet looked where they are"
        self.came_at_end = False
        "its state is the members' of the moment in which a call of theirs ended, and they have not begun another one"
        self._goes_back = False
        "this script was in sync, and since then it comes to the members' place as a newcomer's does"
        self.epoch_entered: tuple[int, int] | None = None
        "(number of the run.epochs loop, epoch) that the script is in"
        self._loop_left = False
        "the script has left by itself the run.epochs loop that the members are in"
        self.epochs_in_loop = 1
        "epochs of the run.epochs loop that the script is in"
        self.loops = 0
        "run.epochs loops that the script has begun"
        self.calls = 0
        "run.updates calls that the script has begun; a newcomer's are numbered as the members' where it comes to them"
        self.asked = 0
        "run.mean and run.barrier that this script has come by since its last run.updates call, or its epoch began"

    @property
    def epoch(self) -> int:
        """Epoch of run.epochs if the script is in such a loop, else passes over the data."""
        return self.epoch_entered[1] if self.epoch_entered is not None else self.position.data_epoch

    def epochs(self, n: int, hint: Callable[[], int], end_call: Callable[[], None]) -> Iterator[int]:
        """As `range(n)`, but a newcomer begins at the members' epoch, of which the head gives a `hint`.

        `end_call` agrees with the others on the end of a call that the script has left by itself.
        """
        end_call()
        if self.epoch_entered is not None:  # left by break, though somebody still holds what that loop goes over
            self._break_loop()
            self.finish_left_loop()
        number = self.loops
        if self.joined and number < self.position.loop:
            self.loops += 1
            self._leave_loop()
            return  # the members are past this loop
        epoch = self.position.loop_epoch if self.joined else hint()
        if not self.astray:
            self._enter_epoch(epoch)
        elif (number, True) == self._members_where:
            self._jump()
        else:
            raise self.stranger()
        self.loops += 1
        self.epochs_in_loop = n
        try:
            while epoch < n:
                self.epoch_entered = (number, epoch)
                yield epoch
                if self.epoch_entered != (number, epoch):
                    raise FallowError(
                        "run.epochs inside of a run.epochs loop: where newcomers begin can be told of one loop only; "
                        "write `range` for the inner one",
                        Exit.DATA,
                    )
                end_call()
                if self.wrong_epoch:
                    self.wrong_epoch = False
                    if self._members_where != (number, True):
                        self._leave_loop()
                        return
                    epoch = self.position.loop_epoch
                    self._jump()
                    continue
                if self.astray:
                    raise self.stranger()
                epoch += 1
                self._enter_epoch(epoch)
            self._enter_epoch(None)
            self._leave_loop()
        except GeneratorExit:
            if self.epoch_entered is not None and self.epoch_entered[0] == number:
                self._break_loop()
            raise

    def _enter_epoch(self, epoch: int | None) -> None:
        self.asked = 0
        self.position.enter_epoch(epoch)

    def _jump(self) -> None:
        """To the beginning of the epoch that the members are in, or to behind the loop that they have left last."""
        self.calls, self.asked = self.position.loop_call, 0

    def _leave_loop(self) -> None:
        self.epoch_entered = None
        self.epochs_in_loop = 1
        self.wrong_epoch = False
        if self.joined and not self.in_sync and self._where == self._members_where:
            self._jump()

    def _break_loop(self) -> None:
        self._loop_left = not self.astray
        self._leave_loop()

    def finish_left_loop(self) -> None:
        """Count a run.epochs loop that the script has left by itself, now that the calls in it are over."""
        if self._loop_left:
            self._loop_left = False
            self._enter_epoch(None)

    @property
    def _where(self) -> tuple[int, bool]:
        """The run.epochs loop that the script is in, or in front of."""
        return (self.loops, False) if self.epoch_entered is None else (self.epoch_entered[0], True)

    @property
    def _members_where(self) -> tuple[int, bool]:
        return self.position.loop, self.position.inside

    @property
    def astray(self) -> bool:
        """True of a newcomer that has neither come to the members' call nor is in front of it.

        One in front of it does what they do between two calls: it begins and ends loops and epochs with them.
        """
        at = self.position
        there = self._where == self._members_where and self.calls == at.call and not at.call_steps
        return self.joined and not self.in_sync and (self.wrong_epoch or not there)

    def stranger(self) -> FallowError:
        """What to say of such a newcomer, or of a member that the rolled back run has not met again."""
        if self._goes_back:
            return self.unreachable()
        return Stranger(_ASTRAY.format(step=self.position.step))

    def unreachable(self) -> FallowError:
        """What to say where the script cannot come to the members' place, and another process can."""
        return FallowError(
            f"the members are at step {self.position.step}, in a part of the script that this process has left or "
            "does not come to; it ends, and the run goes on with new processes",
            Exit.TEMPFAIL,
        )

    def behind(self, call: int) -> bool:
        """True if the members are past this call.

        Raises:
            Stranger: this newcomer is past the members' place.
        """
        if self.wrong_epoch or self._where < self._members_where:
            return True
        if not self.in_sync and (self._where, call) > (self._members_where, self.position.call):
            raise self.stranger()
        return call < self.position.call

    def begin_call(self) -> int:
        """Count one run.updates call of the script; returns its number."""
        self.calls += 1
        self.asked = 0
        return self.calls - 1

    def begin_call_with_members(self) -> None:
        """The script is in the call that the members are in."""
        self.in_sync = True
        self.came_at_end = False
        self.position.outside_since = None

    def ends_call_with_members(self, call: int | None) -> bool:
        """The script has come to the end of that call: True if it is in sync there.

        That is where a newcomer came while the members waited for each other there: what the script does from there on
        to the next call, they have not done yet.
        """
        here = self.came_at_end and not self.wrong_epoch and self._where == self._members_where
        if here and call == self.position.call - 1:
            self.in_sync, self.came_at_end = True, False
            return True
        return False

    def begin_asking(self) -> bool:
        """Count one `run.mean` or `run.barrier` outside of a call.

        A newcomer may have come while the members waited for each other in one. There it is in sync: what the script
        does from there on to the next call, the members have not done yet.

        Returns:
            True if this is where that newcomer came to the members.
        """
        self.asked += 1
        since = self.position.outside_since
        if not self.joined or self.in_sync or self.astray or since is None:
            return False
        self.in_sync = 0 <= self.position.op - since <= self.asked  # below 0: counted by processes before a suspension
        return self.in_sync

    @property
    def answered(self) -> bool:
        """The members have the answer to what the script asks for as it comes to them."""
        return self.position.outside_since is not None and self.asked == self.position.op - self.position.outside_since

    def elsewhere(self, call: int | None) -> bool:
        """After a rollback, inside the call of that number: True if the members are in another place than here.

        `call` is None behind a call, which is no place of a checkpoint. The script then leaves its call and comes to
        that place as a newcomer does. The same after a while in which the members trained without this worker.

        Raises:
            FallowError: it cannot come there; another process can.
        """
        if not self.went_back:
            return False
        self.went_back = False
        at = self.position
        reachable = self._where == self._members_where
        if self.epoch_entered is None:
            here = reachable and at.call == call
            reachable = reachable and at.call >= (self.calls if call is None else call)
        else:
            here = reachable and self.epoch_entered[1] == at.loop_epoch and at.call == call
        if not reachable:
            raise self.unreachable()
        if not here:
            self.wrong_epoch = self.epoch_entered is not None
            self.in_sync, self._goes_back = False, True
        return not here

    def trained_without(self) -> None:
        """The members trained without this worker, which had met them: the script has to look where they are."""
        at = self.position
        self.went_back = self.in_sync
        if not self.in_sync and self.epoch_entered is not None:
            self.wrong_epoch = self.wrong_epoch or not at.inside or self.epoch_entered != (at.loop, at.loop_epoch)

    def meet(self, call: int) -> int:
        """Just joined, inside the call of that number: returns the call's number among the members'."""
        at = self.position
        if self.epoch_entered is not None:
            self.wrong_epoch = not at.inside or self.epoch_entered != (at.loop, at.loop_epoch)
        elif self._where != self._members_where:
            return call
        # The members' numbering counts from the first call in the epoch, or behind a loop.
        self.calls = at.loop_call + 1
        return at.loop_call
