"""Philly: idle nodes of a large GPU cluster per minute, without their names (contrib/traces/README.md). No Slurm.

The node that became idle last is taken first, as if nodes were a stack: k idle nodes are the first k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fallow.sim.traces.problems import Tally, numbers
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sites import Profile, made_up
from fallow.sim.types import Change, Recording, Scheduler

COLUMNS = ("time", "active_nodes", "total_nodes")
NODES, GPUS = 420, 8


def read(path: Path, window: Window, profile: Profile, scheduler: Scheduler) -> Recording:
    """Idle are those of 420 nodes that are not active; in 97 % of the minutes the set has as many.

    Raises:
        FallowError: it is no such file.
    """
    tally = Tally(path, f"the columns {', '.join(COLUMNS)}")
    counts: list[tuple[float, int]] = []
    "(Unix time, idle nodes from then on), ascending"
    for number, _, (at, active, total) in numbers(path, COLUMNS, tally):
        if counts and at < counts[-1][0]:
            tally.bad(number, "earlier than the line before")
            continue
        tally.use()
        if total != NODES:
            tally.assume(f"a line says another number of nodes than {NODES}, and more are left out")
        counts.append((at, max(0, int(min(total, NODES) - active))))
    tally.assume("not a Slurm cluster: idle nodes are offered as if it were")
    tally.assume("the node that became idle last is taken first")
    found = tally.result()
    begin, end = window.of(counts[0][0], counts[-1][0])
    names = [f"n{number:03d}" for number in range(1, NODES + 1)]
    return Recording(
        site=made_up("philly", {"philly": names}, gpus=GPUS, profile=profile, scheduler=scheduler),
        begin=begin,
        end=end,
        read=found,
        changes=list(_changes(counts, begin, end)),
    )


def _changes(counts: Sequence[tuple[float, int]], begin: float, end: float) -> Iterator[Change]:
    idle = [count for at, count in counts if at <= begin][-1]
    yield begin, tuple(range(idle)), ()
    for at, count in counts:
        if begin < at < end and count != idle:
            yield at, tuple(range(idle, count)), tuple(range(count, idle))
            idle = count
