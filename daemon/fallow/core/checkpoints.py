"""Which checkpoints a run has, which may be used, which go, and going back to one. Part of the membership machine.

A checkpoint belongs to the history that led to it. Once a later generation has begun before its step (a rollback, or
every member was lost before the checkpoint was known), it is set aside: going on from it would mix two histories.
"""

from __future__ import annotations

from fallow.core import events as ev
from fallow.core.changes import Changes
from fallow.core.effects import Effects
from fallow.core.roster import Roster, Saved
from fallow.model import ChangeKind, CheckpointDamaged, Checkpointed, CheckpointFailed, RollbackReport, RunStatus


class Checkpoints:
    """Keeps the roster's list of checkpoints."""

    def __init__(self, roster: Roster, effects: Effects, changes: Changes) -> None:
        self._roster = roster
        self._effects = effects
        self._changes = changes

    def written(self, event: ev.CheckpointWritten) -> None:
        """One is complete on disk; older ones may go."""
        r, new = self._roster, event.written
        if any(saved.written.path == new.path for saved in r.checkpoints):
            return
        aside = superseded(r, new)
        r.checkpoints.append(Saved(written=new, aside=aside))
        r.checkpoint_problem = ""
        text = f"checkpoint of step {new.step}" + (": set aside, the run went on from an earlier step" if aside else "")
        self._effects.record("checkpoint", text, path=new.path, nbytes=new.nbytes, took_s=new.took_s)
        if not self._held():
            return  # one of them may be being loaded
        for saved in spare(r.checkpoints, event.keep):
            r.checkpoints.remove(saved)
            self._effects.add(ev.RemoveCheckpoint(saved.written.path))

    def given_up(self, failed: CheckpointFailed, at: float) -> None:
        """One could not be written. Several members may say so; it is told once."""
        r, which = self._roster, (failed.generation, failed.step)
        if r.checkpoint_given_up != which:
            self._effects.record("checkpoint", failed.reason, worker=failed.worker, failed=True)
        r.checkpoint_given_up, r.checkpoint_problem = which, failed.reason

    def unusable(self, damaged: CheckpointDamaged, at: float) -> None:
        """One could not be loaded; the member tries the next older one by itself."""
        r = self._roster
        for saved in r.checkpoints:
            if saved.written.path == damaged.path and not saved.problem:
                saved.problem = damaged.reason
                left = r.usable_checkpoints()
                then = f"that of step {left[0].step} is used" if left else "no older one is left"
                self._effects.record("damaged", f"{damaged.reason}; {then}", path=damaged.path, worker=damaged.worker)
                if not left and not self._held():
                    # Never from the beginning, silently: somebody may have a good copy.
                    self._changes.end(
                        RunStatus.FAILED,
                        f"{damaged.reason}; no older checkpoint is left. Put a good copy in its place and submit the "
                        "run again, or begin anew",
                    )

    def _held(self) -> bool:
        """A living worker has the state."""
        r = self._roster
        return any(worker.has_state and r.alive(name) for name, worker in r.workers.items())

    def roll_back(self, event: ev.RollbackWanted) -> None:
        """Go back to a usable checkpoint: newer ones are set aside.

        Members train on until the generation is made that drops what they hold.
        """
        r, step = self._roster, event.step
        # The last words of those who left may have been of an earlier step than the checkpoint that they left behind.
        reached = [saved.written.step for saved in r.checkpoints if not saved.aside]
        front = max([r.front, *reached])
        for saved in r.checkpoints:
            saved.aside = saved.aside or saved.written.step > step
        r.rollback = RollbackReport(generation=r.high + 1, from_step=max(front, step), to_step=step)
        reason = f"rolled back to step {step}"
        self._effects.record("rollback", f"{reason}, from step {front}", step=step, from_step=front)
        if r.change is not None and not r.change.committed and not r.change.interrupt:
            # It would hand over a state that is to be dropped, or load another checkpoint.
            self._changes.burn(event.at, reason)
        self._changes.retry_at = event.at


def superseded(roster: Roster, written: Checkpointed) -> bool:
    """True if the run has gone on from before this checkpoint since the generation that wrote it."""
    change, wanted = roster.change, roster.rollback
    if wanted is not None and written.step > wanted.to_step:
        return True
    later = [(g.generation, g.first_step) for g in roster.history if g.first_step is not None]
    later += [(rollback.generation, rollback.to_step) for rollback in roster.rollbacks]
    if change is not None and change.kind is ChangeKind.START and change.generation > written.generation:
        return True
    return any(generation > written.generation and first < written.step for generation, first in later)


def spare(checkpoints: list[Saved], keep: int) -> list[Saved]:
    """Those that may be deleted.

    Args:
        checkpoints: all, in the order in which they became known.
        keep: this many of the newest usable ones stay, besides all that were asked for by hand. One that was set
            aside or is damaged stays until so many usable ones have come after it.
    """
    ordinary = [saved for saved in checkpoints if not saved.written.asked]
    good = sorted((saved for saved in ordinary if saved.usable), key=lambda saved: saved.written.step)
    gone = good[: max(0, len(good) - keep)]
    for number, saved in enumerate(checkpoints):
        if saved in ordinary and not saved.usable and sum(s.usable for s in checkpoints[number:]) >= keep:
            gone.append(saved)
    return gone
