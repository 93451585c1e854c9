"""The state's way to members that lack it, and the whole state as one tree.

A transfer begins at a switch, when all members stand between two updates and have agreed who has the state. What others
must have before they can begin is sent in the pause. The rest arrives behind, see `Standing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from typing import Any

from fallow.worker.handover.intake import Changed, Intake
from fallow.worker.handover.standing import HOLDS, TORN, Standing
from fallow.worker.handover.supply import EARLY, Supply
from fallow.worker.prepared import extra_state, state
from fallow.worker.prepared.modes import KINDS
from fallow.worker.prepared.objects import Prepared
from fallow.worker.transport import device
from fallow.worker.transport.group import Group
from fallow.worker.transport.stream import sources


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
        extra = state.to_bytes(extra_state.read(prepared.modules), "run")
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
    extra_state.write(prepared.modules, state.from_bytes(extra, prepared.device))
    standing.intake = standing.latest = intake
    if intake.complete:
        standing.complete()
    return plain


def export_state(prepared: Prepared, plain: dict[str, Any], *, modes: Collection[str] = KINDS) -> dict[str, Any]:
    """All that a newcomer needs but for extra state; tensors are the live ones, those of modules come first."""
    return {
        "objects": prepared.export(),
        "plain": plain,
        "modes": prepared.modes.export(modes),
    }


def load_state(prepared: Prepared, tree: dict[str, Any], received: Set[int] = frozenset()) -> dict[str, Any]:
    """Put an exported state into the live objects.

    Args:
        prepared: the live objects.
        tree: as `export_state` made it; "extra", if it is there, is extra state of modules by name.
        received: see `Prepared.load`.

    Returns:
        The plain values that belong to the state.

    Raises:
        FallowError: it does not fit.
    """
    prepared.load(tree["objects"], received)
    if tree["modes"] is not None:
        prepared.modes.load(tree["modes"])
    if "extra" in tree:
        extra_state.write(prepared.modules, tree["extra"])
    plain: dict[str, Any] = tree["plain"]
    return plain
