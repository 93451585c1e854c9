"""The table of runs."""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from fallow.model import RunView
from fallow_tui.palette import MUTED, STATUSES, WARN, run_badge, run_colour
from fallow_tui.text import count, duration, figure, fit, sparkline
from fallow_tui.view import View

SOON_S = 60.0
"""A release within this time is marked."""


class RunsTable(DataTable[Text]):
    """One row per run; `enter` opens it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "Details", id="run.details"),
        Binding("j", "cursor_down", "Down", show=False, id="run.down"),
        Binding("k", "cursor_up", "Up", show=False, id="run.up"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, cursor_type="row", cell_padding=0, zebra_stripes=False)
        self.border_title = "2 Runs"
        self._layout = -1
        self._view = View()
        self._now = 0.0

    @property
    def selected(self) -> str | None:
        """The id of the run under the cursor."""
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def show(self, view: View, now: float) -> None:
        """Draws what is in the view; the cursor stays on its run."""
        self._view, self._now = view, now
        runs = live_first(view.snapshot.runs if view.snapshot is not None else [])
        width = self.app.size.width
        columns = self._columns(width)
        keys = [row.value for row in self.rows]
        if self._layout != width or keys != [run.run for run in runs]:
            self._rebuild(columns, width, runs)
        for run in runs:
            for (key, _, size), value in zip(columns, self._row(run, width), strict=True):
                value.truncate(size, overflow="ellipsis")
                if self.get_cell(run.run, key) != value:
                    self.update_cell(run.run, key, value)

    def on_resize(self, _: events.Resize) -> None:
        self.show(self._view, self._now)

    def _rebuild(self, columns: list[tuple[str, str, int]], width: int, runs: list[RunView]) -> None:
        kept = self.selected
        self.clear(columns=True)
        for key, label, size in columns:
            self.add_column(Text(label, MUTED), key=key, width=size + 1)
        for run in runs:
            self.add_row(*[Text("")] * len(columns), key=run.run)
        if kept is not None and kept in (row.value for row in self.rows):
            self.move_cursor(row=self.get_row_index(kept))
        self._layout = width

    @staticmethod
    def _columns(width: int) -> list[tuple[str, str, int]]:
        """Key, label and cells of each column. What is left over goes to the name and to what is going on."""
        wide = width >= 100
        spark = _spark_width(width)
        fixed = [
            ("letter", "", 1),
            ("status", "STATUS", 11),
            ("nodes", "NODES", 9 if wide else 8),
            ("gen", "GEN", 4),
            ("step", "STEP", 15 if wide else 11),
            ("loss", "LOSS", 6),
            ("rate", "SAMPLES/S", 6 + spark),
            ("next", "RELEASE", 7),
        ]
        left = width - 2 - sum(size + 1 for _, _, size in fixed)
        name = min(22, left - 1) if not wide else min(22, left // 2)
        fixed.insert(1, ("name", "RUN", max(8, name)))
        if wide:
            fixed.append(("change", "CHANGE", max(4, left - name - 2)))
        return fixed

    def _row(self, run: RunView, width: int) -> list[Text]:
        view, wide = self._view, width >= 100
        sign, style = STATUSES[run.status]
        nodes = len({member.node for member in run.members if member.rank is not None})
        goal = f"/{run.total_steps}" if run.total_steps is not None else ""
        step = f"{run.step}{goal}"
        if run.total_steps and wide and len(step) < 12:
            step += f" {100 * run.step // run.total_steps}%"
        left = view.next_release(run, self._now)
        spark = _spark_width(width)
        bars = sparkline(view.rate_history(run.run), spark - 1)
        rate = Text(f"{count(run.samples_per_s):>6}")
        rate.append(" " + fit(bars, spark - 1), Style(color=run_colour(view, run.run)))
        row = [
            run_badge(view, run.run),
            Text(run.name or run.run),
            Text(f"{sign} {run.status}", style),
            Text(f"{nodes}/{run.min_nodes}-{run.max_nodes}"),
            Text(str(run.generation)),
            Text(step),
            Text(figure(run.loss)),
            rate,
            Text(duration(left), WARN if left is not None and left <= SOON_S else ""),
        ]
        if wide:
            row.append(Text(run.change or run.message, WARN if run.change else MUTED))
        return row


def live_first(runs: list[RunView]) -> list[RunView]:
    """Runs that go on, in the order in which they came, then those that have ended, the newest first."""
    return [run for run in runs if not run.status.ended] + [run for run in reversed(runs) if run.status.ended]


def _spark_width(width: int) -> int:
    return 20 if width >= 100 else 5
