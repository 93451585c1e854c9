"""The event log, with a filter."""

from typing import ClassVar, Self

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Resize
from textual.widgets import Input, RichLog

from fallow.model import EventRecord
from fallow_tui.palette import EVENTS, MUTED, run_badge
from fallow_tui.text import clock, fit
from fallow_tui.view import KEEP_EVENTS, View


class _Lines(RichLog):
    """Lines of the log. Follows new lines only while it is scrolled to its end."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "Down", show=False, id="events.down"),
        Binding("k", "scroll_up", "Up", show=False, id="events.up"),
    ]

    def __init__(self) -> None:
        super().__init__(wrap=False, markup=False, max_lines=KEEP_EVENTS)
        self._is_following = True

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._is_following = new_value >= self.max_scroll_y

    def on_resize(self, _: Resize) -> None:
        if self._is_following:
            self.scroll_end(animate=False, x_axis=False)

    def add(self, line: Text) -> None:
        self.write(line, scroll_end=self._is_following)

    def clear(self) -> Self:
        self._is_following = True
        return super().clear()


class EventLog(Vertical):
    """Events, newest last. `/` filters by any words in the time, the run, the kind or the text."""

    def __init__(self, *, id: str | None = None, run: str | None = None, title: str = "Events") -> None:
        super().__init__(id=id)
        self.border_title = title
        self._run = run
        self._view = View()
        self._last_seq = -1
        "sequence number of the last event that was added"

    def compose(self) -> ComposeResult:
        yield _Lines()
        yield Input(placeholder="words to look for; enter keeps them, escape clears", compact=True)

    def on_mount(self) -> None:
        self.query_one(Input).display = False

    def show(self, view: View) -> None:
        """Add the new events of the view."""
        self._view = view
        if view.events and view.events[-1].seq < self._last_seq:
            # The numbers went back, so the shown events are those of another state folder.
            self._rewrite()
        for event in view.events:
            if event.seq > self._last_seq:
                self._last_seq = event.seq
                self._write(event)

    def focus_lines(self) -> None:
        self.query_one(_Lines).focus()

    def start_filter(self) -> None:
        """Open the filter."""
        box = self.query_one(Input)
        box.display = True
        box.focus()

    def clear_filter(self) -> bool:
        """Close the filter. Returns False if no filter was open."""
        box = self.query_one(Input)
        if not box.display:
            return False
        box.value = ""
        box.display = False
        self.focus_lines()
        return True

    @on(Input.Changed)
    def _filter_changed(self) -> None:
        self._rewrite()

    @on(Input.Submitted)
    def _filter_kept(self) -> None:
        self.query_one(Input).display = bool(self.query_one(Input).value)
        self.focus_lines()

    def _rewrite(self) -> None:
        self.query_one(_Lines).clear()
        self._last_seq = -1
        self.show(self._view)

    def _write(self, event: EventRecord) -> None:
        if self._run is not None and event.run != self._run:
            return
        line = Text(clock(event.at) + " ", MUTED, end="")
        if event.run is None:
            line.append("  ")
        else:
            line.append_text(run_badge(self._view, event.run)).append(" ")
        line.append(fit(event.kind, 10) + " ", EVENTS.get(event.kind, ""))
        line.append(event.text)
        if event.run is not None and self._run is None:
            line.append(f"  {event.run}", MUTED)
        words = self.query_one(Input).value.casefold().split()
        if all(word in line.plain.casefold() for word in words):
            self.query_one(_Lines).add(line)
