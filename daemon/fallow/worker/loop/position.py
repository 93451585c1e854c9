"""Where a run is: replicated on every member, part of the state that a newcomer receives."""

from __future__ import annotations

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
    "number of the call of run.updates in progress, or the next one"
    op: int = 0
    "finished operations: inner loops and joint calls"
    outcome: bytes = b""
    "what the last of them concluded"
    concluded: int = 0
    "generation + 1 in which it did"
    acts: int = 0
    "steps of prepared optimizers since the last inner loop"
    outside_since: int | None = None
    "`op` when the call before ended, or this epoch began; None: in a call"
    passes: int = 0
    "finished passes in this call"
    call_steps: int = 0
    "finished steps in this call"
    loop: int = 0
    "number of the run.epochs loop in progress, or the next one"
    inside: bool = False
    "in that loop, not in front of it"
    loop_epoch: int = 0
    "its current epoch"
    loop_call: int = 0
    "number of the first run.updates call in that epoch, or since the loop before"
    loss: float | None = None
    "mean of the figure `loss` in the last step that had one"

    def finish_operation(self, outcome: bytes, generation: int) -> None:
        """Count one operation that every member of that generation can finish."""
        self.op += 1
        self.outcome, self.concluded = outcome, generation + 1

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

    def finish_call(self) -> None:
        """Count one finished run.updates call; a pass that `max_steps` cut short is not taken up again."""
        self.outside_since = self.op
        if self.index:
            self.index = 0
            self.data_epoch += 1
        self.call += 1
        self.passes = self.call_steps = 0

    def begin_epoch(self, epoch: int) -> None:
        """Enter an epoch of the current run.epochs loop."""
        self.outside_since = self.op
        self.inside = True
        self.loop_epoch = epoch
        self.loop_call = self.call

    def finish_loop(self) -> None:
        """Count one finished run.epochs loop."""
        self.outside_since = self.op
        self.loop += 1
        self.inside = False
        self.loop_epoch = 0
        self.loop_call = self.call
