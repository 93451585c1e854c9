"""The short loop, `run.steps`, on top of the loop in two levels: a body per shard, the last of which acts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fallow.model import Exit, FallowError
from fallow.worker.api.gate import Gate
from fallow.worker.loop.update import Update
from fallow.worker.loop.updates import Loop

_TWO_LEVELS = (
    "use the loop in two levels, `for update in run.updates(loader):` with `for batch in update:` in it, and behind "
    "that what happens once per step"
)


def steps(loop: Loop, gate: Gate, updates: Callable[[], Iterator[Update]]) -> Iterator[Any]:
    """Batches of this member's shards.

    In each body stands one backward, and behind it what acts: `opt.step()`, `opt.zero_grad()`, schedulers, scalers and
    averages that were prepared. They act in a step's last body on this member, once all members have its sums.

    Args:
        loop: of the run.
        gate: which prepared objects ask.
        updates: begins the loop below.

    Raises:
        FallowError: a body does what this loop cannot; it names the loop in two levels.
    """
    gate.guard(loop.member.prepared.acting())
    at: list[Update] = []

    def behind_backward() -> None:
        if gate.backward:
            raise FallowError(f"a second backward in the body of a run.steps loop: {_TWO_LEVELS}", Exit.DATA)
        gate.backward = True
        shards = at[0].open if at else None
        if shards is not None and shards.last_out:
            gate.open = shards.complete()

    below = iter(updates())
    reduction = loop.member.reduction
    reduction.after_backward, loop.short = behind_backward, True
    try:
        for update in below:
            at[:] = [update]
            for batch in update:
                gate.open = gate.backward = False
                yield batch
                if not gate.backward:
                    raise FallowError(
                        f"step {update.step}: a body of a run.steps loop made no backward: to leave a batch out, "
                        f"{_TWO_LEVELS}",
                        Exit.DATA,
                    )
            gate.open = gate.backward = True
    finally:
        at.clear()
        gate.open = gate.backward = True
        reduction.after_backward, loop.short = _nothing, False
        close = getattr(below, "close", None)
        if close is not None:
            close()


def _nothing() -> None: ...
