"""When the head is told how the workers stand: with each heartbeat, and at once when that cannot wait for the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from fallow.agent.merge import needs_no_beat
from fallow.core.protocol import Beat, Progress

COALESCE_S = 0.01
"Between two reports at least, however much happens."


class Reporter:
    """Makes and sends heartbeats. To be made in the agent's loop.

    Args:
        beat: makes one of how things stand now.
        send: sends it.
    """

    def __init__(self, beat: Callable[[], Beat], send: Callable[[Beat], None]) -> None:
        self._make, self._send = beat, send
        self._loop = asyncio.get_running_loop()
        self._told = Beat()
        "what was told last, without what needs no beat"
        self._told_at = 0.0
        self._pids: tuple[int, ...] = ()
        "those of workers that were told last"
        self._telling: asyncio.TimerHandle | None = None

    def tell(self, beat: Beat | None = None) -> None:
        """Send a heartbeat now; None: of how things stand."""
        beat = beat or self._make()
        self._told, self._told_at = needs_no_beat(beat), self._loop.time()
        if not beat.brief:
            self._pids = beat.progress.pids
        self._send(beat)

    def note_change(self) -> None:
        """Something has changed: tell it at once, unless it can wait for the next heartbeat."""
        if self._telling is None:
            self._telling = self._loop.call_at(self._told_at + COALESCE_S, self._tell_change)

    def _tell_change(self) -> None:
        self._telling = None
        beat = self._make()
        if needs_no_beat(beat) == self._told:
            return
        if beat.progress.pids == self._pids:
            # All members report each change at the same moment. How the training gets on can wait.
            beat = msgspec.structs.replace(beat, progress=Progress(), brief=True)
        self.tell(beat)
