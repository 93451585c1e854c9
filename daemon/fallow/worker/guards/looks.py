"""Sees what void bodies do to weights and to optimizers' state where no version counter tells: `.data`, `clear()`.

Values are looked at twice in a body: at its first backward and at its end. Between the two nothing may change, since
the step that the backward is a part of comes behind the final body's. Before its backward a body may do what comes to
the same if it is done again, as to clip weights: the step's first body does it, the others find it done.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fallow.worker.handover.state import as_bytes, fingerprint

_PIECE = 1024
"""Elements of one parameter, another one in each step."""


class _Look(NamedTuple):
    """What was there."""

    weights: int
    "a checksum"
    state: int
    "entries in the state of all optimizers"


class Looks:
    """Of one run.

    Args:
        optimizers: gives the prepared ones.
    """

    def __init__(self, optimizers: Callable[[], Sequence[torch.optim.Optimizer]]) -> None:
        self._optimizers = optimizers
        self._weights: Sequence[nn.Parameter] = ()
        self._void = self._thorough = False
        self._step = 0
        self._lies_at = 0
        self._piece = memoryview(b"")
        "the memory of a parameter's beginning, as long as it lies there"
        self._at_backward: _Look | None = None
        "of the body at work"
        self._at_end: _Look | None = None
        "of the step's last body"

    def begin_step(self, step: int) -> None:
        """A step begins, or a phase of it."""
        self._step, self._lies_at, self._at_end = step, 0, None

    def begin_body(self, weights: Sequence[nn.Parameter], *, void: bool, thorough: bool) -> None:
        """A body begins; `thorough`: all of the weights are looked at, not a piece."""
        self._weights, self._void, self._thorough = weights, void, thorough
        self._at_backward = None

    def repeated(self) -> bool:
        """At a body's first backward: it has changed weights, as a body of the step before it may have done, too."""
        if not self._void and self._at_end is None:
            return False  # the only body of this member in the step
        self._at_backward = self._look()
        return self._at_end is not None and self._at_backward.weights != self._at_end.weights

    def behind(self) -> tuple[bool, bool]:
        """At the end of a void body: whether it has changed weights, and an optimizer's state, behind its backward."""
        before, now = self._at_backward, self._look()
        self._at_end = now
        return (False, False) if before is None else (now.weights != before.weights, now.state != before.state)

    def _look(self) -> _Look:
        state = sum(len(optimizer.state) for optimizer in self._optimizers())
        return _Look(fingerprint(self._weights) if self._thorough else self._checksum(), state)

    def _checksum(self) -> int:
        if not self._weights:
            return 0
        parameter = self._weights[self._step % len(self._weights)]
        if parameter.device.type != "cpu":
            return 0  # an accelerator would have to finish the forward first
        if parameter.data_ptr() != self._lies_at or not parameter.is_contiguous():
            self._lies_at = parameter.data_ptr()
            self._piece = as_bytes(parameter.detach().reshape(-1)[:_PIECE].contiguous()).numpy().data
        return zlib.crc32(self._piece)
