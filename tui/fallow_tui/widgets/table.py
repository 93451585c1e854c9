"""A table whose rows are drawn again and again; the cursor stays on its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from fallow_tui.palette import MUTED


class Column(NamedTuple):
    """A column; its label is its key."""

    label: str
    width: int | None = None
    "cells; None: as wide as what is in it"


class RowTable(DataTable[Text]):
    """Rows with keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "Down", show=False, id="row.down"),
        Binding("k", "cursor_up", "Up", show=False, id="row.up"),
    ]

    def __init__(self, title: str, *, id: str, cell_padding: int = 1) -> None:
        super().__init__(id=id, cursor_type="row", cell_padding=cell_padding)
        self.border_title = title
        self._shown: Sequence[Column] = ()

    @property
    def selected(self) -> str | None:
        """The key of the row under the cursor."""
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def fill(self, columns: Sequence[Column], rows: Mapping[str, Sequence[Text]]) -> None:
        """Draw these rows, by their keys."""
        if columns != self._shown or [row.value for row in self.rows] != list(rows):
            kept, self._shown = self.selected, columns
            self.clear(columns=True)
            for column in columns:
                width = None if column.width is None else column.width + 1
                self.add_column(Text(column.label, MUTED), key=column.label, width=width)
            for key in rows:
                self.add_row(*[Text("")] * len(columns), key=key)
            if kept is not None and kept in rows:
                self.move_cursor(row=self.get_row_index(kept))
        for key, cells in rows.items():
            for column, value in zip(columns, cells, strict=True):
                if column.width is not None:
                    value.truncate(column.width, overflow="ellipsis")
                if self.get_cell(key, column.label) != value:
                    self.update_cell(key, column.label, value, update_width=column.width is None)
