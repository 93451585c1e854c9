"""What all commands share: calls to the head, options, tables, JSON and error messages.

Tables have aligned columns. They are coloured on a terminal, and plain and uncut in a pipe.
"""

import contextlib
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

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
"""Width of a column, in characters, below which its cells are not folded."""

_PIPE_WIDTH = 4000
"""Width of a table in a pipe, in characters: wider than any row, so that nothing is cut or folded."""


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON value.")(command)


def restart_option(command: F) -> F:
    text = (
        "For a torchrun script that does not use Fallow's API. COMMAND is started again at every change of the "
        "membership, at a time that the head chooses, and continues from its own checkpoint. Its processes connect "
        "through torch's TCPStore, which accepts anybody who can reach the node's address."
    )
    return click.option("--restart", is_flag=True, help=text)(command)


class Finite(click.FloatRange):
    """A range of finite numbers. Unlike click's range it rejects `nan`, `inf` and numbers beyond 1e12."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not abs(number) <= 1e12:  # JSON would write results such as infinity as null
            self.fail(f"{value} is not a number, or too large.", param, ctx)
        return float(number)


@overload
def ask(method: str, **params: Any) -> Any: ...
@overload
def ask(method: str, type_: type[T], **params: Any) -> T: ...
def ask(method: str, type_: Any = Any, **params: Any) -> Any:
    """Send one request to the head of this state folder and return its answer.

    Raises:
        FallowError: the configuration is wrong, the head cannot be reached, or it refuses the request.
    """
    from fallow.config import load_config
    from fallow.control.client import call
    from fallow.files import Paths

    if params.get("run") == "":
        raise FallowError("the name of the run is empty; `fallow status` lists the runs", Exit.USAGE)
    load_config()
    return call(Paths.default().head_file, method, type_, **params)


def play_in(folder: Path, play: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that writes its logs into `folder`. If it fails, tell the user where the logs are.

    SIGTERM cancels the coroutine as Ctrl-C does, so that it ends its child processes.
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


@contextlib.contextmanager
def new_file(path: Path, option: str, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Make the file that an option names, for writing. Whatever ends the writing early, such as Ctrl-C, removes it."""
    try:
        file = open(path, "xb", opener=partial(os.open, mode=mode))  # noqa: SIM115 (closed below)
    except OSError as error:
        text = f"{path}: cannot be made ({error.strerror}); name a new file in a folder of yours: {option} FILE"
        raise FallowError(text, Exit.CANTCREAT) from None
    try:
        with file:
            yield file
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise FallowError(f"{path}: cannot be written ({error.strerror})", Exit.IOERR) from error
        raise


def tell(value: T, as_json: bool, show: Callable[[T], object]) -> None:
    """Print a result: as one JSON value with --json, else with `show`."""
    if as_json:
        print_json(value)
    else:
        show(value)


def print_json(value: Any) -> None:
    sys.stdout.write(json_text(value) + "\n")


def json_text(value: Any, indent: int = 2) -> str:
    """Encode a value as JSON. Escapes control characters, and characters that standard output cannot encode.

    Args:
        value: anything that msgspec encodes.
        indent: spaces per level; -1: all on one line.
    """
    import msgspec

    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:
        # A file name that is not UTF-8. JSON can hold it, but only Python's own encoder writes it.
        import json

        return json.dumps(msgspec.to_builtins(value, str_keys=True), indent=indent if indent >= 0 else None)
    text = msgspec.json.format(encoded, indent=indent) if indent >= 0 else encoded
    return harmless_json(text.decode(), sys.stdout.encoding or "utf-8")


def say(text: str) -> None:
    """Print a diagnostic on standard error, so that it does not mix with results."""
    sys.stderr.write(f"fallow: {clean_block(text)}\n")


def print_error(error: FallowError, as_json: bool) -> None:
    """Print an error: one line on standard error, or with --json one JSON value on standard output."""
    if as_json:
        print_json({"error": {"code": int(error.code), "message": error.message}})
    else:
        say(error.message)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under upper-case column names. Control characters are escaped, and markup is not interpreted.

    On a terminal long cells are folded. If the columns still do not fit, each row becomes a paragraph.
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
        # The first column has names that other commands take: these stay on one line. Other cells are folded.
        table.add_column(Text(clean(column)), no_wrap=not terminal or number == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    with console.capture() as capture:
        console.print(table)
    # Rich pads the last column, too; remove these blanks.
    sys.stdout.write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))


def _show_paragraphs(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    """Print the first cell of each row, and below it the other cells with their column names."""
    for first, *cells in rows:
        # A no-break space between a name and its cell keeps both on one line.
        text = "  ".join(f"{name}\xa0{cell}" for name, cell in zip(columns[1:], cells, strict=True) if cell)
        lines = textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        sys.stdout.write("\n".join([f"{columns[0]} {first}", *lines]).replace("\xa0", " ") + "\n")


def show_items(columns: Mapping[str, Callable[[T], str]], items: Iterable[T]) -> None:
    """Print a row for each item. `columns` maps a column's name to the function that makes its cell."""
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
    """Local date and time, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
