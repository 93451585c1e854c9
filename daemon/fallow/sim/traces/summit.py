"""Holes as on Summit: for how long so many nodes were idle together, without their names (contrib/traces/README.md).

The node that has been busy for the longest is the next to be idle.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from fallow.sim.traces.problems import Tally, table
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sites import Profile, made_up
from fallow.sim.types import Change, Scheduler

COLUMNS = ("begin_s", "end_s", "nodes")
NODES, GPUS = 4734, 6
FIRST_AT = 1612915200.0
"""2021-02-10 00:00 UTC, when the source begins."""
DAYS = 2.0
"""So many are played unless it is said."""


class SummitHoles:
    """`Holes` of a machine that is idle as Summit was.

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
        self._holes: list[tuple[float, float, int]] = []
        "(begin, end, nodes), in Unix seconds"
        for number, row in table(path, COLUMNS, tally):
            try:
                begin_s, end_s, nodes = (int(row[name]) for name in COLUMNS)
            except ValueError as error:
                tally.bad(number, "not a number", str(error))
                continue
            if not (0 <= begin_s < end_s and nodes > 0):
                tally.bad(number, "it ends before it begins, or has no nodes")
                continue
            tally.use()
            self._holes.append((FIRST_AT + begin_s, FIRST_AT + end_s, nodes))
        tally.assume("holes are drawn from percentiles of the source; how they go together is a model")
        self.problems = tally.problems()
        if self._most_at_once() > NODES:
            raise tally.refuse(f"more than {NODES} nodes are idle at once")
        names = [f"n{number:04d}" for number in range(1, NODES + 1)]
        self.site = made_up("summit", {"batch": names}, gpus=GPUS, profile=profile, scheduler=scheduler)
        days = DAYS if window.days is None else window.days
        self.begin, self.end = replace(window, days=days).of(FIRST_AT, max(end for _, end, _ in self._holes))

    def _most_at_once(self) -> int:
        changes: Counter[float] = Counter()
        for begin, end, nodes in self._holes:
            changes[begin] += nodes
            changes[end] -= nodes
        return max(accumulate(changes[at] for at in sorted(changes)))

    def changes(self) -> Iterator[Change]:
        """See `fallow.sim.types.Holes`."""
        joining: dict[float, list[tuple[float, int]]] = {self.begin: []}
        for begin, end, nodes in self._holes:
            if begin < self.end and end > self.begin:
                joining.setdefault(max(begin, self.begin), []).append((end, nodes))
        times = set(joining) | {end for holes in joining.values() for end, _ in holes}
        busy, leaving = deque(range(NODES)), dict[float, list[int]]()
        for at in sorted(at for at in times if at < self.end):
            busy.extend(left := leaving.pop(at, []))
            joined: list[int] = []
            for end, number in joining.get(at, ()):
                chosen = [busy.popleft() for _ in range(number)]
                joined += chosen
                leaving.setdefault(end, []).extend(chosen)
            yield at, tuple(sorted(joined)), tuple(sorted(left))
