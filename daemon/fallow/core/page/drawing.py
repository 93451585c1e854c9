"""Markup in which every text is escaped, and the drawings of a report page as SVG. Pure."""

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, tzinfo
from html import escape
from itertools import accumulate
from typing import NamedTuple

from fallow.core.page.history import Stay
from fallow.model import AllocationKind, ChangeKind, GenerationReport
from fallow.text import clean

BEGIN_X, END_X = 190.0, 920.0
"""Where the axis of a drawing begins and ends; a drawing is 960 wide."""
KINDS = {AllocationKind.BASE: "base", AllocationKind.HARVEST: "harvest", None: "other"}
MARKS = {"absorb": "M-4,4L0,-4L4,4Z", "release": "M0,-4L4,0L0,4L-4,0Z", "eject": "M-4,-4L4,4M-4,4L4,-4"}
"""Shapes that tell changes apart without colour."""
TICKS_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400, 28_800, 86_400, 172_800, 604_800)


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str | float) -> Markup:
    """Make an element. The attribute `text_anchor` becomes text-anchor, and `class_` class."""
    pairs = (f' {key.strip("_").replace("_", "-")}="{_markup(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{''.join(pairs)}>{''.join(map(_markup, children))}</{name}>")


def _markup(value: str | float) -> str:
    if isinstance(value, Markup):
        return value
    return escape(clean(value, 400)) if isinstance(value, str) else f"{value:.1f}"  # a reason may be a traceback


def span(seconds: float | None) -> str:
    """A duration for people: `85 ms`, `4.2 s`, `3 min 12 s`, `2 h 5 min`, `3 d 4 h`; `-` for unknown."""
    if seconds is None or seconds < 59.95:
        return "-" if seconds is None else f"{seconds:.1f} s" if seconds >= 0.9995 else f"{1000 * seconds:.0f} ms"
    minutes, second = divmod(round(seconds), 60)
    (hours, minute), (days, hour) = divmod(minutes, 60), divmod(minutes // 60, 24)
    return f"{days} d {hour} h" if days else f"{hours} h {minute} min" if hours else f"{minute} min {second} s"


def moment(at: float, zone: tzinfo | None, form: str = "%Y-%m-%d %H:%M:%S %z") -> str:
    """A time with its offset from UTC; zone None: that of this machine."""
    return datetime.fromtimestamp(at, UTC).astimezone(zone).strftime(form)


def mark(kind: str, x: float, y: float, title: str = "") -> Markup:
    shift = Markup(f"translate({x:.1f},{y:.1f})")
    return tag("path", tag("title", title), class_=Markup(f"mark {kind}"), d=Markup(MARKS[kind]), transform=shift)


def _svg(height: float, label: str, parts: Iterable[str]) -> Markup:
    drawing = tag("svg", *parts, viewBox=f"0 0 960 {height:.0f}", role="img", aria_label=label)
    return tag("div", drawing, class_="wide", tabindex="0")


def _label(text: str, x: float, y: float, line: str, anchor: str = "end") -> Markup:
    """A text, and the line of the grid that it names."""
    name = tag("text", tag("title", text), text if len(text) < 28 else f"{text[:26]}…", x=x, y=y, text_anchor=anchor)
    return tag("g", name, tag("path", class_="grid", d=Markup(line)))


class TimeAxis(NamedTuple):
    begin_at: float
    end_at: float
    zone: tzinfo | None

    def x(self, at: float) -> float:
        return BEGIN_X + (END_X - BEGIN_X) * (at - self.begin_at) / max(self.end_at - self.begin_at, 1e-6)

    def grid(self, bottom: float) -> list[str]:
        """Lines at round times, with labels below `bottom`."""
        seconds = self.end_at - self.begin_at
        step = next((step for step in TICKS_S if seconds <= 6 * step), math.ceil(seconds / 6))
        form = "%H:%M:%S" if step < 60 else "%H:%M" if seconds < 86_400 else "%d %b %H:%M"
        times = range(math.ceil(self.begin_at / step) * step, math.floor(self.end_at) + 1, step)
        ticks = [(self.x(at), moment(at, self.zone, form)) for at in times]
        return [_label(text, x, bottom + 16, f"M{x:.1f},4V{bottom:.1f}", "middle") for x, text in ticks]


def rows_of(stays: Iterable[Stay]) -> list[list[Stay]]:
    """Put stays on one host into one row, and those at the same time into several. Rows begin in order of arrival."""
    rows: dict[tuple[str, int], list[Stay]] = {}
    for stay in stays:
        number, host = 0, stay.host or stay.member
        while (row := rows.setdefault((host, number), [])) and row[-1].left_at > stay.joined_at:
            number += 1
        row.append(stay)
    return [*rows.values()]


def timeline(axis: TimeAxis, rows: Sequence[Sequence[Stay]]) -> Markup:
    """A row per node, a bar per stay, and a mark where a change took the node in or out."""
    pitch = 20.0 if len(rows) <= 40 else 14.0
    parts = axis.grid(10 + pitch * len(rows))
    for number, row in enumerate(rows):
        y, host, member = 10 + pitch * (number + 0.5), row[0].host, row[0].member
        name = host if host and len(row) > 1 else f"{host} {member}".strip()
        parts.append(_label(name, BEGIN_X - 10, y + 4, f"M{BEGIN_X},{y}H{END_X}"))
        for stay in row:
            x, end, kind = axis.x(stay.joined_at), axis.x(stay.left_at), Markup(f"bar {KINDS[stay.kind]}")
            times = f"{moment(stay.joined_at, axis.zone)} to {moment(stay.left_at, axis.zone)}"
            length = span(stay.left_at - stay.joined_at)
            title = tag("title", f"{stay.member} {stay.host}, {KINDS[stay.kind]}: {times}, {length}")
            parts.append(tag("rect", title, class_=kind, x=x, y=y + 4 - pitch / 2, width=end - x, height=pitch - 8))
            if stay.joined_at > axis.begin_at:
                parts.append(mark("absorb", x, y, f"{stay.member} joined: {stay.joining[:160]}"))
            if stay.end:
                parts.append(mark(stay.end, end, y, f"{stay.member} left: {stay.leaving[:160]}"))
    return _svg(36 + pitch * len(rows), "Each node's time as a member", parts)


def member_count(axis: TimeAxis, stays: Iterable[Stay]) -> Markup:
    """Number of members over time: base nodes below, harvested nodes on top of them."""
    changes: dict[float, list[int]] = {}
    "x -> change of the number of members of each kind; half a pixel apart, so that a long run makes no larger drawing"
    for stay in stays:
        for at, sign in ((stay.joined_at, 1), (stay.left_at, -1)):
            changes.setdefault(round(2 * axis.x(at)) / 2, [0, 0, 0])[[*KINDS].index(stay.kind)] += sign
    edges = sorted(changes)
    counts = zip(*([*accumulate(changes[x][kind] for x in edges)] for kind in range(3)), strict=True)
    columns = {x: [*accumulate(count)] for x, count in zip(edges, counts, strict=True)}
    peak = max(column[-1] for column in columns.values()) or 1
    parts = axis.grid(150)
    for value in sorted({0, peak // 2, peak}):
        y = 150 - 136 * value / peak
        parts.append(_label(str(value), BEGIN_X - 10, y + 4, f"M{BEGIN_X},{y}H{END_X}"))
    for layer, name in reversed([*enumerate(KINDS.values())]):
        if any(column[layer] > (column[layer - 1] if layer else 0) for column in columns.values()):
            steps = "".join(f"H{x:.1f}V{150 - 136 * column[layer] / peak:.1f}" for x, column in columns.items())
            parts.append(tag("path", class_=f"bar {name}", d=Markup(f"M{BEGIN_X},150{steps}V150Z")))
    return _svg(176, f"Number of members over time, at most {peak}", parts)


def pauses(generations: Sequence[GenerationReport]) -> Markup:
    """A mark for each pause on a logarithmic axis: planned ones above, those after a loss below."""
    powers = [math.log10(max(generation.pause_s or 0.0, 1e-6)) for generation in generations]
    low, high = math.floor(min(powers)), math.floor(max(powers)) + 1
    width = (END_X - BEGIN_X) / (high - low)
    rows = {"planned": 26, "unplanned": 68}
    parts = [_label(name, BEGIN_X - 10, y + 4, f"M{BEGIN_X},{y}H{END_X}") for name, y in rows.items()]
    for number in range(high - low + 1):
        x = BEGIN_X + width * number
        parts.append(_label(span(10.0 ** (low + number)), x, 108, f"M{x:.1f},4V92", "middle"))
    for number, (power, one) in enumerate(zip(powers, generations, strict=True)):
        kind, y = ("eject", 68) if one.kind is ChangeKind.EJECT else ("release", 26)
        title = f"generation {one.generation}: {span(one.pause_s)}, {one.reason[:160]}"
        # Marks of like pauses lie beside each other.
        parts.append(mark(kind, BEGIN_X + width * (power - low), y + 6 * (number % 5 - 2), title))
    return _svg(114, "Length of each pause", parts)
