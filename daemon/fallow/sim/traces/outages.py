"""When nodes of a site were down, drained or maintained: what `sacctmgr` prints of its own last month."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from fallow.model import ReservationInfo
from fallow.sim.traces.problems import LAST_S, Tally, lines
from fallow.sim.types import Outage, Problems
from fallow.slurm import parse

EVENTS = (
    "SLURM_TIME_FORMAT=%s sacctmgr --parsable2 show event event=node start=2026-10-01 end=2026-11-01 "
    "format=NodeName,Start,End,State > events.txt"
)
RESERVATIONS = (
    "SLURM_TIME_FORMAT=%s sacctmgr --parsable2 show reservation start=2026-10-01 end=2026-11-01 "
    "format=Name,NodeNames,Start,End,Flags > reservations.txt"
)
"""What a site runs to have them; the headings of these columns differ from the words that ask for them."""

_NAMES = {"NodeNames": "NodeName", "Start": "TimeStart", "End": "TimeEnd"}
_CLOSED = frozenset(("DRAIN", "DRAINED", "DRAINING", "DRNG", "FAIL", "FAILING", "FAILG", "MAINT", "MAINTENANCE"))
"""Words of states in which a node takes no new jobs, and those that it has go on (sinfo(1), NODE STATE CODES)."""


@dataclass(slots=True)
class Outages:
    events: list[Outage] = field(default_factory=list)
    maintenance: list[ReservationInfo] = field(default_factory=list)


def read(path: Path, nodes: Collection[str], timeout_s: float) -> tuple[Outages, Problems]:
    """What a file says of these nodes; others are left out.

    Args:
        path: the output of `EVENTS` or of `RESERVATIONS`, the columns in any order.
        nodes: the site's.
        timeout_s: a node that does not answer is taken for DOWN after so long (SlurmdTimeout).

    Raises:
        FallowError: it is no such file, its times are no Unix seconds, or it is about other nodes.
    """
    tally = Tally(path, f"the output of: {EVENTS}, or of: {RESERVATIONS}")
    found = Outages()
    header: list[str] = []
    take: Callable[[int, dict[str, str], float, float], None]

    def event(number: int, row: dict[str, str], begin: float, end: float) -> None:
        state, flags = parse.node_state(row["State"])
        down = state == "DOWN"
        if not down and _CLOSED.isdisjoint((state, *flags)):
            tally.left_out("a state that keeps no job away")
        elif row["NodeName"] not in nodes:
            tally.left_out("a node that the jobs or the site do not name")
        else:
            tally.use()
            silent_s = timeout_s if down and "NOT_RESPONDING" in flags else 0.0
            found.events.append(Outage(node=row["NodeName"], begin=begin - silent_s, end=end, drained=not down))

    def reservation(number: int, row: dict[str, str], begin: float, end: float) -> None:
        there = [node for node in parse.nodes(row["NodeName"]) if node in nodes]
        if "MAINT" not in row["Flags"].upper().split(","):
            tally.left_out("a reservation that is no maintenance")
        elif not there:
            tally.left_out("nodes that the jobs or the site do not name")
        else:
            tally.use()
            name = row.get("Name", "") or f"line-{number}"
            found.maintenance.append(
                ReservationInfo(reservation=name, nodes=there, start_at=begin, end_at=end, flags=["MAINT"])
            )

    for number, line in lines(path):
        cells = [cell.strip() for cell in line.split("|")]
        if not header:
            header = [_NAMES.get(cell, cell) for cell in cells]
            take = event if "State" in header else reservation
            for name in ("NodeName", "TimeStart", "TimeEnd", *([] if take is event else ["Flags"])):
                if name not in header:
                    raise tally.refuse(f"column {name} is missing")
            continue
        row = dict(zip(header, cells, strict=False))
        if not line.strip() or row["NodeName"] == "":
            continue  # what happened to the cluster as a whole
        tally.read += 1
        if len(cells) != len(header):
            tally.bad(number, f"not {len(header)} fields")
            continue
        begin, end = (_time(tally, number, row[name]) for name in ("TimeStart", "TimeEnd"))
        if begin == inf:
            tally.bad(number, "no begin", row["TimeStart"])
        elif end <= begin or max(begin, end if end < inf else 0.0) > LAST_S:
            tally.bad(number, "it ends before it begins, or after 2106", f"{row['TimeStart']}|{row['TimeEnd']}")
        else:
            take(number, row, begin, end)
    if not header:
        raise tally.refuse("it is empty")
    # At equal times one that ends comes before one that begins.
    found.events.sort(key=lambda outage: outage.begin)
    told = _told(path, found)
    tally.assume(told)
    return found, tally.problems() if tally.read else Problems(read=0, used=0, bad={}, examples=[], assumed=[told])


def _time(tally: Tally, number: int, text: str) -> float:
    """Unix seconds; infinity: it has not come, as of an outage that is not over."""
    if re.match(r"\d{4}-\d\d-\d\d", text):
        raise tally.refuse(f"line {number}: {text} must be Unix seconds (SLURM_TIME_FORMAT=%s)")
    return float(text) if text.isdigit() and text != "0" else inf


def _told(path: Path, found: Outages) -> str:
    drained = sum(each.drained for each in found.events)
    words = [
        (len(found.events) - drained, "times that a node was down"),
        (drained, "that one was drained"),
        (len(found.maintenance), "maintenance reservations"),
    ]
    said = ", ".join(f"{number} {what}" for number, what in words if number)
    return f"{path.name}: {said or 'no node was down, drained or maintained'}"
