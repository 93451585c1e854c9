"""Holes as on Summit: for how long so many nodes were idle together, without their names (contrib/traces/README.md).

The node that has been busy for the longest is the next to be idle.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from fallow.sim.traces.problems import Tally, numbers
from fallow.sim.traces.recorded import Window
from fallow.sim.traces.sites import Profile, made_up
from fallow.sim.types import Change, Recording, Scheduler

COLUMNS = ("begin_s", "end_s", "nodes")
NODES, GPUS = 4734, 6
FIRST_AT = 1612915200.0
"""2021-02-10 00:00 UTC, when the source begins."""
DAYS = 2.0
"""So many are played unless it is said."""
Hole = tuple[float, float, int]
"""(begin, end, nodes), in Unix seconds."""


def read(path: Path, window: Window, profile: Profile, scheduler: Scheduler) -> Recording:
    """Holes of a machine that is idle as Summit was.

    Raises:
        FallowError: it is no such file.
    """
    tally = Tally(path, f"the columns {', '.join(COLUMNS)}")
    holes: list[Hole] = []
    for number, _, (begin_s, end_s, nodes) in numbers(path, COLUMNS, tally):
        if not (0 <= begin_s < end_s and nodes >= 1):
            tally.bad(number, "it ends before it begins, or has no nodes")
            continue
        tally.use()
        holes.append((FIRST_AT + begin_s, FIRST_AT + end_s, int(nodes)))
    tally.assume("holes are drawn from percentiles of the source; how they go together is a model")
    found = tally.result()
    if _most_at_once(holes) > NODES:
        raise tally.refuse(f"more than {NODES} nodes are idle at once")
    days = DAYS if window.days is None else window.days
    begin, end = replace(window, days=days).of(FIRST_AT, max(end for _, end, _ in holes))
    names = [f"n{number:04d}" for number in range(1, NODES + 1)]
    return Recording(
        site=made_up("summit", {"batch": names}, gpus=GPUS, profile=profile, scheduler=scheduler),
        begin=begin,
        end=end,
        read=found,
        changes=list(_changes(holes, begin, end)),
    )


def _most_at_once(holes: Sequence[Hole]) -> int:
    changes: Counter[float] = Counter()
    for begin, end, nodes in holes:
        changes[begin] += nodes
        changes[end] -= nodes
    return max(accumulate(changes[at] for at in sorted(changes)))


def _changes(holes: Sequence[Hole], first: float, last: float) -> Iterator[Change]:
    joining: dict[float, list[tuple[float, int]]] = {first: []}
    for begin, end, nodes in holes:
        if begin < last and end > first:
            joining.setdefault(max(begin, first), []).append((end, nodes))
    times = set(joining) | {end for some in joining.values() for end, _ in some}
    busy, leaving = deque(range(NODES)), dict[float, list[int]]()
    for at in sorted(at for at in times if at < last):
        busy.extend(left := leaving.pop(at, []))
        joined: list[int] = []
        for end, number in joining.get(at, ()):
            chosen = [busy.popleft() for _ in range(number)]
            joined += chosen
            leaving.setdefault(end, []).extend(chosen)
        yield at, tuple(sorted(joined)), tuple(sorted(left))
