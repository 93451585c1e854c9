"""`fallow top`: the application, and the source of its data, which also takes its requests."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from textual.app import App

from fallow.control.client import ControlClient
from fallow.files import Paths
from fallow.model import EventRecord, Exit, Snapshot
from fallow.text import clean
from fallow_tui.demo import DemoSource
from fallow_tui.screens.operator import HeaderBar, OperatorScreen
from fallow_tui.screens.pages import OverviewScreen
from fallow_tui.view import View

CALL_S = 15.0
RETRY_S = 2.0
REDRAW_S = 1.0
"""Seconds between drawings without new data: the ages on the screen grow."""


class Source(Protocol):
    """What the monitor needs of a head."""

    name: str

    def subscribe(self) -> AsyncIterator[Snapshot | EventRecord]:
        """Snapshots and events from now on. Ends or raises if the connection ends. May be called again."""

    async def call(self, method: str, **params: Any) -> Any:
        """Send a request to the head. Raises FallowError with the reason if the head refuses."""


class HeadSource:
    """The running head of this user, through its control socket."""

    def __init__(self, paths: Paths | None = None) -> None:
        self.name = ""
        self._head_file = (paths or Paths.default()).head_file

    async def subscribe(self) -> AsyncIterator[Snapshot | EventRecord]:
        async with await ControlClient.connect(self._head_file) as client:
            async for item in client.watch():
                yield item

    async def call(self, method: str, **params: Any) -> Any:
        # A connection of its own: that of `subscribe` is busy with its own answer.
        async with await ControlClient.connect(self._head_file) as client:
            return await client.call(method, timeout_s=CALL_S, **params)


class TopApp(App[None]):
    """Follows a source and draws its data. Clocks are arguments, so that tests need not wait."""

    TITLE = "fallow top"
    CSS_PATH = "app.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012 (Textual declares no ClassVar)

    def __init__(
        self,
        source: Source,
        *,
        read_only: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        retry_s: float = RETRY_S,
    ) -> None:
        super().__init__()
        self.source = source
        self.read_only = read_only
        self.view = View()
        self._monotonic = monotonic
        self._wall = wall
        self._retry_s = retry_s
        self._is_drawing = False

    @property
    def mode(self) -> str:
        """Words for the header, such as `demo` and `read only`."""
        return ", ".join(filter(None, (self.source.name, "read only" if self.read_only else "")))

    async def on_mount(self) -> None:
        await self.push_screen(OverviewScreen())
        self.draw()
        self.set_interval(REDRAW_S, self.draw)
        self.run_worker(self._follow(), exclusive=True)

    def draw(self) -> None:
        """Draw the view on all open screens."""
        self._is_drawing = False
        for screen in self.screen_stack:
            # A screen is mounted before its parts exist; it is drawn the next time.
            if isinstance(screen, OperatorScreen) and screen.is_mounted and screen.query(HeaderBar):
                screen.show(self.view, self._monotonic())

    def _draw_soon(self) -> None:
        # A burst of events is drawn once.
        if not self._is_drawing:
            self._is_drawing = True
            self.call_next(self.draw)

    async def _follow(self) -> None:
        """Keep a subscription while the monitor runs. The last data stays while the head cannot be reached."""
        while True:
            reason = "the head closed the connection"
            try:
                async for item in self.source.subscribe():
                    self.view.apply(item, self._monotonic())
                    self._draw_soon()
            except Exception as error:
                # Show any error in the header, never as a traceback over the screen.
                reason = clean(str(error)) or type(error).__name__
            self.view.apply_disconnect(reason, self._wall())
            self._draw_soon()
            await asyncio.sleep(self._retry_s)


def main(read_only: bool = False, demo: bool = False) -> int:
    """Run the monitor until the user quits. Returns the exit code."""
    app = TopApp(DemoSource() if demo else HeadSource(), read_only=read_only)
    app.run()
    return app.return_code or int(Exit.OK)
