"""Looks up processes of this host in /proc, see proc(5)."""

from pathlib import Path
from typing import NamedTuple

_START_TIME = 19
"""Index of the start time among the fields behind the name."""


class Process(NamedTuple):
    """A process that has not ended."""

    name: str
    "name in the kernel: the first 15 bytes of the program's name"
    state: str
    "one letter; T: the process is stopped"
    parent: int
    "process id of the parent"
    started: str
    "clock ticks from boot to the start. The kernel uses ids again; id and start time name one process for good"


def find_process(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """Return the process with this id. None: no process has it, or the process has ended and is a zombie."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name may contain spaces and parentheses, so the fields begin behind the last parenthesis.
    name, _, stat_fields = text.partition("(")[2].rpartition(")")
    state, parent, *fields = stat_fields.split()
    return None if state in "ZX" else Process(name, state, int(parent), fields[_START_TIME - 2])
