"""What each member tells at the beginning of an operation: where it is in the script, and what its state is worth.

Inner loops and joint calls (mean, barrier, the end of a call) are operations, counted alike on all members. Nobody
finishes one before all have begun it, so a member that is elsewhere in the script is found here and not by a wait.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """Of an operation."""

    STEP = 0
    END = 1
    "of a run.updates call"
    MEAN = 2
    BARRIER = 3
    COMING = 4
    "none: a newcomer on its way to where the members are"


JOINT = (Kind.END, Kind.MEAN, Kind.BARRIER)


class Opening(NamedTuple):
    """Of one member."""

    generation: int
    op: int
    "finished operations"
    kind: int
    step: int
    amid: int
    "1: inside of an update, behind the place where newcomers begin it"
    ended: int
    "1: its script is over"
    standing: int
    "what its state is worth, see `Standing`"
    sums_of: int
    "generation + 1 in which it got the sums of the operation at work, complete; 0: it has not got them"
    concluded: int
    "generation + 1 in which the last operation was concluded; 0: there was none"
    whole: int
    "1: state must be handed over while nobody computes, see `Standing`"
    shards: int
    "in a full step of the call"
    batch_size: int
    samples: int
    "in one epoch of the call's data, see `Source`"
    since: int
    "generation in which it became a member"
    epochs: int
    "of the call"
    max_steps: int
    "of the call; -1: as many as there are"
    loop: int
    "number of the run.epochs loop that the call is in; -1: none"
    epoch: int
    "of that loop"
    fingerprint: int
    "of its weights, where a generation begins; else 0"
    modes: int
    "likewise, of what is frozen and what rests"
    pace: float
    "seconds per shard; 0: not measured"
    value: float
    "its part of a joint call"

    @property
    def cut(self) -> tuple[int, int, int]:
        """How its call cuts data into steps and shards."""
        return self.shards, self.batch_size, self.samples

    @property
    def call(self) -> tuple[int, int, int, int]:
        """Which call it is in."""
        return self.epochs, self.max_steps, self.loop, self.epoch


_FORM = struct.Struct(f"<{len(Opening._fields) - 2}q2d")


def encode(opening: Opening) -> bytes:
    """Equally many bytes on all members."""
    return _FORM.pack(*opening)


def decode(text: bytes) -> Opening:
    """What `encode` gave."""
    return Opening(*_FORM.unpack(text))
