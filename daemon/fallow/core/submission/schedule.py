"""The schedule of `fallow local`: what happens to the membership at which step.

Comma-separated items `+K@STEP`, `-K@STEP`, `-mI@STEP`, `kill:I@STEP`, `stop:I@STEP`, `cont:I@STEP`,
`head-kill@STEP`, `store-kill@STEP`. Members are numbered by arrival from 0.
"""

import re
from enum import StrEnum

import msgspec

from fallow.model import Exit, FallowError

MOST_WORKERS = 512
"""Maximum workers of a training on one machine. Each one is a process that imports torch."""


class Action(StrEnum):
    """Changes, as they are written before a number or alone."""

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
    """One change, made when `step` optimizer steps are finished."""

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

MAX_EXCERPT = 64
"""Characters of an invalid item that its message shows."""

DIGITS = 18
"""Maximum digits of a number. Python refuses to read thousands of digits, and no training has so many steps."""

GRAMMAR = "+K@STEP, -K@STEP, -mI@STEP, kill:I@STEP, stop:I@STEP, cont:I@STEP, head-kill@STEP or store-kill@STEP"


def parse_schedule(text: str, members: int, workers_per_node: int = 1) -> tuple[Item, ...]:
    """Items in order of step (in the given order within a step), checked against the membership at each step.

    Args:
        members: nodes that the run starts with.
        workers_per_node: workers on each node.

    Raises:
        FallowError: an item cannot be read, names a member that is not present, or there would be too many workers.
    """
    words = text.split(",") if text.strip() else []
    items = sorted((_item(number, word.strip()) for number, word in enumerate(words, 1)), key=lambda item: item.step)
    total = workers_per_node * (members + sum(item.count for item in items if item.action is Action.ADD))
    if total > MOST_WORKERS:
        text = f"schedule: {total} workers in total, but one machine can start at most {MOST_WORKERS}"
        raise FallowError(text, Exit.USAGE)
    _check(items, members)
    return tuple(items)


def _item(number: int, word: str) -> Item:
    match = _ITEM.fullmatch(word)
    action, digits = (Action(match["verb"] or match["whole"]), match["number"] or "0") if match else (None, "")
    counts = action in (Action.ADD, Action.RELEASE)
    if not word:
        problem = "is empty"
    elif match is None or action is None:
        hint = "; items are separated by commas" if re.search(r"\S\s+\S", word) else ""
        problem = f"is not {GRAMMAR}{hint}"
    elif max(len(digits), len(match["step"])) > DIGITS:
        problem = f"has a number of more than {DIGITS} digits"
    elif counts and not int(digits):
        problem = "changes nothing; K must be at least 1"
    else:
        member = None if counts or match["whole"] else int(digits)
        return Item(
            action=action, step=int(match["step"]), count=int(digits) if counts else 0, member=member, text=word
        )
    excerpt = word if len(word) <= MAX_EXCERPT else word[: MAX_EXCERPT - 1] + "…"
    raise FallowError(f"schedule: item {number} ({excerpt!r}) {problem}", Exit.USAGE)


def _check(items: list[Item], members: int) -> None:
    """Follow the schedule with numbers only. Raises FallowError if an item names a member that is not present."""
    present, next_number = list(range(members)), members
    for item in items:
        problem = ""
        if item.action is Action.ADD:
            present += range(next_number, next_number + item.count)
            next_number += item.count
        elif item.action is Action.RELEASE:
            if item.count > len(present):
                problem = f"only {len(present)} members are left at step {item.step}"
            del present[-item.count :]
        elif item.member is not None:
            if item.member >= next_number:
                numbers = f"members are numbered by arrival, 0 to {next_number - 1}"
                problem = f"no member {item.member} by step {item.step}; {numbers}"
            elif item.member not in present:
                problem = f"member {item.member} has left before step {item.step}"
            elif item.action in (Action.RELEASE_MEMBER, Action.KILL):
                present.remove(item.member)
        if problem:
            raise FallowError(f"schedule: {item.text!r}: {problem}", Exit.USAGE)
