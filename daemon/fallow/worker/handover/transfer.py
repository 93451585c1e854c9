"""The state's way to members that lack it, and what a member's state is worth meanwhile.

A transfer begins at a switch, when all members stand between two updates and have agreed who has the state. What others
must have before they can begin is sent in the pause. The rest arrives behind, see `Standing`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fallow.worker.handover.intake import Changed, Intake
from fallow.worker.handover.snapshot import export_state, load_state
from fallow.worker.handover.supply import EARLY, LATE, Supply
from fallow.worker.prepared import modes, state
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport import device
from fallow.worker.transport.group import Group
from fallow.worker.transport.stream import sources
from fallow.worker.transport.waits import Interrupted

FRESH, HOLDS, TORN = 0, 1, 2
"""As the script made it; the run's, complete; no state that counts, so that it can only receive."""


class Standing:
    """What a member's state is worth, and what of it is still on its way. Transfers change it, also those that fail."""

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


@dataclass(frozen=True, slots=True)
class Roles:
    """What all members have agreed on; the same on all."""

    donors: Sequence[int]
    "ranks whose state counts; all hold the same"
    receivers: Sequence[int]
    "ranks that get it"
    begun: bool
    "somebody holds the run's state; else the state of the only donor is the run's first"
    whole: bool
    "everything is sent in the pause"
    modes: Collection[str]
    "kinds of modes that the donors have switched alike; in the others receivers stay as their scripts made them"


def transfer(
    group: Group,
    prepared: Prepared,
    standing: Standing,
    roles: Roles,
    plain: Callable[[], dict[str, Any]],
    *,
    fingerprint: int,
) -> dict[str, Any] | None:
    """Bring the donors' state to the receivers. All members of the group call it at the same boundary.

    Args:
        group: the new generation's.
        prepared: live objects; changed on receivers.
        standing: what this member's state is worth; set to what it is worth afterwards, and what is on its way.
        roles: who gives and who receives.
        plain: gives the donors' plain values that belong to the state; called on donors only.
        fingerprint: of the donors' weights; a receiver compares what it has got.

    Returns:
        On a receiver the donors' plain values; None on the others.

    Raises:
        Interrupted: the group broke. Who held the state still does.
        FallowError: the state does not fit, arrived damaged, or the donors' states differ.
    """
    standing.latest = None
    plan = sources(roles.donors, roles.receivers, several_lines=device.asynchronous(group.device))
    if group.rank in plan:
        return _receive(group, prepared, standing, plan[group.rank], fingerprint, begun=roles.begun)
    pieces = sum(row.count(group.rank) for row in plan.values())
    if pieces:
        encoded = state.encode(export_state(prepared, plain(), modes=roles.modes), "run")
        extra = state.to_bytes(modes.read_extra(prepared.modules), "run")
        standing.supply = Supply(group, prepared, encoded, extra, pieces, whole=roles.whole)
        standing.supply.wait(EARLY)
    standing.value = HOLDS
    return None


def _receive(
    group: Group, prepared: Prepared, standing: Standing, donors: Sequence[int], fingerprint: int, *, begun: bool
) -> dict[str, Any]:
    # An old state, or the very first one, is worth something until a whole new one is here.
    in_place = begun and not standing.holds
    if in_place:
        standing.value = TORN
    intake = Intake(group, prepared, donors, in_place=in_place)
    try:
        tree, extra = intake.wait_weights()
        plain = load_state(prepared, tree, intake.received)
        intake.check(fingerprint)
    except Changed:
        standing.whole = True
        raise
    if in_place:
        intake.adopt(tree["objects"])
    modes.write_extra(prepared.modules, state.from_bytes(extra, prepared.device))
    standing.intake = standing.latest = intake
    if intake.complete:
        standing.complete()
    return plain
