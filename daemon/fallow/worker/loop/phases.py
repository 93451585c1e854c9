"""Phases of a step: `if run.phase("discriminator"): ...`, each with bodies, a reduction and acting steps of its own.

All shards of a step go through the first phase, then all of them through the next one: so what a phase sees has been
through the optimizer steps of the phases before it, whoever computes which shard. Code outside `if run.phase(...)` runs
once in each phase.
"""

from __future__ import annotations

from collections.abc import Callable

from fallow.model import Exit, FallowError
from fallow.worker.loop.position import Position
from fallow.worker.prepared.objects import Gate


class Phases:
    """Answers `run.phase`. The names are found in the first body of a run.steps call and are in the position then.

    Args:
        gate: what prepared objects ask before they act.
        seed: puts random numbers to where they begin at a place of the run.
    """

    def __init__(self, gate: Gate, seed: Callable[..., None]) -> None:
        self._gate = gate
        self._seed = seed
        self._at = Position()
        self._shard = 0
        self._rehearsal = False
        self._inside = False
        self._backward_outside = False
        self.asked: list[str] = []
        "phases that the body at work, or the last one, asked for"

    def begin_body(self, at: Position, shard: int, *, rehearsal: bool = False) -> None:
        """A body begins. In a rehearsal it goes through all phases one after the other."""
        self._at, self._shard, self._rehearsal = at, shard, rehearsal
        self._inside = self._backward_outside = False
        self.asked = []

    def ask(self, name: str) -> bool:
        """True if the body at work is to do this phase.

        Raises:
            FallowError: not inside a body, or not the phases of the other bodies.
        """
        if not self._gate.in_body:
            raise FallowError(f"run.phase({name!r}) is asked in the body of a run.steps loop only", Exit.DATA)
        known, number = self._at.phases, len(self.asked)
        if name in self.asked or (known is not None and known[number : number + 1] != [name]):
            order = ", ".join(known if known is not None else self.asked) or "none"
            raise self._gate.refuse(
                f"run.phase({name!r}) comes out of order: the phases of this loop are {order}, as its first body asked "
                "for them; every body asks for the same phases, in the same order, each once"
            )
        if self.asked:
            self._gate.called = False  # what comes between two phases belongs to the first one
        self.asked.append(name)
        self._inside = self._rehearsal or number == self._at.phase
        self._gate.open = False
        if self._rehearsal:
            self._gate.stepped = False
        if self._inside:
            self._seed("body", self._at.step, self._shard, name)
        return self._inside

    def before_backward(self) -> None:
        """A backward begins: in a loop with phases it belongs to one."""
        if not self._inside:
            self._backward_outside = True
            self._refuse_outside()

    def end_body(self) -> None:
        """The body has ended: now its phases are known."""
        if self._at.phases is None and not self._rehearsal:
            self._at.phases = list(self.asked)
        self._refuse_outside()

    def _refuse_outside(self) -> None:
        if self._backward_outside and (self._at.phases or self.asked):
            raise self._gate.refuse(
                "a backward outside `if run.phase(...)` in a loop with phases would run once in each of them; "
                "put it into one"
            )
