"""Philly: idle nodes of a large GPU cluster per minute, without their names (contrib/traces/README.md). No Slurm."""

from __future__ import annotations

from pathlib import Path

from fallow.sim.traces.counts import CountedHoles
from fallow.sim.traces.problems import Tally, table
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sites import Profile, made_up
from fallow.sim.types import Scheduler

COLUMNS = ("time", "active_nodes", "total_nodes")
NODES, GPUS = 420, 8


def read_counts(path: Path, window: Window, profile: Profile, scheduler: Scheduler) -> CountedHoles:
    """Idle are those of 420 nodes that are not active; in 97 % of the minutes that is what the set has.

    Raises:
        FallowError: it is no such file.
    """
    tally = Tally(path, f"the columns {', '.join(COLUMNS)}")
    counts: list[tuple[float, str, int]] = []
    for number, row in table(path, COLUMNS, tally):
        try:
            at, active, total = (float(row[name]) for name in COLUMNS)
        except ValueError as error:
            tally.bad(number, "not a number", str(error))
            continue
        if counts and at < counts[-1][0]:
            tally.bad(number, "earlier than the line before")
            continue
        tally.use()
        if total != NODES:
            tally.assume(f"a line says another number of nodes than {NODES}, and more are left out")
        counts.append((at, "philly", max(0, int(min(total, NODES) - active))))
    tally.assume("not a Slurm cluster: idle nodes are offered as if it were")
    tally.assume("the node that became idle last is taken first")
    tally.problems()
    names = [f"n{number:03d}" for number in range(1, NODES + 1)]
    site = made_up("philly", {"philly": names}, gpus=GPUS, profile=profile, scheduler=scheduler)
    return CountedHoles(site, {"philly": range(NODES)}, counts, counts[-1][0], window, tally)
