"""The table of runs, and a table whose cursor stays on its row when the table is drawn again."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

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
"""Seconds before a release from which on it is highlighted."""


class Column(NamedTuple):
    """A column; its label is its key."""

    label: str
    width: int | None = None
    "width in cells; None: that of the content"


class RowTable(DataTable[Text]):
    """Rows with keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "Down", show=False, id="row.down"),
        Binding("k", "cursor_up", "Up", show=False, id="row.up"),
    ]

    def __init__(self, title: str, *, id: str, cell_padding: int = 1) -> None:
        super().__init__(id=id, cursor_type="row", cell_padding=cell_padding)
        self.border_title = title
        self._columns_drawn: Sequence[Column] = ()

    @property
    def selected(self) -> str | None:
        """The key of the row under the cursor."""
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def fill(self, columns: Sequence[Column], rows: Mapping[str, Sequence[Text]]) -> None:
        """Draw the rows. `rows`: key -> cells."""
        if columns != self._columns_drawn or [row.value for row in self.rows] != list(rows):
            selected, self._columns_drawn = self.selected, columns
            self.clear(columns=True)
            for column in columns:
                width = None if column.width is None else column.width + 1
                self.add_column(Text(column.label, MUTED), key=column.label, width=width)
            for key in rows:
                self.add_row(*[Text("")] * len(columns), key=key)
            if selected is not None and selected in rows:
                self.move_cursor(row=self.get_row_index(selected))
        for key, cells in rows.items():
            for column, value in zip(columns, cells, strict=True):
                if column.width is not None:
                    value.truncate(column.width, overflow="ellipsis")
                if self.get_cell(key, column.label) != value:
                    self.update_cell(key, column.label, value, update_width=column.width is None)


class RunsTable(RowTable):
    """One row per run; `enter` opens it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Details", id="run.details")]

    def __init__(self, *, id: str) -> None:
        super().__init__("2 Runs", id=id, cell_padding=0)
        self._view = View()
        self._now = 0.0

    def show(self, view: View, now: float) -> None:
        """Draw the view."""
        self._view, self._now = view, now
        runs = live_first(view.snapshot.runs if view.snapshot is not None else [])
        width = self.app.size.width
        self.fill(self._columns(width), {run.run: self._row(run, width) for run in runs})

    def on_resize(self, _: events.Resize) -> None:
        self.show(self._view, self._now)

    @staticmethod
    def _columns(width: int) -> list[Column]:
        """Columns of the table. The remaining width goes to the name and to the current change."""
        is_wide = width >= 100
        fixed = [
            Column("", 1),
            Column("STATUS", 11),
            Column("NODES", 9 if is_wide else 8),
            Column("GEN", 4),
            Column("STEP", 15 if is_wide else 11),
            Column("LOSS", 6),
            Column("SAMPLES/S", 6 + _spark_width(width)),
            Column("RELEASE", 7),
        ]
        free_width = width - 2 - sum(size + 1 for _, size in fixed if size is not None)
        name = min(22, free_width - 1) if not is_wide else min(22, free_width // 2)
        fixed.insert(1, Column("RUN", max(8, name)))
        return [*fixed, Column("CHANGE", max(4, free_width - name - 2))] if is_wide else fixed

    def _row(self, run: RunView, width: int) -> list[Text]:
        view, is_wide = self._view, width >= 100
        sign, style = STATUSES[run.status]
        nodes = len({member.node for member in run.training})
        steps = [str(run.step)]
        if run.total_steps:
            share = f" {100 * run.step // run.total_steps}%"
            steps = [f"{run.step}/{run.total_steps}{share}", f"{run.step}/{run.total_steps}", f"{run.step}{share}"]
        remaining_s = view.next_release(run, self._now)
        spark = _spark_width(width)
        bars = sparkline(view.rate_history(run.run), spark - 1)
        rate = Text(f"{count(run.samples_per_s):>6}")
        rate.append(" " + fit(bars, spark - 1), Style(color=run_colour(view, run.run)))
        row = [
            run_badge(view, run.run),
            Text(run.name or run.run),
            Text(f"{sign} {run.status}", style),
            Text(first_fit(9 if is_wide else 8, f"{nodes}/{run.min_nodes}-{run.max_nodes}", str(nodes))),
            Text(first_fit(4, str(run.generation), f"{run.generation // 1000}k")),
            Text(first_fit(15 if is_wide else 11, *steps, count(run.step))),
            Text(figure(run.loss)),
            rate,
            Text(duration(remaining_s), WARN if remaining_s is not None and remaining_s <= SOON_S else ""),
        ]
        if is_wide:
            row.append(Text(run.change or run.message, WARN if run.change else MUTED))
        return row


def live_first(runs: list[RunView]) -> list[RunView]:
    """Active runs, oldest first, then ended runs, newest first."""
    return [run for run in runs if not run.status.ended] + [run for run in reversed(runs) if run.status.ended]


def first_fit(width: int, *texts: str) -> str:
    """The first text that fits into `width`. A number must not be cut, because it would read as another number."""
    return next((text for text in texts if len(text) <= width), texts[-1])


def _spark_width(width: int) -> int:
    return 20 if width >= 100 else 5
