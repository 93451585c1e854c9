"""Where the script is: which `run.epochs` and `run.steps` it has begun, beside where the members are (`Position`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fallow.model import Exit, FallowError
from fallow.worker.position import Position
from fallow.worker.together import Asking


class Place:
    """The script's own counters. Not replicated: a newcomer's script comes from the top and meets the members.

    Args:
        in_sync: the script is where the position says; True from the start in a fixed world.
    """

    def __init__(self, *, in_sync: bool) -> None:
        self.position = Position()
        "of the run, replaced at each change of the membership"
        self.joined = False
        "this worker has taken part in a first exchange"
        self.since = 0
        "generation of that exchange"
        self.in_sync = in_sync
        "the script has reached the place that `position` names"
        self.wrong_epoch = False
        "`epochs` handed out another epoch than the members are in"
        self.went_back = False
        "the members were rolled back to a checkpoint, and this script has not yet looked where that is"
        self.epoch_entered: tuple[int, int] | None = None
        "(number of the run.epochs loop, epoch) that the script is in"
        self.epochs_in_loop = 1
        "epochs of the run.epochs loop that the script is in"
        self.loops = 0
        "run.epochs loops that the script has begun"
        self.calls = 0
        "run.steps calls that the script has begun"
        self.agreed = 0
        "exchanges outside of bodies that are complete, see `together`"
        self.answer = 0.0
        "what the last of them gave"
        self.asking: Asking | None = None
        "the one that the script waits in"
        self.over: int | None = None
        "run.steps call whose end the members had agreed on before this script came to it"
        self.doubtful = False
        "the last step has acted on this member without a sum that others may have: theirs counts"

    @property
    def epoch(self) -> int:
        """Epoch of run.epochs if the script is in such a loop, else passes over the data."""
        return self.epoch_entered[1] if self.epoch_entered is not None else self.position.data_epoch

    def epochs(self, n: int, hint: Callable[[], int], end_call: Callable[[], None]) -> Iterator[int]:
        """As `range(n)`, but a newcomer begins at the members' epoch, of which the head gives a `hint`.

        `end_call` agrees with the others on the end of a call that the script has left by itself.
        """
        end_call()
        number = self.loops
        self.loops += 1
        self.epochs_in_loop = n
        if self.joined and number < self.position.loop:
            return  # the members are past this loop
        epoch = self.position.loop_epoch if self.joined else hint()
        while epoch < n:
            self.epoch_entered = (number, epoch)
            if self.in_sync and self.joined:
                self.position.begin_epoch(epoch)
            yield epoch
            end_call()
            if self.wrong_epoch:
                self.wrong_epoch = False
                if self.position.loop != number:
                    break
                epoch = self.position.loop_epoch
                self.calls = self.position.loop_call
                continue
            epoch += 1
            self.position.begin_epoch(epoch)
        else:
            self.position.finish_loop()
        self.epoch_entered = None
        self.epochs_in_loop = 1

    def begin_call(self) -> int:
        """Count one run.steps call of the script; returns its number."""
        self.calls += 1
        return self.calls - 1

    def elsewhere(self, call: int) -> bool:
        """After a rollback, inside the call of that number: True if the members went back to another place than here.

        The script then leaves its call and comes to that place through `epochs`, as a newcomer does.

        Raises:
            FallowError: it cannot come there; another process can.
        """
        if not self.went_back:
            return False
        self.went_back = False
        at = self.position
        if self.epoch_entered is None:
            reachable = here = at.call == call
        else:
            here = self.epoch_entered == (at.loop, at.loop_epoch) and at.call == call
            reachable = self.epoch_entered[0] == at.loop
        if not reachable:
            raise FallowError(
                f"the run was rolled back to step {at.step}, in a part of the script that this process has left; "
                "it ends, and the run goes on from there with new processes",
                Exit.TEMPFAIL,
            )
        if not here:
            self.wrong_epoch, self.in_sync = True, False
        return not here

    def meet(self, call: int) -> int:
        """Just joined, inside the call of that number: returns the call's number among the members'."""
        at = self.position
        if self.epoch_entered is None:
            return call
        # Inside run.epochs: the members' numbering counts from the epoch's first call.
        self.wrong_epoch = self.epoch_entered != (at.loop, at.loop_epoch)
        self.calls = at.loop_call + 1
        return at.loop_call
