"""The membership timeline: a row per node, time from left to right; and the last changes with their reasons."""

from itertools import groupby
from typing import ClassVar

from rich.cells import cell_len
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Static

from fallow_tui.palette import EVENTS, MUTED, glyph, run_badge
from fallow_tui.text import clock, duration, fit
from fallow_tui.view import Freshness, View

ZOOM_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
MARK_EVERY = 15
"""Columns between two marks of the time axis."""


class Timeline(Widget, can_focus=True):
    """Users of the nodes over time. Shows only nodes that were ours in that time."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll(-1)", "Up", show=False, id="timeline.up"),
        Binding("down,j", "scroll(1)", "Down", show=False, id="timeline.down"),
        Binding("plus,equals_sign", "zoom(-1)", "Zoom in", key_display="+", id="timeline.in"),
        Binding("minus", "zoom(1)", "Zoom out", key_display="-", id="timeline.out"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = "3 Membership"
        self._view = View()
        self._is_stale = False
        self._zoom = 1
        self._top = 0

    def show(self, view: View, now: float) -> None:
        """Draw the view."""
        self._view, self._is_stale = view, view.freshness(now) is Freshness.STALE
        self.border_title = f"3 Membership  {duration(ZOOM_S[self._zoom])} a column"
        self.refresh()

    def action_scroll(self, rows: int) -> None:
        """Scroll by rows."""
        self._top = max(0, self._top + rows)
        self.refresh()

    def action_zoom(self, steps: int) -> None:
        """Change the time of a column."""
        self._zoom = min(len(ZOOM_S) - 1, max(0, self._zoom + steps))
        self.border_title = f"3 Membership  {duration(ZOOM_S[self._zoom])} a column"
        self.refresh()

    def render(self) -> Text:
        width, height = self.size.width, max(1, self.size.height - 1)
        label_width = min(14, max((cell_len(name) for name in self._view.our_rows), default=4)) + 1
        columns, column_s = max(1, width - label_width), ZOOM_S[self._zoom]
        rows = self._view.timeline(columns, column_s)
        self._top = min(self._top, max(0, len(rows) - height))
        text = Text(no_wrap=True, end="")
        if not rows:
            text.append("no node was ours in this time", MUTED)
            return text
        for name in list(rows)[self._top : self._top + height]:
            text.append(fit(name, label_width - 1) + " ", MUTED)
            for cell, cells in groupby(rows[name]):
                sign, style = glyph(self._view, cell)
                text.append(sign * len(list(cells)), style)
            text.append("\n")
        text.append_text(self._axis(label_width, columns, column_s, len(rows) - self._top - height))
        if self._is_stale:
            text.stylize(Style(dim=True))
        return text

    @staticmethod
    def _axis(label_width: int, columns: int, column_s: float, rows_below: int) -> Text:
        """The time axis: marks at equal distances from the right edge, which is now."""
        line = [" "] * columns
        for columns_ago in range(0, columns, MARK_EVERY):
            mark = f"-{duration(columns_ago * column_s)}┤" if columns_ago else "now┤"
            start = columns - columns_ago - len(mark)
            if start >= 0:
                line[start : start + len(mark)] = mark
        hidden_rows = f"↓{rows_below}" if rows_below > 0 else ""
        return Text(fit(hidden_rows, label_width) + "".join(line), MUTED)


class ChangeList(Static):
    """The last changes of membership, newest first, each with its reason."""

    def on_mount(self) -> None:
        self.border_title = "Last changes"

    def show(self, view: View) -> None:
        """Draw the view."""
        changes = view.changes(max(1, self.size.height))
        if not changes:
            self.update(Text("none yet", MUTED))
            return
        grid = Table.grid("time", "what", padding=(0, 1, 0, 0))
        for event in changes:
            what = Text()
            if event.run is not None:
                what.append_text(run_badge(view, event.run))
            what.append(f" {event.kind} ", EVENTS.get(event.kind, ""))
            what.append(event.text)
            grid.add_row(Text(clock(event.at), MUTED), what)
        self.update(grid)
