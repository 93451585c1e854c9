"""The plot of how long holes last: the idle time by the length of its hole, and the survival of holes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from fallow.sim.hole_lengths import HoleLengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDED, CUT, LINE = "#15795a", "#e9a23b", "#23272e"

MARKS = {
    1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 6 * 3600: "6 h", 86400: "1 d", 7 * 86400: "7 d",
    30 * 86400: "30 d", 365 * 86400: "1 y",
}  # fmt: skip
"""Of the axes of lengths."""

STEP = math.sqrt(2.0)
"""From one bar's length to the next one's."""

POINTS = 300
"""Of a curve."""


def draw(figure: Figure, holes: HoleLengths) -> None:
    """Args: holes: at least one."""
    longest = max((*holes.ended[-1:], *holes.cut[-1:]))
    shortest = min((*holes.ended[:1], *holes.cut[:1]))
    edges = _edges(shortest, longest)
    left, right = figure.subplots(1, 2)
    _idle_time(left, holes, edges)
    _survival(right, holes, edges)


def _edges(shortest: float, longest: float) -> list[float]:
    """All lengths lie within, and none at the last one."""
    first = math.floor(math.log(shortest, STEP) - 1e-9)
    last = math.floor(math.log(longest, STEP) + 1e-9) + 1
    return [STEP**number for number in range(first, last + 1)]


def _idle_time(axes: Axes, holes: HoleLengths, edges: Sequence[float]) -> None:
    """Bars: the share of the idle time in holes of that length; a line: in holes of that length or shorter."""
    floor = [0.0] * (len(edges) - 1)
    for lengths, colour, label in ((holes.ended, ENDED, "ended"), (holes.cut, CUT, "idle still at the end")):
        if lengths:
            bars = [sum(_within(lengths, *pair)) / holes.idle_s for pair in pairwise(edges)]
            top = [a + b for a, b in zip(floor, bars, strict=True)]
            axes.stairs(top, edges, baseline=floor, fill=True, color=colour, label=label, linewidth=0)
            floor = top
    axes.plot(edges, [0.0, *accumulate(floor)], color=LINE, linewidth=1.6, label="up to this length")
    _lengths(axes, edges, "of the idle time")
    axes.legend(loc="upper left", fontsize=8)


def _within(ascending: Sequence[float], least: float, below: float) -> Sequence[float]:
    return ascending[bisect_left(ascending, least) : bisect_left(ascending, below)]


def _survival(axes: Axes, holes: HoleLengths, edges: Sequence[float]) -> None:
    """Kaplan and Meier's, with the lengths that half and nine in ten do not exceed."""
    grid = [edges[0] * (edges[-1] / edges[0]) ** (number / POINTS) for number in range(POINTS + 1)]
    axes.step(grid, [holes.longer(age) for age in grid], where="post", color=ENDED, linewidth=1.6)
    for q in (0.5, 0.9):
        if (length := holes.quantile(q)) is not None:
            axes.plot([edges[0], length, length], [1 - q, 1 - q, 0.0], color="#5b6470", linewidth=0.8, linestyle=":")
    _lengths(axes, edges, "of the holes last longer")


def _lengths(axes: Axes, edges: Sequence[float], whose: str) -> None:
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1])
    marks = {seconds: word for seconds, word in MARKS.items() if edges[0] <= seconds <= edges[-1]}
    axes.set_xticks(list(marks), list(marks.values()))
    axes.minorticks_off()
    axes.set_ylim(0, 1.01)
    axes.grid(color="#d9dde3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("length of a hole")
    axes.set_ylabel(whose)
