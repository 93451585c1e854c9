"""Tables for people: aligned columns, coloured on a terminal, plain and unshortened in a pipe."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from fallow.text import clean

T = TypeVar("T")

STYLES = {
    "training": "green",
    "finished": "cyan",
    "waiting": "yellow",
    "suspended": "yellow",
    "failed": "red",
    "cancelled": "red",
    "lost": "red",
    "OK": "green",
    "WARN": "yellow",
    "FAIL": "red",
}

_FOLDED = 24
"""Narrower than this no cell is folded."""

_PIPE_WIDTH = 4000
"""Wider than any row: in a pipe nothing is cut or folded."""


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under upper-case column names. Cells are sanitized and never taken as markup.

    On a terminal long cells are folded. Where even that leaves no room for all columns, each row is a paragraph.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else _PIPE_WIDTH, highlight=False)
    rows = [[clean(cell, 512) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(columns, *rows, strict=True)]
    if terminal and widths[0] + sum(min(width, _FOLDED) + 2 for width in widths[1:]) > console.width:
        _show_paragraphs(columns, rows, console.width)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        # On a narrow terminal names that other commands take stay whole, and the rest is folded, not cut.
        table.add_column(Text(clean(column)), no_wrap=not terminal or number == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    with console.capture() as captured:
        console.print(table)
    # Rich pads the last column, too: trailing blanks are of no use to anybody.
    sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def _show_paragraphs(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    """The first cell of each row, and below it the others with their names."""
    for first, *others in rows:
        # The blank between a name and its cell is one at which no line is broken.
        named = "  ".join(f"{name}\xa0{cell}" for name, cell in zip(columns[1:], others, strict=True) if cell)
        lines = textwrap.wrap(named, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        sys.stdout.write("\n".join([f"{columns[0]} {first}", *lines]).replace("\xa0", " ") + "\n")


def show_items(columns: Mapping[str, Callable[[T], str]], items: Iterable[T]) -> None:
    """Prints a row for each item; each column has what makes its cell."""
    show_table(list(columns), [[cell(item) for cell in columns.values()] for item in items])


def duration(seconds: float | None) -> str:
    """`1-02:03:04`, as Slurm writes it; `-` for unknown."""
    if seconds is None:
        return "-"
    whole = max(int(seconds), 0)
    days, rest = divmod(whole, 86_400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def moment(at: float) -> str:
    """Local time of the day with its date, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
