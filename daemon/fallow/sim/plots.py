"""Plots of a simulation, as SVG and PNG: the same bytes for the same numbers and the same matplotlib.

Figures are made without pyplot, which keeps global state and looks for a display. No time, path or version gets in.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fallow.model import Exit, FallowError, Struct
from fallow.sim.hole_lengths import HoleLengths
from fallow.sim.plot_holes import draw as draw_holes
from fallow.sim.report import Played
from fallow.sim.series import Cell, NodeMap, Series, shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    Cell.OTHERS: "#9aa5b4",
    Cell.IDLE: "#f6efdd",
    Cell.STARTING: "#e9a23b",
    Cell.TRAINING: "#15795a",
    Cell.DOWN: "#3a3d42",
}
"""Told apart without colour, too: each has a lightness of its own."""

WORDS = {
    Cell.OTHERS: "jobs of others",
    Cell.IDLE: "idle",
    Cell.STARTING: "ours, starting or leaving",
    Cell.TRAINING: "ours, training",
    Cell.DOWN: "down",
}

LINES = ("#15795a", "#d55e00", "#0072b2", "#cc79a7", "#e69f00", "#56b4e9", "#23272e", "#7a5230", "#9aa5b4", "#84a329")
"""Mostly Okabe and Ito's, which people with any colour vision tell apart; markers and dashes differ as well."""

MARKERS, DASHES = "os^DvPX<>*", ("-", "--", ":", "-.")

ROOM = 0.026
"""Of the map's height, which a label needs."""

PUBLISHED: dict[str, tuple[tuple[float, float], ...]] = {
    "greedy": ((250, 0.423), (60, 0.734), (18, 0.907), (5, 0.973), (2, 0.989)),
    "hold:120": ((250, 0.417), (60, 0.742), (18, 0.902), (5, 0.952), (2, 0.965)),
    "hold:600": ((250, 0.432), (60, 0.706), (18, 0.810), (5, 0.840), (2, 0.847)),
    "gated:120": ((250, 0.441), (60, 0.742), (18, 0.905), (5, 0.971), (2, 0.987)),
    "gated:600": ((250, 0.502), (60, 0.767), (18, 0.913), (5, 0.973), (2, 0.989)),
}
"""(cost of taking nodes in, result) on the idle map of Summit itself, of which the trace has the statistics only."""

_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#5b6470",
    "axes.titlelocation": "left",
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "fallow",
}


class Plot(Struct, frozen=True, kw_only=True):
    name: str
    "of its files, without a suffix"
    caption: str
    svg: bytes
    png: bytes


def available() -> None:
    """Raises FallowError (69) if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FallowError(
            f"plots need matplotlib, which is not there ({error}); run: pip install 'fallow[sim]', or leave --out away",
            Exit.UNAVAILABLE,
        ) from None


def plots(played: Sequence[Played], trace: str, holes: HoleLengths) -> list[Plot]:
    """All that the plays give.

    Args:
        played: in the order asked for; the first is the one whose nodes are shown over time.
        trace: its name; beside `summit`, published results are shown.
        holes: of the cluster if nobody harvests.
    """
    first, known = played[0], PUBLISHED if trace == "summit" else {}
    found = []
    if len(holes):
        found.append(
            _plot(
                "holes",
                "How long nodes stay idle while nobody harvests them: where the idle time is, and how many holes last."
                + (" Holes that had not ended at the end count as far as they were seen." if holes.cut else ""),
                lambda figure: draw_holes(figure, holes),
                (10.5, 4.2),
            )
        )
    if first.series is not None:
        found.append(
            _plot(
                "utilisation",
                f"What all nodes did over time, before and with {first.name}.",
                lambda figure: _utilisation(figure, first),
                (9, 5.6),
            )
        )
        if first.series.map is not None and first.series.map.cells:
            found.append(
                _plot(
                    "map",
                    f"Which node did what, with {first.name}.",
                    lambda figure: _map(figure, first),
                    (9, 6.4),
                )
            )
    if len({each.absorb_s for each in played}) > 1:
        found.append(
            _plot(
                "cost",
                "Useful work, of all that the same idle nodes could have done, by what a change of membership costs."
                + (" Crosses: the same policies on Summit's idle map itself, without start-ups." if known else ""),
                lambda figure: _cost(figure, played, known),
                (9, 4.8),
            )
        )
    if any(each.series is not None for each in played):
        found.append(
            _plot(
                "delay",
                "How long jobs of others waited, in all and because a node was still ours.",
                lambda figure: _delay(figure, played),
                (10.5, 4.2),
            )
        )
    return found


def _plot(name: str, caption: str, draw: Callable[[Figure], None], size: tuple[float, float]) -> Plot:
    import matplotlib
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its font cache
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # nobody's matplotlibrc
        matplotlib.rcParams.update({**_RC, "svg.hashsalt": f"fallow-{name}"})
        figure = Figure(figsize=size, dpi=110, layout="constrained")
        draw(figure)
        svg, png = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(png, format="png", metadata={"Software": None})
    return Plot(name=name, caption=caption, svg=svg.getvalue(), png=png.getvalue())


def _utilisation(figure: Figure, played: Played) -> None:
    series = played.series
    assert series is not None
    taken, training, ours, idle = shares(series)
    edges, unit = _times(series)
    before, after = figure.subplots(2, 1, sharex=True, sharey=True)
    used = _mean(series, taken)
    _stack(before, edges, series.nodes, [(Cell.OTHERS, taken), (Cell.IDLE, series.idle)])
    before.set_title(f"Before: {used:.1%} of the node time in use")
    _stack(
        after,
        edges,
        series.nodes,
        [(Cell.OTHERS, taken), (Cell.TRAINING, training), (Cell.STARTING, ours), (Cell.IDLE, idle)],
    )
    after.set_title(f"With {played.name}: {used + _mean(series, training):.1%}")
    after.set_xlabel(unit)
    for axes in (before, after):
        axes.set_ylabel("nodes")
    handles, _ = after.get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=4)


def _stack(axes: Axes, edges: Sequence[float], nodes: int, layers: Sequence[tuple[Cell, Sequence[float]]]) -> None:
    floor = [0.0] * (len(edges) - 1)
    for cell, level in layers:
        top = [a + b for a, b in zip(floor, level, strict=True)]
        axes.stairs(top, edges, baseline=floor, fill=True, color=COLOURS[cell], label=WORDS[cell], linewidth=0)
        floor = top
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, nodes)


def _map(figure: Figure, played: Played) -> None:
    import numpy as np
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    series = played.series
    assert series is not None
    assert series.map is not None
    found: NodeMap = series.map
    axes = figure.subplots()
    grid = np.frombuffer(b"".join(found.cells), dtype=np.uint8).reshape(len(found.cells), len(found.nodes)).T
    scale, unit = _unit(series)
    right = min(len(found.cells) * series.width_s, series.end - series.begin) / scale
    axes.imshow(
        grid,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap([COLOURS[cell] for cell in Cell]),
        vmin=-0.5,
        vmax=len(Cell) - 0.5,
        extent=(0, right, len(found.nodes), 0),
    )
    ticks, names = _groups(found.groups)
    for border in [tick[1] for tick in ticks[:-1]]:
        axes.axhline(border, color="white", linewidth=0.8)
    if len(ticks) > 1:
        labels: list[tuple[float, str]] = []
        for (top, bottom), name in zip(ticks, names, strict=True):
            if not labels or (top + bottom) / 2 - labels[-1][0] >= ROOM * len(found.nodes):
                labels.append(((top + bottom) / 2, name))
        axes.set_yticks(*zip(*labels, strict=True))
        axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_ylabel("nodes" if found.every == 1 else f"nodes, every {found.every}th")
    axes.set_xlabel(unit)
    seen = {cell for row in found.cells for cell in row}
    handles = [
        Patch(facecolor=COLOURS[c], edgecolor="#5b6470", linewidth=0.4, label=WORDS[c]) for c in Cell if c in seen
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)


def _groups(groups: Sequence[str]) -> tuple[list[tuple[int, int]], list[str]]:
    """First and last row (exclusive) of each stretch of rows with the same word, and the words."""
    found: list[tuple[int, int]] = []
    names: list[str] = []
    for row, name in enumerate(groups):
        if not names or names[-1] != name:
            names.append(name)
            found.append((row, row))
        found[-1] = (found[-1][0], row + 1)
    return found, names


def _cost(figure: Figure, played: Sequence[Played], published: dict[str, tuple[tuple[float, float], ...]]) -> None:
    axes = figure.subplots()
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in played:
        lines.setdefault(each.name.partition("/")[0], []).append((each.absorb_s, each.score.ideal_ratio))
    for number, (name, points) in enumerate(lines.items()):
        colour = LINES[number % len(LINES)]
        points.sort()
        drawn: dict[str, Any] = {
            "color": colour,
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 5,
            "linewidth": 1.6,
            "zorder": 3 - number / 100,
        }
        axes.plot(*zip(*points, strict=True), label=name, **drawn)
        if name in published:
            axes.plot(*zip(*published[name], strict=True), color=colour, marker="x", markersize=7, linestyle="none")
    if any(name in published for name in lines):
        axes.plot([], [], color="#5b6470", marker="x", markersize=7, linestyle="none", label="idle map itself")
    axes.set_xscale("symlog", linthresh=0.1, linscale=0.3)
    marks = [0.1, 1, 5, 18, 60, 250]
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.set_xlim(0, 320)
    lowest = min(y for points in lines.values() for _, y in points)
    axes.set_ylim(max(0.0, math.floor(lowest * 20 - 0.5) / 20), 1.005)
    axes.grid(color="#d9dde3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("standstill of the whole run when nodes are taken in, seconds")
    axes.set_ylabel("of the ideal work")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _delay(figure: Figure, played: Sequence[Played]) -> None:
    first = next(each.series for each in played if each.series is not None)
    if first.queued_s:
        left, right = figure.subplots(1, 2)
        _distribution(left, first.queued_without_s, "without us", COLOURS[Cell.DOWN], "-")
        _distribution(left, first.queued_s, f"with {played[0].name}", LINES[0], "--")
        _seconds(left, "seconds from submission to start", "of all jobs of others")
        left.legend(loc="lower right", fontsize=8)
    else:
        right = figure.subplots()
    drawn = 0
    # What a change costs a run makes little difference to others.
    for number, each in enumerate([each for each in played if "/" not in each.name] or played):
        waits = each.series.waits_s if each.series is not None else ()
        if waits:
            colour, style = LINES[number % len(LINES)], DASHES[number % len(DASHES)]
            label = f"{each.name}: {len(waits)} jobs, at most {waits[-1]:.1f} s"
            _distribution(right, waits, label, colour, style)
            drawn += 1
    if not drawn:
        right.text(0.5, 0.5, "no job of others waited\nfor a node of ours", ha="center", va="center", color="#5b6470")
        right.set_axis_off()
        return
    _seconds(right, "seconds waited for a node of ours", "of the jobs that waited")
    figure.legend(handles=right.get_legend_handles_labels()[0], loc="outside right center", fontsize=7.5)


def _distribution(axes: Axes, ascending: Sequence[float], label: str, colour: str, style: str) -> None:
    """The share of values that are no larger than each."""
    heights = [n / len(ascending) for n in range(len(ascending) + 1)]
    axes.step(
        [ascending[0], *ascending], heights, where="post", color=colour, linestyle=style, label=label, linewidth=1.6
    )


def _seconds(axes: Axes, what: str, whose: str) -> None:
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, 1.01)
    axes.grid(color="#d9dde3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(what)
    axes.set_ylabel(whose)


def _times(series: Series) -> tuple[list[float], str]:
    scale, unit = _unit(series)
    edges = [number * series.width_s / scale for number in range(len(series.idle))]
    return [*edges, (series.end - series.begin) / scale], unit


def _unit(series: Series) -> tuple[float, str]:
    seconds = series.end - series.begin
    if seconds > 2 * 86400:
        return 86400.0, "days since the begin"
    return (3600.0, "hours since the begin") if seconds > 2 * 3600 else (60.0, "minutes since the begin")


def _mean(series: Series, level: Sequence[float]) -> float:
    """Share of all node time."""
    lengths = [series.width_s] * (len(level) - 1) + [series.end - series.begin - series.width_s * (len(level) - 1)]
    total = sum(a * b for a, b in zip(level, lengths, strict=True))
    return total / (series.nodes * (series.end - series.begin))
