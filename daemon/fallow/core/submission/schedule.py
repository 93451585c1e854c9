"""The schedule of `fallow local`: what happens to the membership at which step.

Comma-separated items `+K@STEP`, `-K@STEP`, `-mI@STEP`, `kill:I@STEP`, `stop:I@STEP`, `cont:I@STEP`,
`head-kill@STEP`, `store-kill@STEP`. Members are numbered by arrival from 0.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from fallow.model import Exit, FallowError

MOST_WORKERS = 512
"""Of one training on one machine, each a process that imports torch."""


class Action(StrEnum):
    """Each as it is written, before a number or alone."""

    ADD = "+"
    RELEASE = "-"
    "the youngest `count` members"
    RELEASE_MEMBER = "-m"
    KILL = "kill:"
    STOP = "stop:"
    CONT = "cont:"
    HEAD_KILL = "head-kill"
    STORE_KILL = "store-kill"


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happens when `step` optimizer steps are finished."""

    action: Action
    step: int
    count: int = 0
    "of ADD and RELEASE"
    member: int | None = None
    "of the actions on one member: its number by arrival"
    text: str = ""


_ITEM = re.compile(
    r"(?:(?P<verb>\+|-m?|kill:|stop:|cont:)(?P<number>\d+)|(?P<whole>head-kill|store-kill))@(?P<step>\d+)", re.ASCII
)

SHOWN = 64
"""Characters of a bad item in its message."""

DIGITS = 18
"""Most of a number. Python refuses to read thousands of them, and no training has so many steps."""

GRAMMAR = "+K@STEP, -K@STEP, -mI@STEP, kill:I@STEP, stop:I@STEP, cont:I@STEP, head-kill@STEP or store-kill@STEP"


def parse_schedule(text: str, members: int, workers_per_node: int = 1) -> tuple[Item, ...]:
    """Items in order of step (in the order given within a step), checked against what there will be.

    Args:
        members: nodes that the run starts with.
        workers_per_node: of each.

    Raises:
        FallowError: an item cannot be read, is about a member that is not there, or there would be too many workers.
    """
    items: list[Item] = []
    for number, word in enumerate(text.split(","), 1):
        if not word.strip():
            if text.strip():
                raise _bad(number, word, "is empty")
            continue
        items.append(_item(number, word.strip()))
    total = members + sum(item.count for item in items if item.action is Action.ADD)
    if total * workers_per_node > MOST_WORKERS:
        raise FallowError(
            f"{total * workers_per_node} workers in all are more than one machine can start; at most {MOST_WORKERS}",
            Exit.USAGE,
        )
    items.sort(key=lambda item: item.step)
    _check(items, members)
    return tuple(items)


def _item(number: int, word: str) -> Item:
    found = _ITEM.fullmatch(word)
    if found is None:
        hint = "; items are separated by commas" if re.search(r"\S\s+\S", word) else ""
        raise _bad(number, word, f"is none of {GRAMMAR}{hint}")
    if any(len(digits) > DIGITS for digits in re.findall(r"\d+", word)):
        raise _bad(number, word, f"has a number of more than {DIGITS} digits")
    action, given = Action(found["verb"] or found["whole"]), int(found["number"] or 0)
    counts = action in (Action.ADD, Action.RELEASE)
    if counts and not given:
        raise _bad(number, word, "changes nothing; K must be at least 1")
    member = None if counts or found["whole"] else given
    return Item(action=action, step=int(found["step"]), count=given if counts else 0, member=member, text=word)


def _check(items: list[Item], members: int) -> None:
    """Follows the schedule with numbers alone; raises where an item is about somebody who is not there."""
    there = set(range(members))
    born = members
    for item in items:
        shown = f"schedule: {item.text!r}"
        if item.action is Action.ADD:
            there |= set(range(born, born + item.count))
            born += item.count
        elif item.action is Action.RELEASE:
            if item.count > len(there):
                raise FallowError(f"{shown}: only {len(there)} of the members are left at step {item.step}", Exit.USAGE)
            there -= set(sorted(there)[-item.count :])
        elif item.member is not None:
            if item.member >= born:
                raise FallowError(
                    f"{shown}: no member {item.member} by step {item.step}; "
                    f"members are numbered by arrival, 0 to {born - 1}",
                    Exit.USAGE,
                )
            if item.member not in there:
                raise FallowError(f"{shown}: member {item.member} has left before step {item.step}", Exit.USAGE)
            if item.action in (Action.RELEASE_MEMBER, Action.KILL):
                there.discard(item.member)


def _bad(number: int, word: str, what: str) -> FallowError:
    given = word.strip()
    shown = given if len(given) <= SHOWN else given[: SHOWN - 1] + "…"
    return FallowError(f"schedule: item {number} ({shown!r}) {what}", Exit.USAGE)
