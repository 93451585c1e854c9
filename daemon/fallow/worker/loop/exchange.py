"""What members tell each other of an operation, and what all of them conclude.

Inner loops and joint calls (mean, barrier, the end of a call) are operations, counted alike on all members. At the
beginning of one each member tells its *opening*: where it is in the script, and what its state is worth. Nobody
finishes an operation before all have begun it, so a member that is elsewhere in the script is found here and not by a
wait.

Behind the sums of an inner loop each member tells its *part*, and only when it has the sums. So who has heard all parts
knows that every member has them, and may act; who is interrupted before still holds them, and needs nothing but the
*outcome*, a few bytes.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
import torch

from fallow.model import Exit, FallowError
from fallow.worker.reduction.buckets import Sums
from fallow.worker.transport.device import asynchronous, to_host


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
    bars_newcomers: int
    "1: in a run.mean or run.barrier, or inside of an update behind the place where newcomers begin it"
    has_ended: int
    "1: its script is over"
    state_status: int
    "what its state is worth, see `Standing`"
    sums_of: int
    "generation + 1 in which it got the sums of the operation at work, complete; 0: it has not got them"
    concluded: int
    "generation + 1 in which the last operation was concluded; 0: there was none"
    pauses_training: int
    "1: state must be handed over while nobody computes, see `Standing`"
    joined_in: int
    "generation in which it became a member"
    fingerprint: int
    "of its weights, where a generation begins; else 0"
    frozen: int
    "likewise, of what is frozen"
    resting: int
    "likewise, of what rests"
    pace: float
    "seconds per shard; 0: not measured"
    value: float
    "its part of a joint call; at a step, how many shards it cuts that into, if it knows"
    call: Call = Call()


_OWN = len(Opening._fields) - 1
_FORM = struct.Struct(f"<{_OWN - 2}q2d{len(Call._fields)}q")


def pack(opening: Opening) -> bytes:
    """Equally many bytes on all members."""
    return _FORM.pack(*opening[:_OWN], *opening.call)


def unpack(text: bytes) -> Opening:
    """What `pack` gave."""
    fields = _FORM.unpack(text)
    return Opening._make([*fields[:_OWN], Call._make(fields[_OWN:])])


class Figures:
    """What `update.note` was told in one attempt at an inner loop: figures of shards, which count with their weight."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int], float | torch.Tensor] = {}
        "(figure, shard) -> weight x value"
        self._arriving = torch.empty(0, device="cpu")
        "values of those on a device"

    def note(self, shard: int, weight: float, figures: Mapping[str, Any]) -> None:
        """Of one shard; one that counts nothing is not noted.

        Raises:
            FallowError: a figure is no number.
        """
        for name, value in figures.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise FallowError(f"update.note({name}=...) wants one number, not {tuple(value.shape)}", Exit.DATA)
                value = value.detach().reshape(()).to(torch.float64, copy=True)
            if not isinstance(value, torch.Tensor) or not asynchronous(value.device):
                value = float(value)
            self._values[name, shard] = value * weight

    def send(self) -> None:
        """Those on a device start for the host, in one copy."""
        device_values = [value for value in self._values.values() if isinstance(value, torch.Tensor)]
        if device_values:
            self._arriving = to_host(torch.stack(device_values))

    def by_shard(self) -> dict[str, dict[int, float]]:
        """By figure and shard, behind an event behind `send`."""
        arrived = iter(self._arriving.tolist())
        by_figure: dict[str, dict[int, float]] = {}
        for (name, shard), value in self._values.items():
            by_figure.setdefault(name, {})[shard] = next(arrived) if isinstance(value, torch.Tensor) else value
        return by_figure


class Part(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Of one member, told behind the sums."""

    place: tuple[int | str, ...]
    "number of the operation, of the step, its phases until now"
    samples: int
    "of the shards that it has computed"
    crc: int
    "sum of their checksums"
    switch: int
    "planned generation to which it can change over; 0: none"
    checkpoint: float
    "its wish for one; a sum above 0 over the members means yes"
    checkpoints_asked: int
    "how many somebody has asked for, as far as it has heard, if one of them was not made; else 0"
    pace: float
    "its seconds per shard; 0: not measured"
    weight_checksum: int
    "of a sample of the weights at the step's begin, another one in each step"
    agreement: int
    "checksum of what steers the prepared objects: rates, what is frozen, what rests"
    acts: int
    "steps of prepared optimizers since the last inner loop"
    sums: Sums
    notes: dict[str, dict[int, float]]
    "figure -> shard -> weight x value"


class Outcome(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What all members conclude, and what one that was interrupted adopts from another."""

    sums: Sums
    means: dict[str, float]
    switch: int
    "planned generation that all enter behind this step; 0: none"
    checkpoint: bool
    checkpoints_asked: int
    "for so many requests by hand; 0: for none"
    paces: list[float]
    "by rank"
    drifted: bool
    "the members began the step with unlike weights"

    @classmethod
    def of(cls, parts: Sequence[Part], sums: Sums) -> "Outcome":
        """Conclude from all members' parts, and from what they say of the sums together."""
        first = parts[0].switch
        return cls(
            sums=sums,
            means=_means(part.notes for part in parts),
            switch=first if all(part.switch == first for part in parts) else 0,
            checkpoint=sum(part.checkpoint for part in parts) > 0,
            checkpoints_asked=max(part.checkpoints_asked for part in parts),
            paces=[part.pace for part in parts],
            drifted=len({part.weight_checksum for part in parts}) > 1,
        )


def exact_sum(values: Sequence[float]) -> float:
    """Sum that does not depend on the order; NaN where infinities of both signs meet, as in floating point."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def _means(notes: Iterable[dict[str, dict[int, float]]]) -> dict[str, float]:
    by_figure: dict[str, list[float]] = {}
    for figures in notes:
        for name, by_shard in figures.items():
            by_figure.setdefault(name, []).extend(by_shard.values())
    return {name: exact_sum(values) for name, values in by_figure.items()}


_parts = msgspec.msgpack.Decoder(Part)
_outcomes = msgspec.msgpack.Decoder(Outcome)
encode = msgspec.msgpack.encode
decode_part = _parts.decode
decode_outcome = _outcomes.decode
