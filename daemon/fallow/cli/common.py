"""What all commands share: talking to the head, printing, and how errors are told."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar, overload

import click

from fallow.model import Exit, FallowError
from fallow.text import clean_block, harmless_json

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


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
