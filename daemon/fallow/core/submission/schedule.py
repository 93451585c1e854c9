"""The schedule of `fallow local`: what happens to the membership at which step.

Comma-separated items `+K@STEP`, `-K@STEP`, `-mI@STEP`, `kill:I@STEP`, `stop:I@STEP`, `cont:I@STEP`,
`head-kill@STEP`, `store-kill@STEP`. Members are numbered by arrival from 0.
"""

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
    words = text.split(",") if text.strip() else []
    items = sorted((_item(number, word.strip()) for number, word in enumerate(words, 1)), key=lambda item: item.step)
    total = workers_per_node * (members + sum(item.count for item in items if item.action is Action.ADD))
    if total > MOST_WORKERS:
        text = f"{total} workers in all are more than one machine can start; at most {MOST_WORKERS}"
        raise FallowError(text, Exit.USAGE)
    _check(items, members)
    return tuple(items)


def _item(number: int, word: str) -> Item:
    found = _ITEM.fullmatch(word)
    action, given = (Action(found["verb"] or found["whole"]), found["number"] or "0") if found else (None, "")
    counts = action in (Action.ADD, Action.RELEASE)
    if not word:
        problem = "is empty"
    elif found is None or action is None:
        hint = "; items are separated by commas" if re.search(r"\S\s+\S", word) else ""
        problem = f"is none of {GRAMMAR}{hint}"
    elif max(len(given), len(found["step"])) > DIGITS:
        problem = f"has a number of more than {DIGITS} digits"
    elif counts and not int(given):
        problem = "changes nothing; K must be at least 1"
    else:
        member = None if counts or found["whole"] else int(given)
        return Item(action=action, step=int(found["step"]), count=int(given) if counts else 0, member=member, text=word)
    shown = word if len(word) <= SHOWN else word[: SHOWN - 1] + "…"
    raise FallowError(f"schedule: item {number} ({shown!r}) {problem}", Exit.USAGE)


def _check(items: list[Item], members: int) -> None:
    """Follows the schedule with numbers alone; raises where an item is about somebody who is not there."""
    there, born = list(range(members)), members
    for item in items:
        problem = ""
        if item.action is Action.ADD:
            there += range(born, born + item.count)
            born += item.count
        elif item.action is Action.RELEASE:
            if item.count > len(there):
                problem = f"only {len(there)} of the members are left at step {item.step}"
            del there[-item.count :]
        elif item.member is not None:
            if item.member >= born:
                problem = (
                    f"no member {item.member} by step {item.step}; members are numbered by arrival, 0 to {born - 1}"
                )
            elif item.member not in there:
                problem = f"member {item.member} has left before step {item.step}"
            elif item.action in (Action.RELEASE_MEMBER, Action.KILL):
                there.remove(item.member)
        if problem:
            raise FallowError(f"schedule: {item.text!r}: {problem}", Exit.USAGE)
