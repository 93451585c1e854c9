"""Which member speaks for all: `run.is_main`, and the marks in a worker's output by which its agent shows it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from fallow.model import HIDDEN, OUTPUT_PIPES, SHOWN


class IsMain:
    """A truth value that is looked up whenever it is asked for. It compares, prints and is copied as a plain bool."""

    __slots__ = ("_ask",)

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask

    def __bool__(self) -> bool:
        return self._ask()

    def __eq__(self, other: object) -> bool:
        return self._ask() == (other._ask() if isinstance(other, IsMain) else other)

    def __repr__(self) -> str:
        return repr(self._ask())

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (self._ask(),)


class Voice:
    """Tells the agent, by marks in this worker's own output, which part of the output is the main member's.

    The marks are in the output itself, so that not one line is shown twice or by nobody: the agent, which is another
    process, could not tell what was printed before the change of the generation and what behind it.
    """

    def __init__(self) -> None:
        self._speaks: bool | None = None

    def speak(self, *, speaks: bool) -> None:
        """From here on this worker is the main member, or is it no more."""
        if speaks == self._speaks:
            return
        self._speaks = speaks
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for descriptor, pipe in zip((1, 2), os.environ.get(OUTPUT_PIPES, "").split(), strict=False):
            with contextlib.suppress(OSError):
                # Elsewhere, in a file of the script's, nobody reads the marks.
                if str(os.fstat(descriptor).st_ino) == pipe:
                    os.write(descriptor, SHOWN if speaks else HIDDEN)
