"""Where the monitor gets its data and sends its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from fallow.control.client import ControlClient
from fallow.files import Paths
from fallow.model import EventRecord, Exit, FallowError, Snapshot

CALL_S = 15.0
SILENCE_S = 60.0
"""A head that sends nothing for this long is taken for gone; it sends a snapshot every few seconds."""

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
            items = client.subscribe()
            while True:
                try:
                    async with asyncio.timeout(SILENCE_S):
                        item = await anext(items)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise FallowError(f"the head sent nothing for {SILENCE_S:g} s", Exit.TEMPFAIL) from None
                yield item

    async def call(self, method: str, **params: Any) -> Any:
        # A connection of its own: the subscribed one takes no requests.
        async with await ControlClient.connect(self._head_file) as client:
            return await client.call(method, timeout_s=CALL_S, **params)
