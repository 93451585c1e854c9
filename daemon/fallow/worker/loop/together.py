"""What the members do together outside of bodies: the end of a run.steps call, `run.mean`, `run.barrier`.

Each has a number, counted alike on all members. If a member dies in the middle, some may have the result and some not:
nobody can be further than one number ahead, so the first exchange of the next generation tells those who have not.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from fallow.core.failures import Apart
from fallow.worker.reduction.control import exact_sum
from fallow.worker.transport.group import Group


class Kind(IntEnum):
    """What a member waits for."""

    NOTHING = 0
    END = 1
    MEAN = 2
    BARRIER = 3


_NAMES = {Kind.END: "at the end of a run.steps loop", Kind.MEAN: "in run.mean", Kind.BARRIER: "in run.barrier"}


class Asking(NamedTuple):
    """A member's part in the one that is under way."""

    number: int
    kind: Kind
    value: float


class Told(NamedTuple):
    """A member's part in it as the exchange tells it, all integers."""

    agreed: int
    "how many are complete on that member"
    answer: int
    "what the last of them gave"
    kind: int
    "of the next one, if the member waits in it"
    value: int
    "its part of that one"
    holds: int
    "it is one of the members, not a newcomer"


NOTHING_TOLD = Told(0, 0, 0, 0, 0)
"Of a newcomer."


def told(agreed: int, answer: float, asking: Asking | None, *, holds: bool) -> Told:
    """A member's part for the exchange."""
    if asking is None or asking.number != agreed:
        asking = Asking(agreed, Kind.NOTHING, 0.0)
    return Told(agreed, _bits(answer), int(asking.kind), _bits(asking.value), int(holds))


def conclude(parts: Sequence[Told]) -> tuple[int, float]:
    """How many are complete now, for everybody, and what the last of them gave.

    The one under way is complete if a member has its result, or if all members wait in it: then it is over the members
    that are left. Otherwise it is asked again.

    Raises:
        FallowError: the members wait in different ones.
    """
    most = max(part.agreed for part in parts)
    members = [part for part in parts if part.holds]
    if members and all(part.agreed == most and part.kind for part in members):
        _check([sum(part.kind == kind for part in members) for kind in Kind])
        return most + 1, exact_sum([_number(part.value) for part in members]) / len(members)
    return most, _number(next(part.answer for part in parts if part.agreed == most))


def ask(group: Group, kind: Kind, value: float) -> float:
    """The mean of all members' values.

    Raises:
        Interrupted: the group broke.
        FallowError: other members wait in something else.
    """
    cells = torch.zeros(len(Kind) + 1, dtype=torch.float64)
    cells[kind] = 1.0
    cells[-1] = value / group.size
    group.all_reduce(cells)
    group.wait()
    _check([int(count) for count in cells[:-1]])
    return float(cells[-1])


def _check(counts: Sequence[int]) -> None:
    found = {Kind(number): count for number, count in enumerate(counts) if count}
    if len(found) > 1:
        where = ", ".join(f"{count} {_NAMES[kind]}" for kind, count in found.items())
        raise Apart(
            f"the members are in different places of the script: {where}; every member has to make the same run.steps, "
            "run.mean and run.barrier calls: no `if run.is_main` around them",
        )


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
