"""One publisher, many subscribers, none of which can slow the publisher down or make it hold much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fallow.model import EventRecord, Snapshot

Item = Snapshot | EventRecord

BACKLOG = 256
"""Items that one subscriber may be behind before it is dropped."""


class Broadcast:
    """The head's side of `subscribe`: `publish` never waits; a subscriber that falls behind is dropped."""

    def __init__(self, backlog: int = BACKLOG) -> None:
        self._backlog = backlog
        self._queues: set[asyncio.Queue[Item | None]] = set()

    @property
    def subscribers(self) -> int:
        return len(self._queues)

    def publish(self, item: Item) -> None:
        for queue in list(self._queues):
            if queue.qsize() >= self._backlog:
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(item)

    def close(self) -> None:
        """Ends every subscription."""
        for queue in self._queues:
            queue.put_nowait(None)
        self._queues.clear()

    async def subscribe(self, first: Item | None = None) -> AsyncIterator[Item]:
        """`first`, then everything that is published from now on; ends when dropped or closed."""
        queue: asyncio.Queue[Item | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            if first is not None:
                yield first
            while (item := await queue.get()) is not None:
                yield item
        finally:
            self._queues.discard(queue)
