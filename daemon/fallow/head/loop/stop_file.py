"""The administrators' switch: while a file of theirs exists (`[site] stop_file`), nothing is harvested."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from fallow.head.loop.inbox import Inbox, Work
from fallow.head.loop.turn import Turn

LOOK_S = 5.0
"""From one look to the next."""


class StopFile:
    """Looks for the file.

    Args:
        path: of the file; None: there is no switch.
        inbox: of the head's loop.
        switch: is told in a turn why nothing may be harvested; empty: it may be again.
    """

    def __init__(self, path: str | None, inbox: Inbox, switch: Callable[[Turn, str], None]) -> None:
        self._path = path
        self._inbox = inbox
        self._switch = switch
        self._on = False

    async def look(self) -> None:
        """Tell the loop of a change since the last look."""
        if self._path is not None:
            before, self._on = self._on, await asyncio.to_thread(exists, self._path, self._on)
            why = f"the site's administrators have stopped it: {self._path} exists" if self._on else ""
            if self._on != before:
                self._inbox.put_nowait(Work("stop file", lambda turn: self._switch(turn, why)))

    async def watch(self) -> None:
        """Look again and again, until it is cancelled."""
        while self._path is not None:
            await asyncio.sleep(LOOK_S)
            await self.look()


def exists(path: str, before: bool) -> bool:
    """Is the file there? While nobody can tell, what was so `before` holds."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return before
    return True
