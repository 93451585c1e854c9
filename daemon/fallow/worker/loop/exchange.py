"""The messages that members exchange about an operation, and the outcome that all members compute from them.

Inner loops and joint calls (mean, barrier, the end of a call) are *operations*. All members count them alike. At the
beginning of an operation each member sends its *opening*: its place in the script, and the status of its state. No
member finishes an operation before all have begun it. So a member at another place of the script is found at once.

When a member has the sums of an inner loop, it sends its *part*. A member that has received all parts knows that every
member has the sums, and may act on them. A member that is interrupted earlier still holds the sums. It then needs only
the *outcome*, a few bytes.
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
    """Kind of an operation."""

    STEP = 0
    END = 1
    "the end of a run.updates call"
    MEAN = 2
    BARRIER = 3
    COMING = 4
    "no operation: a newcomer on its way to the members' place"


JOINT = (Kind.END, Kind.MEAN, Kind.BARRIER)


class Call(NamedTuple):
    """Arguments of a run.updates call, which must be the same on all members."""

    shards: int = 0
    "number of shards in a full step"
    batch_size: int = 0
    samples: int = -1
    "number of samples in one epoch of the data, see `Source`; -1: not known"
    epochs: int = 0
    max_steps: int = -1
    "-1: no limit"
    loop: int = -1
    "number of the run.epochs loop around the call; -1: none"
    epoch: int = -1
    "epoch of that loop"


class Opening(NamedTuple):
    """What one member sends at the beginning of an operation."""

    generation: int
    op: int
    "number of finished operations"
    kind: int
    step: int
    bars_newcomers: int
    "1: no newcomer may join now: the member is in run.mean or run.barrier, or amid an update"
    has_ended: int
    "1: the member's script has ended"
    state_status: int
    "status of the member's state, see `StateStatus`"
    sums_of: int
    "1 + generation in which the member received the complete sums of the present operation; 0: it lacks them"
    concluded: int
    "1 + generation in which the last operation was concluded; 0: no operation yet"
    pauses_training: int
    "1: members must not train during a transfer of state, see `StateStatus`"
    joined_in: int
    "generation in which this worker became a member; 0: it is a newcomer"
    fingerprint: int
    "checksum of the weights at the beginning of a generation; else 0"
    frozen: int
    "checksum of the names of frozen parameters at the beginning of a generation; else 0"
    resting: int
    "checksum of the names of modules in eval() at the beginning of a generation; else 0"
    pace: float
    "seconds per shard; 0: not measured"
    value: float
    "argument of a joint call; at a step, the number of its shards (0: not known)"
    call: Call = Call()


_OWN = len(Opening._fields) - 1
_FORM = struct.Struct(f"<{_OWN - 2}q2d{len(Call._fields)}q")


def pack(opening: Opening) -> bytes:
    """Encode an opening. The length is the same on all members."""
    return _FORM.pack(*opening[:_OWN], *opening.call)


def unpack(text: bytes) -> Opening:
    """Decode the bytes of `pack`."""
    fields = _FORM.unpack(text)
    return Opening._make([*fields[:_OWN], Call._make(fields[_OWN:])])


class Figures:
    """Figures that the script gave to `update.note` in one attempt at an inner loop, each weighted by its shard."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int], float | torch.Tensor] = {}
        "(figure, shard) -> weight x value"
        self._arriving = torch.empty(0, device="cpu")
        "figures that are on their way from the device to the host"

    def note(self, shard: int, weight: float, figures: Mapping[str, Any]) -> None:
        """Add the figures of one shard.

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
        """Start to copy the figures on a device to the host, all in one copy."""
        device_values = [value for value in self._values.values() if isinstance(value, torch.Tensor)]
        if device_values:
            self._arriving = to_host(torch.stack(device_values))

    def by_shard(self) -> dict[str, dict[int, float]]:
        """Return figure -> shard -> weight x value. Call `send` first, and wait for the device."""
        arrived = iter(self._arriving.tolist())
        by_figure: dict[str, dict[int, float]] = {}
        for (name, shard), value in self._values.items():
            by_figure.setdefault(name, {})[shard] = next(arrived) if isinstance(value, torch.Tensor) else value
        return by_figure


class Part(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one member sends when it has the sums of an inner loop."""

    place: tuple[int | str, ...]
    "number of the operation, number of the step, names of the step's phases until now"
    samples: int
    "number of samples in the shards that the member has computed"
    crc: int
    "sum of the checksums of these shards"
    switch: int
    "planned generation into which the member can switch; 0: none"
    checkpoint: float
    "vote for a checkpoint; the members write one if the sum of votes is above 0"
    checkpoints_asked: int
    "number of checkpoints requested by hand, as far as the member knows; 0: all of them were made"
    pace: float
    "seconds per shard; 0: not measured"
    weight_checksum: int
    "checksum of a sample of the weights at the beginning of the step; each step takes another sample"
    agreement: int
    "checksum of the settings of prepared objects: learning rates, frozen parameters, modules in eval()"
    acts: int
    "number of steps of prepared optimizers since the last inner loop"
    sums: Sums
    notes: dict[str, dict[int, float]]
    "figure -> shard -> weight x value"


class Outcome(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What all members conclude from their parts. An interrupted member takes the outcome from another one."""

    sums: Sums
    means: dict[str, float]
    switch: int
    "planned generation that all members enter after this step; 0: none"
    checkpoint: bool
    checkpoints_asked: int
    "number of requests by hand that the checkpoint serves; 0: none"
    paces: list[float]
    "seconds per shard, by rank"
    drifted: bool
    "the members began the step with different weights"

    @classmethod
    def of(cls, parts: Sequence[Part], sums: Sums) -> "Outcome":
        """Compute the outcome from all members' parts and from their merged sums."""
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
    """Sum that does not depend on the order of values; NaN if infinities of both signs occur."""
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
