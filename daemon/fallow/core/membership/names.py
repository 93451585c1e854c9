"""What people call nodes and workers. Inside, nodes are numbered from 1, because 0 says that there is none.

For people the first node to arrive is `n0`, as in the schedules of `fallow local`. The only worker of a node has its
node's name; one of several is `n0.1`.
"""

import re

from fallow.model import Exit, FallowError
from fallow.text import shown

_NAME = re.compile(r"n(0|[1-9]\d{0,8})\Z")


def member_name(number: int) -> str:
    return f"n{number - 1}"


def worker_name(number: int, slot: int, slots: int) -> str:
    """Name of a worker; `slot`: its place among the node's `slots` workers, from 0."""
    return member_name(number) if slots == 1 else f"{member_name(number)}.{slot}"


def member_number(name: str) -> int:
    """The number of the member of that name.

    Raises:
        FallowError: it is no such name.
    """
    found = _NAME.match(name)
    if found is None:
        raise FallowError(f"member {shown(name)}: members are called n0, n1 and so on; see fallow status", Exit.USAGE)
    return int(found[1]) + 1
