"""Where a run is: replicated on every member, part of the state that a newcomer receives."""

from __future__ import annotations

from typing import Any

import msgspec


class Position(msgspec.Struct, kw_only=True):
    """Counters of the finished part of the run, and the place in the script that goes with them."""

    step: int = 0
    "finished optimizer steps"
    samples: int = 0
    "samples consumed by them"
    data_epoch: int = 0
    "number of the pass over data in progress; with the seed it fixes the order of samples"
    index: int = 0
    "finished steps in this pass"
    call: int = 0
    "number of the call of run.steps in progress, or the next one"
    behind: int | None = None
    "`Place.agreed` when the call before ended, or this epoch began; None: in a call"
    passes: int = 0
    "finished passes in this call"
    call_steps: int = 0
    "finished steps in this call"
    left: bool = False
    "the script has left this call by itself (break), which the others have not agreed to yet"
    loop: int = 0
    "number of the run.epochs loop in progress, or the next one"
    inside: bool = False
    "in that loop, not in front of it"
    loop_epoch: int = 0
    "its current epoch"
    loop_call: int = 0
    "number of the first run.steps call in that epoch, or since the loop before"
    phase: int = 0
    "finished phases of the step in progress"
    phases: list[str] | None = None
    "names of the phases in this call; None: its first body is not over"
    loss: float | None = None
    "mean loss of the last finished step"

    @property
    def progress(self) -> int:
        """Grows with every finished phase: whoever has the larger one is ahead."""
        return (self.step << 8) + self.phase

    def finish_phase(self, loss: float | None) -> bool:
        """Count one finished phase (a step without phases is one); returns True if the step is complete with it."""
        if self.phase == 0:
            self.loss = loss
        elif loss is not None:
            self.loss = (self.loss or 0.0) + loss
        self.phase += 1
        if self.phase < len(self.phases or ()):
            return False
        self.phase = 0
        return True

    def finish_step(self, samples: int, *, last: bool) -> None:
        """Count one finished step of `samples` samples; `last`: of its pass."""
        self.step += 1
        self.samples += samples
        self.call_steps += 1
        self.index += 1
        if last:
            self.index = 0
            self.passes += 1
            self.data_epoch += 1

    def finish_call(self, agreed: int) -> None:
        """Count one finished run.steps call; a pass that `max_steps` cut short is not taken up again.

        Args:
            agreed: see `Place.agreed`; the call's end is counted.
        """
        self.behind = agreed
        if self.index:
            self.index = 0
            self.data_epoch += 1
        self.call += 1
        self.passes = self.call_steps = 0
        self.left = False
        self.phase, self.phases = 0, None

    def begin_epoch(self, epoch: int, agreed: int) -> None:
        """Enter an epoch of the current run.epochs loop; `agreed` as in `finish_call`."""
        self.behind = agreed
        self.inside = True
        self.loop_epoch = epoch
        self.loop_call = self.call

    def finish_loop(self, agreed: int) -> None:
        """Count one finished run.epochs loop; `agreed` as in `finish_call`."""
        self.behind = agreed
        self.loop += 1
        self.inside = False
        self.loop_epoch = 0
        self.loop_call = self.call

    def export(self) -> dict[str, Any]:
        """As plain values."""
        return dict(msgspec.structs.asdict(self))
