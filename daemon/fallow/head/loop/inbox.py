"""The queue of the head's loop: items from peers, the control socket, Slurm and the clock, in order of arrival."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fallow.core.protocol import Beat, FromAgent
from fallow.head.loop.turn import Turn


@dataclass(frozen=True, slots=True)
class AgentMessage:
    peer: str
    message: FromAgent
    at: float
    "time of receipt, on the head's clock"

    @property
    def source(self) -> str:
        return f"message {type(self.message).__name__}"


@dataclass(frozen=True, slots=True)
class Work:
    """Something to do in a turn: a request of the control socket, or an answer of Slurm to take in."""

    source: str
    "name of this kind of work in error reports"
    act: Callable[[Turn], Any]
    run: str | None = None
    "the run that this work concerns; None: no single run"
    answer: asyncio.Future[Any] | None = None
    "gets the result once the turn is durable, or a FallowError if the turn was discarded"


class FilesFirst(NamedTuple):
    """Result of a request's turn: `call` uses files (`FileCalls`), then the request goes on in another turn."""

    place: str
    call: Callable[[], Any]
    then: Callable[[Any, Turn], Any]
    "gets the result of `call`"
    patience_s: float
    undo: Callable[[], None] | None = None
    "called if `call`, or the one that `then` asks for, fails or is late"


@dataclass(frozen=True, slots=True)
class Tick:
    source: str = "tick"


Item = AgentMessage | Work | Tick


def resolve(future: asyncio.Future[Any], outcome: object) -> None:
    """Give a result or an error to a caller, unless the caller no longer waits."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


MAX_BATCH = 64
"""Largest number of messages in one turn. The first is answered only after the last is handled."""


class Inbox:
    """Items in order of arrival, for one loop.

    A beat reports a state. So a new beat replaces a waiting beat of the same peer, if that was the peer's last message.
    A head that falls behind then skips outdated states and keeps its queue short.
    """

    def __init__(self) -> None:
        self._cells: deque[list[Item]] = deque()
        self._beats: dict[str, list[Item]] = {}
        "peer -> cell of its last message, if that is a beat"
        self._arrived = asyncio.Event()
        self._is_tick_last = False
        "True if the waiting tick was already moved to the end of the queue once"

    def put_nowait(self, item: Item) -> None:
        """Add an item. The queue needs no bound: except for beats, peers only send answers."""
        cell = [item]
        match item:
            case AgentMessage(peer, Beat()):
                if peer in self._beats:
                    self._beats[peer][0] = item
                    return
                self._beats[peer] = cell
            case AgentMessage(peer, _):
                self._beats.pop(peer, None)
        self._cells.append(cell)
        self._arrived.set()

    def ask(self, source: str, act: Callable[[Turn], Any], run: str | None = None) -> asyncio.Future[Any]:
        """Have `act` done in a turn. Arguments and result are those of `Work`."""
        answer = asyncio.get_running_loop().create_future()
        self.put_nowait(Work(source, act, run, answer))
        return answer

    async def get(self) -> Item:
        """Wait for the next item."""
        while not self._cells:
            self._arrived.clear()
            await self._arrived.wait()
        return self.get_nowait()

    def get_nowait(self) -> Item:
        """The next item; there must be one."""
        cell = self._cells.popleft()
        item = cell[0]
        if isinstance(item, AgentMessage) and self._beats.get(item.peer) is cell:
            del self._beats[item.peer]
        return item

    def empty(self) -> bool:
        return not self._cells

    async def take(self, drain: Callable[[], Awaitable[None]] | None = None) -> list[Item]:
        """Take one item, or several waiting messages of agents as one turn.

        One turn means one write to the store. All members of a large run vote at the same moment, and a thousand agents
        may come at the same moment. A tick judges which agents are silent, so it must follow the messages that already
        wait. When its turn comes, the tick moves to the end of the queue, once.

        Args:
            drain: puts messages that wait in the socket into this inbox; called when a tick's turn comes.
        """
        items = [await self.get()]
        if isinstance(items[0], Tick):
            if drain is not None and not self._is_tick_last:
                await drain()
            items = [self._requeue_tick(items[0])]
        if isinstance(items[0], AgentMessage):
            while len(items) < MAX_BATCH and self._cells and isinstance(self._cells[0][0], AgentMessage):
                items.append(self.get_nowait())
        return items

    def _requeue_tick(self, tick: Tick) -> Item:
        if self._is_tick_last or not self._cells:
            self._is_tick_last = False
            return tick
        self._is_tick_last = True
        self._cells.append([tick])
        return self.get_nowait()
