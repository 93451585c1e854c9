"""Philly: idle nodes of a large GPU cluster per minute, without their names (contrib/traces/README.md). No Slurm.

The node that became idle last is taken first, as if nodes were a stack: k idle nodes are the first k.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path

from fallow.sim.traces.problems import Tally, table
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sites import Profile, made_up
from fallow.sim.types import Change, Scheduler

COLUMNS = ("time", "active_nodes", "total_nodes")
NODES, GPUS = 420, 8


class PhillyHoles:
    """`Holes` of Philly: idle are those of 420 nodes that are not active; in 97 % of the minutes the set has as many.

    Args:
        path: the file.
        window: what to play of it.
        profile: whether Slurm takes our nodes for others.
        scheduler: as configured.

    Raises:
        FallowError: it is no such file.
    """

    def __init__(self, path: Path, window: Window, profile: Profile, scheduler: Scheduler) -> None:
        tally = Tally(path, f"the columns {', '.join(COLUMNS)}")
        self._counts: list[tuple[float, int]] = []
        "(Unix time, idle nodes from then on), ascending"
        for number, row in table(path, COLUMNS, tally):
            try:
                at, active, total = (float(row[name]) for name in COLUMNS)
            except ValueError as error:
                tally.bad(number, "not a number", str(error))
                continue
            if not all(map(isfinite, (at, active, total))):
                tally.bad(number, "not a number")
                continue
            if self._counts and at < self._counts[-1][0]:
                tally.bad(number, "earlier than the line before")
                continue
            tally.use()
            if total != NODES:
                tally.assume(f"a line says another number of nodes than {NODES}, and more are left out")
            self._counts.append((at, max(0, int(min(total, NODES) - active))))
        tally.assume("not a Slurm cluster: idle nodes are offered as if it were")
        tally.assume("the node that became idle last is taken first")
        self.problems = tally.problems()
        names = [f"n{number:03d}" for number in range(1, NODES + 1)]
        self.site = made_up("philly", {"philly": names}, gpus=GPUS, profile=profile, scheduler=scheduler)
        self.begin, self.end = window.of(self._counts[0][0], self._counts[-1][0])

    def changes(self) -> Iterator[Change]:
        """See `fallow.sim.types.Holes`."""
        idle = [count for at, count in self._counts if at <= self.begin][-1]
        yield self.begin, tuple(range(idle)), ()
        for at, count in self._counts:
            if self.begin < at < self.end and count != idle:
                yield at, tuple(range(idle, count)), tuple(range(count, idle))
                idle = count
