"""A newcomer's first update, for which nobody waits: whole, but for one batch only, and on throw-away state.

It compiles, makes the optimizers' state, starts loader processes and fixes the order in which gradients come. Then all
that was prepared is put back; the members' state replaces it when the newcomer comes to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fallow.worker.data import rng
from fallow.worker.handover.snapshot import Snapshot
from fallow.worker.loop.figures import Figures
from fallow.worker.loop.member import Member

if TYPE_CHECKING:
    from fallow.worker.loop.update import Update
    from fallow.worker.loop.updates import Loop


class RehearsedShards(Iterator[Any]):
    """One batch, whose gradients stay as autograd made them.

    Args:
        loop: of the run.
        update: which this is a part of.
        phase: its name.
    """

    def __init__(self, loop: Loop, update: Update, phase: str) -> None:
        self._member = loop.member
        self._update = update
        self.phase = phase
        self.begun = self.inside = False
        self._figures = Figures()

    def __next__(self) -> Any:
        member = self._member
        if self.begun:
            self.inside = False
            member.reduction.end_body()
            self._figures.send()
            member.group.certain()
            told = self._figures.told()
            self._update.close(self, None, figures={name: sum(of.values()) for name, of in told.items()})
            raise StopIteration
        self.begun = True
        assert member.source is not None
        member.seed_random("batch", 0, 0)
        if 0 not in self._update.batches:
            self._update.batches[0] = member.source.example(member.reached)
        batch = self._update.batches[0]
        member.seed_random("body", 0, self.phase, 0)
        member.reduction.begin(self.phase)
        member.reduction.begin_body(0.0, final=True, live=False)
        self.inside = True
        return batch

    def note(self, figures: dict[str, Any]) -> None:
        """Figures of the one shard."""
        self._figures.note(0, 1.0, figures)

    def leave(self) -> str:
        """The script goes on without an end of this; returns what to say of it."""
        return "the inner loop was left before its end, in a newcomer's rehearsal"

    @property
    def last_out(self) -> bool:
        """The script has the one shard in its hands."""
        return self.inside

    def complete(self) -> bool:
        """Behind the backward of the one shard, for the short loop."""
        return True


@contextmanager
def rehearsal(member: Member) -> Iterator[None]:
    """Around such an update: all that was prepared is afterwards as it was before, also if the script leaves it."""
    before = Snapshot(member.prepared)
    left: GeneratorExit | None = None
    with rng.kept():
        try:
            yield
        except GeneratorExit as error:
            left = error
    before.restore()
    for _, parameter in member.prepared.parameters():
        parameter.grad = None
    if member.saver is not None:
        member.saver.asked = False
    if left is not None:
        raise left
