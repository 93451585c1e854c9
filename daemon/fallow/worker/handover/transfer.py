"""Transfers the state to members that lack it, and tracks the status of a member's state.

A transfer begins at a switch, when all members are between two updates and have agreed on the donors. The members pause
while the part of the state that receivers need first is sent. The remaining parts arrive while members compute; see
`supply`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fallow.worker.handover.intake import Changed, Intake
from fallow.worker.handover.snapshot import export_state, load_state
from fallow.worker.handover.supply import EARLY_PART, LATE_PART, Supply
from fallow.worker.prepared import modes, state
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport import device
from fallow.worker.transport.group import Group
from fallow.worker.transport.stream import sources
from fallow.worker.transport.waits import Interrupted

FRESH, HOLDS, TORN = 0, 1, 2
"""Values of a member's state: as the script made it; the run's complete state; unusable, so the member must receive."""


class StateStatus:
    """Status of a member's state, and its transfers that are still running. Failed transfers change it, too."""

    def __init__(self) -> None:
        self.value = FRESH
        self.intake: Intake | None = None
        "incomplete transfer to this member, during its first forward and backward"
        self.supply: Supply | None = None
        "transfer from this member to others"
        self.latest: Intake | None = None
        "last transfer to this member, complete or not; for statistics"
        self.weights_in_pause = False
        "True once a script changed weights while they were sent: from then on members pause until all weights are sent"

    @property
    def has_state(self) -> bool:
        """True once this member's state is complete: it may train, and it may donate state."""
        return self.value == HOLDS

    def complete(self) -> bool:
        """Wait for the late part of the state; returns False if the group breaks first.

        Raises:
            FallowError: the late part arrived damaged.
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
        """Wait for all transfers from and to this member; returns False if the group breaks first.

        After this the state may be changed. Raises as `complete`.
        """
        if self.supply is not None:
            try:
                self.supply.wait(LATE_PART)
            except Interrupted:
                return False
            self.supply = None
        return self.complete()

    def drop(self, *, is_first: bool) -> None:
        """Note that the run does not accept this member's state.

        Args:
            is_first: the state is still the run's first state, so it counts as freshly made by the script.
        """
        if self.has_state:
            self.value = FRESH if is_first else TORN

    def give_up(self) -> None:
        """End running transfers before a new generation. A transfer that has completed by now counts."""
        self.supply = None
        if self.intake is not None and not (self.intake.is_complete and self.complete()):
            self.intake.give_up()
            self.intake = None


@dataclass(frozen=True, slots=True)
class Roles:
    """The agreement of all members on a transfer; equal on all members."""

    donors: Sequence[int]
    "ranks that send the state; all hold an equal state"
    receivers: Sequence[int]
    "ranks that receive the state"
    has_begun: bool
    "True if some member holds the run's state; else the only donor's state becomes the run's first state"
    weights_in_pause: bool
    "True if all weights are sent while members pause"
    modes: Collection[str]
    "kinds of modes that are equal on all donors; receivers keep their scripts' values for the other kinds"


def transfer(
    group: Group,
    prepared: Prepared,
    state_status: StateStatus,
    roles: Roles,
    plain: Callable[[], dict[str, Any]],
    *,
    fingerprint: int,
) -> dict[str, Any] | None:
    """Send the donors' state to the receivers. All members of the group call this at the same step boundary.

    Args:
        group: the new generation's group.
        prepared: live objects; changed on receivers.
        state_status: status of this member's state; updated.
        roles: donors and receivers.
        plain: returns the plain values that belong to the state; called on donors only.
        fingerprint: fingerprint of the donors' weights; receivers compare their weights with it.

    Returns:
        On a receiver the donors' plain values, otherwise None.

    Raises:
        Interrupted: the group broke. Members that held the state still hold it.
        FallowError: the state does not fit, arrived damaged, or the donors' states differ.
    """
    state_status.latest = None
    plan = sources(roles.donors, roles.receivers, several_connections=device.asynchronous(group.device))
    if group.rank in plan:
        return _receive(group, prepared, state_status, plan[group.rank], fingerprint, has_begun=roles.has_begun)
    pieces = sum(row.count(group.rank) for row in plan.values())
    if pieces:
        encoded = state.encode(export_state(prepared, plain(), modes=roles.modes), "run")
        extra = state.to_bytes(modes.read_extra(prepared.modules), "run")
        state_status.supply = Supply(group, prepared, encoded, extra, pieces, weights_in_pause=roles.weights_in_pause)
        state_status.supply.wait(EARLY_PART)
    state_status.value = HOLDS
    return None


def _receive(
    group: Group,
    prepared: Prepared,
    state_status: StateStatus,
    donors: Sequence[int],
    fingerprint: int,
    *,
    has_begun: bool,
) -> dict[str, Any]:
    # A usable state is kept until the whole new state has arrived.
    in_place = has_begun and not state_status.has_state
    if in_place:
        state_status.value = TORN
    intake = Intake(group, prepared, donors, in_place=in_place)
    try:
        tree, extra = intake.wait_weights()
        plain = load_state(prepared, tree, intake.received)
        intake.check(fingerprint)
    except Changed:
        state_status.weights_in_pause = True
        raise
    if in_place:
        intake.adopt(tree["objects"])
    modes.write_extra(prepared.modules, state.from_bytes(extra, prepared.device))
    state_status.intake = state_status.latest = intake
    if intake.is_complete:
        state_status.complete()
    return plain
