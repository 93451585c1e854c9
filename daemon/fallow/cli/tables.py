"""Tables for people: aligned columns, coloured on a terminal, plain and unshortened in a pipe."""

from __future__ import annotations

import sys
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

_PIPE_WIDTH = 4000
"""Wider than any row: in a pipe nothing is cut or folded."""


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under upper-case column names. Cells are sanitized and never taken as markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else _PIPE_WIDTH, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        # On a narrow terminal names that other commands take stay whole, and the rest is folded, not cut.
        table.add_column(Text(clean(column)), no_wrap=not terminal or number == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell, 512), style=STYLES.get(cell, "")) for cell in row))
    with console.capture() as captured:
        console.print(table)
    # Rich pads the last column, too: trailing blanks are of no use to anybody.
    sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


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
