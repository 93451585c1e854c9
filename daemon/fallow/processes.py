"""What the kernel says of a process of this host: proc(5)."""

from pathlib import Path
from typing import NamedTuple

_STARTED = 19
"Place of the start time behind the name."


class Process(NamedTuple):
    """A process that lives."""

    name: str
    "as the kernel has it: 15 bytes at most"
    state: str
    "one letter; T: it is stopped"
    parent: int
    "process id"
    started: str
    "in clock ticks. With the process id it names one process for good: ids are used again"


def find_process(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """The process with that id; None: there is none, or it has ended and its parent has not asked for its end."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name may hold spaces and parentheses; what follows it begins behind the last one.
    name, _, stat_fields = text.partition("(")[2].rpartition(")")
    state, parent, *fields = stat_fields.split()
    return None if state in "ZX" else Process(name, state, int(parent), fields[_STARTED - 2])
