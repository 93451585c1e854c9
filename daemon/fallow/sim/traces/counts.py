"""Holes of traces that count idle nodes without naming them.

The node that became idle last is taken first, as if nodes were a stack: of a group with k idle nodes it is the first k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from fallow.sim.traces.problems import Tally
from fallow.sim.traces.recorded import Window
from fallow.sim.types import Problems, Site


class CountedHoles:
    """`Holes` from counts.

    Args:
        site: its nodes in the order of the groups.
        groups: group -> its nodes' places in `site.nodes`.
        counts: (Unix time, group, idle nodes from then on), ascending.
        last: when the trace ends.
        window: what to play of it.
        tally: of the reader.
    """

    def __init__(
        self,
        site: Site,
        groups: Mapping[str, range],
        counts: Sequence[tuple[float, str, int]],
        last: float,
        window: Window,
        tally: Tally,
    ) -> None:
        self.problems: Problems = tally.problems()
        self.begin, self.end = window.of(counts[0][0], last)
        self.site = site
        self._groups = groups
        self._counts = counts

    def changes(self) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...]]]:
        idle = dict.fromkeys(self._groups, 0)
        before = dict(idle)
        begun = False
        for at, rows in groupby(self._counts, key=lambda row: row[0]):
            if at >= self.end:
                break
            if at > self.begin and not begun:
                begun = True
                if any(idle.values()):
                    yield self.begin, *self._change(before, idle)
                before = dict(idle)
            idle |= {group: count for _, group, count in rows}
            if begun and idle != before:
                yield at, *self._change(before, idle)
                before = dict(idle)
        if not begun and any(idle.values()):
            yield self.begin, *self._change(before, idle)

    def _change(self, before: Mapping[str, int], after: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Nodes that become idle, and nodes that are taken."""
        joined: list[int] = []
        left: list[int] = []
        for group, places in self._groups.items():
            joined += places[before[group] : after[group]]
            left += places[after[group] : before[group]]
        return tuple(joined), tuple(left)
