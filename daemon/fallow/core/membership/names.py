"""Names of nodes and workers for people.

The code numbers nodes from 1, and 0 stands for no node. People see the first node to arrive as `n0`, as in the
schedules of `fallow local`. The only worker of a node has the node's name; one of several workers is `n0.1`.
"""

import re
import sys

from fallow.model import Exit, FallowError
from fallow.text import quote

_NAME = re.compile(r"n(0|[1-9]\d{0,8})\Z")


def member_name(number: int) -> str:
    return sys.intern(f"n{number - 1}")  # a thousand reports of generations have a thousand names each


def worker_name(number: int, slot: int, slots: int) -> str:
    """Return the name of a worker. `slot` is its index among the node's `slots` workers, from 0."""
    return member_name(number) if slots == 1 else f"{member_name(number)}.{slot}"


def member_number(name: str) -> int:
    """Return the number of the member with this name.

    Raises:
        FallowError: `name` is not the name of a member.
    """
    match = _NAME.match(name)
    if match is None:
        raise FallowError(f"member {quote(name)}: members are called n0, n1 and so on; see fallow status", Exit.USAGE)
    return int(match[1]) + 1
