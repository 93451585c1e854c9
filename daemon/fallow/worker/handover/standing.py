"""What a member's state is worth, and what of it is still on its way."""

from __future__ import annotations

from fallow.worker.handover.intake import Intake
from fallow.worker.handover.supply import Supply
from fallow.worker.transport.group import Interrupted

FRESH, HOLDS, TORN = 0, 1, 2
"""As the script made it; the run's, complete; partly overwritten by a transfer, so that it can only receive."""


class Standing:
    """Changed by exchanges, also by those that fail."""

    def __init__(self) -> None:
        self.value = FRESH
        self.intake: Intake | None = None
        "what comes to this member while its first forward and backward run"
        self.supply: Supply | None = None
        "what others take from this member"
        self.whole = False
        "a member's script changes weights before a backward, so all of them are sent while nobody computes"

    @property
    def holds(self) -> bool:
        """It can train with its state, and give it to others."""
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
        """As `complete`, and wait until others have what they take from here: then the state may be changed."""
        if self.supply is not None:
            try:
                self.supply.settle()
            except Interrupted:
                return False
            self.supply = None
        return self.complete()

    def give_up(self) -> None:
        """Before another exchange: what is complete by now counts, what is not ends."""
        self.supply = None
        if self.intake is not None and not (self.intake.complete and self.complete()):
            self.intake.give_up()
            self.intake = None
