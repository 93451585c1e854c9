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
    ADD = "add"
    RELEASE = "release"
    "the youngest `count` members"
    RELEASE_MEMBER = "release-member"
    KILL = "kill"
    STOP = "stop"
    CONT = "cont"
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
    r"""(?: \+(?P<add>\d+) | -m(?P<leave>\d+) | -(?P<release>\d+)
          | (?P<verb>kill|stop|cont):(?P<member>\d+) | (?P<whole>head-kill|store-kill) ) @(?P<step>\d+)""",
    re.VERBOSE | re.ASCII,
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
    step = int(found["step"])
    if found["whole"]:
        return Item(action=Action(found["whole"]), step=step, text=word)
    if found["verb"]:
        return Item(action=Action(found["verb"]), step=step, member=int(found["member"]), text=word)
    if found["leave"]:
        return Item(action=Action.RELEASE_MEMBER, step=step, member=int(found["leave"]), text=word)
    count = int(found["add"] or found["release"])
    if count == 0:
        raise _bad(number, word, "changes nothing; K must be at least 1")
    return Item(action=Action.ADD if found["add"] else Action.RELEASE, step=step, count=count, text=word)


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
