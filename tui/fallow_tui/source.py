"""Where the monitor gets its data and sends its requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from fallow.control.client import ControlClient
from fallow.files import Paths
from fallow.model import EventRecord, Snapshot

CALL_S = 15.0

Item = Snapshot | EventRecord


class Source(Protocol):
    """A head, as far as the monitor is concerned."""

    name: str

    def subscribe(self) -> AsyncIterator[Item]:
        """Snapshots and events from now on. Ends or raises when the head goes away; may be called again."""

    async def call(self, method: str, **params: Any) -> Any:
        """Asks the head to do something; raises FallowError with what it answers otherwise."""


class HeadSource:
    """The running head of this user, through its control socket."""

    def __init__(self, paths: Paths | None = None) -> None:
        self.name = ""
        self._head_file = (paths or Paths.default()).head_file

    async def subscribe(self) -> AsyncIterator[Item]:
        async with await ControlClient.connect(self._head_file) as client:
            async for item in client.watch():
                yield item

    async def call(self, method: str, **params: Any) -> Any:
        # A connection of its own: the other one waits for an answer of its own.
        async with await ControlClient.connect(self._head_file) as client:
            return await client.call(method, timeout_s=CALL_S, **params)
