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


class Call(NamedTuple):
    """A run.updates call, as members compare it."""

    shards: int = 0
    "in a full step"
    batch_size: int = 0
    samples: int = -1
    "in one epoch of the data, see `Source`"
    epochs: int = 0
    max_steps: int = -1
    "-1: as many as there are"
    loop: int = -1
    "number of the run.epochs loop that the call is in; -1: none"
    epoch: int = -1
    "of that loop"


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
    since: int
    "generation in which it became a member"
    fingerprint: int
    "of its weights, where a generation begins; else 0"
    modes: int
    "likewise, of what is frozen and what rests"
    pace: float
    "seconds per shard; 0: not measured"
    value: float
    "its part of a joint call"
    call: Call = Call()


_OWN = len(Opening._fields) - 1
_FORM = struct.Struct(f"<{_OWN - 2}q2d{len(Call._fields)}q")


def encode(opening: Opening) -> bytes:
    """Equally many bytes on all members."""
    return _FORM.pack(*opening[:_OWN], *opening.call)


def decode(text: bytes) -> Opening:
    """What `encode` gave."""
    fields = _FORM.unpack(text)
    return Opening._make([*fields[:_OWN], Call._make(fields[_OWN:])])
