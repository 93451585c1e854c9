"""Which checkpoints a run has, which may be used, and which may be deleted.

A checkpoint belongs to the history that led to it. Once a later generation has begun before its step (a rollback, or
all members were lost before the checkpoint was known), it is set aside: going on from it would mix two histories.
"""

from __future__ import annotations

from fallow.core.membership.messages import Checkpoint
from fallow.core.membership.records import Saved
from fallow.core.membership.roster import Roster
from fallow.model import ChangeKind, RollbackReport


def usable(roster: Roster) -> list[Checkpoint]:
    """Newest step first."""
    good = [saved.checkpoint for saved in roster.checkpoints.saved if saved.usable]
    return sorted(good, key=lambda checkpoint: checkpoint.step, reverse=True)


def add(roster: Roster, new: Checkpoint) -> Saved | None:
    """A checkpoint is complete. None: it was known."""
    known = roster.checkpoints.saved
    if any(saved.checkpoint.path == new.path for saved in known):
        return None
    saved = Saved(checkpoint=new, aside=_is_superseded(roster, new))
    known.append(saved)
    roster.root.unsaved_reason = ""
    roster.mark("checkpoints")
    return saved


def _is_superseded(roster: Roster, new: Checkpoint) -> bool:
    """The run has gone on from before this checkpoint since the generation that wrote it."""
    change = roster.root.change
    if change is not None and change.kind is ChangeKind.START and change.generation > new.generation:
        return True
    begun = roster.history.first_steps + [(back.generation, back.to_step) for back in roster.history.rollbacks]
    return any(generation > new.generation and first < new.step for generation, first in begun)


def take_spare(roster: Roster, keep: int) -> list[str]:
    """Take out what is not needed any more, and return the paths. Call it only while a node has the state.

    Args:
        roster: of the run.
        keep: so many of the newest usable ones stay, besides those that were asked for by hand. One that was set aside
            or is damaged stays until so many usable ones have come after it.
    """
    known = roster.checkpoints.saved
    ordinary = [saved for saved in known if not saved.checkpoint.asked]
    good = sorted((saved for saved in ordinary if saved.usable), key=lambda saved: saved.checkpoint.step)
    spare = good[: max(0, len(good) - keep)]
    for number, saved in enumerate(known):
        if saved in ordinary and not saved.usable and sum(later.usable for later in known[number:]) >= keep:
            spare.append(saved)
    for saved in spare:
        known.remove(saved)
        roster.mark("checkpoints")
    return [saved.checkpoint.path for saved in spare]


def note_damage(roster: Roster, path: str, reason: str) -> bool:
    """A checkpoint could not be loaded. True: that is news."""
    for saved in roster.checkpoints.saved:
        if saved.checkpoint.path == path and not saved.problem:
            saved.problem = reason
            roster.mark("checkpoints")
            return True
    return False


def roll_back(roster: Roster, step: int) -> int:
    """Set newer checkpoints aside. Returns the step from which the run goes back."""
    reached = [saved.checkpoint.step for saved in roster.checkpoints.saved if not saved.aside]
    front = max([roster.front, step, *reached])
    for saved in roster.checkpoints.saved:
        saved.aside = saved.aside or saved.checkpoint.step > step
    went_back = RollbackReport(generation=roster.root.highest + 1, from_step=front, to_step=step)
    roster.history.rollbacks.append(went_back)
    for node in roster.nodes.values():
        roster.touch(node).step = min(node.step, step)
    roster.root.front = min(roster.root.front, step)
    roster.mark("checkpoints")
    roster.mark("history")
    return front
