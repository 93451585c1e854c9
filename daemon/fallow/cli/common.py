"""What all commands share: talking to the head, printing, and how errors are told.

Tables have aligned columns; they are coloured on a terminal, and plain and unshortened in a pipe.
"""

import signal
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import click

from fallow.model import Exit, FallowError
from fallow.text import clean, clean_block, harmless_json

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


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

_MIN_WIDTH = 24
"""Narrower than this no cell is folded."""

_PIPE_WIDTH = 4000
"""Wider than any row: in a pipe nothing is cut or folded."""


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON value.")(command)


def restart_option(command: F) -> F:
    text = (
        "For a script as torchrun runs it, which knows nothing of Fallow: COMMAND is started again at every change of "
        "the membership, at a moment of the head's choosing, and goes on from what it has saved. Its processes meet in "
        "torch's TCPStore, which lets in whoever reaches the node's address."
    )
    return click.option("--restart", is_flag=True, help=text)(command)


class Finite(click.FloatRange):
    """A range of numbers; unlike click's it has no place for `nan`, nor for `inf` or 1e300 where it is open."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not abs(number) <= 1e12:  # JSON would make a null of what that leads to
            self.fail(f"{value} is no number to count with.", param, ctx)
        return float(number)


@overload
def ask(method: str, **params: Any) -> Any: ...
@overload
def ask(method: str, type_: type[T], **params: Any) -> T: ...
def ask(method: str, type_: Any = Any, **params: Any) -> Any:
    """One request to the head of the state folder in force. A wrong configuration is refused, as by the head."""
    from fallow.config import load_config
    from fallow.control.client import call
    from fallow.files import Paths

    if params.get("run") == "":
        raise FallowError("the name of the run is empty; `fallow status` lists the runs", Exit.USAGE)
    load_config()
    return call(Paths.default().head_file, method, type_, **params)


def play_in(folder: Path, play: Coroutine[Any, Any, T]) -> T:
    """Run what has its logs in a folder, which is named if it does not come to its end.

    SIGTERM ends it as Ctrl-C does, so that nothing that it started is left behind.
    """
    import asyncio

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await play

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        say(f"ended by SIGTERM; logs are kept in {folder}")
        raise click.exceptions.Exit(128 + signal.SIGTERM) from None
    except BaseException:
        say(f"logs are kept in {folder}")
        raise


def tell(value: T, as_json: bool, show: Callable[[T], object]) -> None:
    """Prints a result: with --json one JSON value, else what `show` makes of it for people."""
    if as_json:
        print_json(value)
    else:
        show(value)


def print_json(value: Any) -> None:
    sys.stdout.write(json_text(value) + "\n")


def json_text(value: Any, indent: int = 2) -> str:
    """A value as JSON, exact, in characters that standard output has and no terminal obeys; indent -1: on one line."""
    import msgspec

    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:
        # A file name that is no UTF-8: JSON has a way to write such a name, and only Python's own encoder takes it.
        import json

        return json.dumps(msgspec.to_builtins(value, str_keys=True), indent=indent if indent >= 0 else None)
    text = msgspec.json.format(encoded, indent=indent) if indent >= 0 else encoded
    return harmless_json(text.decode(), sys.stdout.encoding or "utf-8")


def say(text: str) -> None:
    """To standard error: diagnostics never mix with results."""
    sys.stderr.write(f"fallow: {clean_block(text)}\n")


def print_error(error: FallowError, as_json: bool) -> None:
    """One clear line on standard error; with --json one JSON value on standard output."""
    if as_json:
        print_json({"error": {"code": int(error.code), "message": error.message}})
    else:
        say(error.message)


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
    if terminal and widths[0] + sum(min(width, _MIN_WIDTH) + 2 for width in widths[1:]) > console.width:
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
    for first, *cells in rows:
        # The blank between a name and its cell is one at which no line is broken.
        named = "  ".join(f"{name}\xa0{cell}" for name, cell in zip(columns[1:], cells, strict=True) if cell)
        lines = textwrap.wrap(named, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        sys.stdout.write("\n".join([f"{columns[0]} {first}", *lines]).replace("\xa0", " ") + "\n")


def show_items(columns: Mapping[str, Callable[[T], str]], items: Iterable[T]) -> None:
    """Prints a row for each item; each column has what makes its cell."""
    show_table(list(columns), [[cell(item) for cell in columns.values()] for item in items])


def duration(seconds: float | None) -> str:
    """`1-02:03:04`, as Slurm writes it; `-` for unknown."""
    if seconds is None:
        return "-"
    whole_s = max(int(seconds), 0)
    days, second_of_day = divmod(whole_s, 86_400)
    clock = f"{second_of_day // 3600:02}:{second_of_day % 3600 // 60:02}:{second_of_day % 60:02}"
    return f"{days}-{clock}" if days else clock


def moment(at: float) -> str:
    """Local time of the day with its date, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
