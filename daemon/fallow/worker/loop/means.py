"""`run.mean` and `run.barrier` in bodies: what members tell each other in their final bodies, and what comes of it.

A mean that every body asks for is that of all shards of the step. One that only final bodies ask for, such as that of
an evaluation inside the loop, is the plain mean over the members. Anything else would depend on the membership.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fallow.model import Exit, FallowError
from fallow.worker.reduction.control import exact_sum


class _Told(NamedTuple):
    """What a member says of one call, before its parts."""

    barrier: float
    missing: float
    "earlier bodies that came to a backward and have no part in this mean"
    skipped: float
    "earlier bodies that came to no backward and have no part in it"
    earlier: float
    "whether any earlier body has asked for a mean"
    trains: float
    "whether bodies of this loop come to a backward"
    value: float
    "as the final body has it"


class Means:
    """The calls of one step on this member."""

    def __init__(self) -> None:
        self.begin_step()
        self.begin_body()

    def begin_step(self) -> None:
        """A step, or a phase of it, begins; also one that is done again."""
        self._parts: list[dict[int, float]] = []
        "weight x value by shard, for each mean in a body, in order"
        self._earlier: list[tuple[int, bool]] = []
        "bodies that have ended: (shard, whether it came to a backward)"
        self._results: list[float] = []
        "of the final body's calls, in order"

    def begin_body(self) -> None:
        """A body begins: its calls are counted from 0."""
        self._slot = self._call = 0

    def end_body(self, shard: int, *, trained: bool) -> None:
        """A void body that counts has ended. `trained`: it came to a backward."""
        self._earlier.append((shard, trained))

    def note(self, shard: int, part: float | None) -> int:
        """The body at work asks for a mean; returns which one it is.

        Args:
            shard: of the body.
            part: weight x value; None: the body counts nothing.
        """
        slot, self._slot = self._slot, self._slot + 1
        if slot == len(self._parts):
            self._parts.append({})
        if part is not None:
            self._parts[slot][shard] = part
        return slot

    @property
    def unanswered(self) -> bool:
        """The final body's next call is the first one without a result; after one that failed there is none."""
        return self._call == len(self._results)

    def tell(self, slot: int | None, value: float, shards: int, *, trains: bool) -> torch.Tensor:
        """What this member says of the call; float64 of len(_Told) + shards.

        Args:
            slot: which mean it is; None: a barrier.
            value: this body's.
            shards: in a full step, so that members whose data differ send as much as the others.
            trains: bodies of this loop come to a backward.
        """
        parts = self._parts[slot] if slot is not None else {}
        without = [trained for shard, trained in self._earlier if shard not in parts]
        asked = any(shard in known for known in self._parts for shard, _ in self._earlier)
        told = _Told(slot is None, sum(without), len(without) - sum(without), asked, trains, value)
        padding = [0.0] * (shards - len(parts))
        return torch.tensor([*told, *parts.values(), *padding], dtype=torch.float64)

    def answer(self, told: Sequence[torch.Tensor]) -> None:
        """What all members said is here.

        Raises:
            FallowError: they are not in the same call, or some bodies are missing in the mean.
        """
        self._results.append(_outcome([[float(value) for value in cells] for cells in told]))

    def result(self) -> float | None:
        """Of the final body's next call; None: it failed."""
        call, self._call = self._call, self._call + 1
        return self._results[call] if call < len(self._results) else None


def _outcome(cells: list[list[float]]) -> float:
    said = [_Told(*part[: len(_Told._fields)]) for part in cells]
    if len({one.barrier for one in said}) > 1:
        raise FallowError(
            "in a body some members are in run.mean and others in run.barrier: every member has to make the same calls",
            Exit.DATA,
        )
    missing = sum(one.missing for one in said)
    if not any(one.trains for one in said):
        missing += sum(one.skipped for one in said)
    if said[0].barrier or not missing:
        return exact_sum([value for part in cells for value in part[len(_Told._fields) :]])
    if any(one.earlier for one in said):
        raise FallowError(
            f"{missing:.0f} bodies of this step have no part in a run.mean that the last body asks for: call run.mean "
            "the same number of times in every body, or in all of them only under `if run.final_shard:`, which gives "
            "the plain mean over the members",
            Exit.DATA,
        )
    return math.fsum(one.value for one in said) / len(said)
