"""What a member's state is worth, and what of it is still on its way."""

from __future__ import annotations

from fallow.worker.handover.intake import Intake
from fallow.worker.handover.supply import LATE, Supply
from fallow.worker.transport.waits import Interrupted

FRESH, HOLDS, TORN = 0, 1, 2
"""As the script made it; the run's, complete; no state that counts, so that it can only receive."""


class Standing:
    """Changed by transfers, also by those that fail."""

    def __init__(self) -> None:
        self.value = FRESH
        self.intake: Intake | None = None
        "what comes to this member while its first forward and backward run"
        self.supply: Supply | None = None
        "what others take from this member"
        self.latest: Intake | None = None
        "what came in the last transfer, for its figures; it may be complete"
        self.whole = False
        "a member's script changed weights while they were sent: from then on nobody computes meanwhile"

    @property
    def holds(self) -> bool:
        """This member's state is complete: it may train, and it may donate state."""
        return self.value == HOLDS

    def complete(self) -> bool:
        """Wait for the part of the state that comes late; False if it does not, because the group is broken.

        Raises:
            FallowError: it arrived damaged.
        """
        if self.intake is not None:
            try:
                self.intake.settle()
            except Interrupted:
                return False
            self.value = HOLDS
            self.intake = None
        return True

    def settle(self) -> bool:
        """Do as `complete`, and wait until others have what they take from here: then the state may be changed."""
        if self.supply is not None:
            try:
                self.supply.wait(LATE)
            except Interrupted:
                return False
            self.supply = None
        return self.complete()

    def drop(self, *, is_first: bool) -> None:
        """The run does not count what this member holds.

        Args:
            is_first: it is the run's first state still, which serves as one that the script has just made.
        """
        if self.holds:
            self.value = FRESH if is_first else TORN

    def give_up(self) -> None:
        """Prepare for another exchange: what is complete by now counts, what is not ends."""
        self.supply = None
        if self.intake is not None and not (self.intake.complete and self.complete()):
            self.intake.give_up()
            self.intake = None
