"""What comes to the head's loop, from peers, the control socket, Slurm and the clock, in the order in which it came."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fallow.core.protocol import Beat, FromAgent
from fallow.head.loop.turn import Turn


@dataclass(frozen=True, slots=True)
class Heard:
    peer: str
    message: FromAgent
    at: float
    "when it was received, on the head's clock"

    @property
    def source(self) -> str:
        return f"message {type(self.message).__name__}"


@dataclass(frozen=True, slots=True)
class Work:
    """Something to do in a turn: a request of the control socket, or what an answer of Slurm leads to."""

    source: str
    "what it is, in words that tell kinds of errors apart"
    act: Callable[[Turn], Any]
    run: str | None = None
    "the one run that it concerns, if it is one"
    answer: asyncio.Future[Any] | None = None
    "what comes of it, told once that is durable; a FallowError: it came to nothing"


@dataclass(frozen=True, slots=True)
class Tick:
    source: str = "tick"


Item = Heard | Work | Tick


def tell(future: asyncio.Future[Any], outcome: object) -> None:
    """Answer whoever asked, unless nobody waits any more: with a result, or with the error that came of it."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


TOGETHER = 64
"""So many messages are taken at once, at most: the first is answered when the last is understood."""


class Inbox:
    """Items in the order in which they came, for one loop to take.

    A beat takes the place of the beat of the same peer that still waits, if that was the last to come from it: a beat
    tells how things stand, and a head that falls behind should neither hear first how they stood nor keep it all.
    """

    def __init__(self) -> None:
        self._cells: deque[list[Item]] = deque()
        self._beats: dict[str, list[Item]] = {}
        "by peer: the cell of the last that came from it, where that is a beat"
        self._arrived = asyncio.Event()
        self._is_tick_last = False
        "the tick that waits has been put behind all that was there when its turn came"

    def put_nowait(self, item: Item) -> None:
        """Never waits: besides beats, what peers send is limited by what they are told."""
        cell = [item]
        match item:
            case Heard(peer, Beat()):
                if peer in self._beats:
                    self._beats[peer][0] = item
                    return
                self._beats[peer] = cell
            case Heard(peer, _):
                self._beats.pop(peer, None)
        self._cells.append(cell)
        self._arrived.set()

    def ask(self, source: str, act: Callable[[Turn], Any], run: str | None = None) -> asyncio.Future[Any]:
        """Have something done in a turn. Arguments and result: as in `Work`."""
        answer = asyncio.get_running_loop().create_future()
        self.put_nowait(Work(source, act, run, answer))
        return answer

    async def get(self) -> Item:
        """The next item, when there is one."""
        while not self._cells:
            self._arrived.clear()
            await self._arrived.wait()
        return self.get_nowait()

    def get_nowait(self) -> Item:
        """The next item; there must be one."""
        cell = self._cells.popleft()
        item = cell[0]
        if isinstance(item, Heard) and self._beats.get(item.peer) is cell:
            del self._beats[item.peer]
        return item

    def empty(self) -> bool:
        """True if nothing waits."""
        return not self._cells

    async def take(self, drain: Callable[[], Awaitable[None]] | None = None) -> list[Item]:
        """One item, or several messages of agents: those that wait together are one turn.

        So what follows from them is written down once: all members of a large run vote at the same moment, and a
        thousand agents may come at the same moment. A tick judges who is silent, so it comes after all that waits when
        its turn comes, and after nothing that comes later: it is put off once.

        Args:
            drain: puts in what was received and not yet put in; called when a tick's turn comes.
        """
        items = [await self.get()]
        if isinstance(items[0], Tick):
            if drain is not None and not self._is_tick_last:
                await drain()
            items = [self._after_what_waits(items[0])]
        if isinstance(items[0], Heard):
            while len(items) < TOGETHER and self._cells and isinstance(self._cells[0][0], Heard):
                items.append(self.get_nowait())
        return items

    def _after_what_waits(self, tick: Tick) -> Item:
        if self._is_tick_last or not self._cells:
            self._is_tick_last = False
            return tick
        self._is_tick_last = True
        self._cells.append([tick])
        return self.get_nowait()
