"""Live progress of the demo on standard error: who is in, step, loss, throughput, and each change with its reason."""

from __future__ import annotations

import sys
import time
from collections import deque

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.text import Text

from fallow.model import EventRecord, NodeOwner, RunView, Snapshot
from fallow.text import clean

SHOWN_EVENTS = 12
GLYPHS = {
    NodeOwner.IDLE: (".", "dim"),
    NodeOwner.OTHERS: ("x", "yellow"),
    NodeOwner.PLANNED: ("p", "magenta"),
    NodeOwner.DOWN: ("!", "red"),
    NodeOwner.OURS: ("#", "green"),
}
QUIET = frozenset(("job", "dismiss", "limit", "checkpoint", "slurm"))
"""Kinds of events that the story does not need."""


class LiveView:
    """Draws on a terminal; prints lines elsewhere."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._began = time.monotonic()
        self._events: deque[str] = deque(maxlen=SHOWN_EVENTS)
        self._run: RunView | None = None
        self._nodes = Text("")
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._printed = 0.0

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(
            f"{time.monotonic() - self._began:6.1f} s  {clean(text)}", markup=False, highlight=False, soft_wrap=True
        )

    def show(self, item: Snapshot | EventRecord) -> None:
        if isinstance(item, EventRecord):
            if item.kind not in QUIET:
                self._events.append(f"{time.monotonic() - self._began:6.1f} s  {clean(item.text)}")
                if not self._console.is_terminal:
                    self._console.print(self._events[-1], markup=False, highlight=False, soft_wrap=True)
        else:
            self._run = item.runs[0] if item.runs else None
            self._nodes = Text(" ").join(
                Text(f"{node.node}:{GLYPHS[node.owner][0]}", style=GLYPHS[node.owner][1]) for node in item.nodes
            )
            self._heartbeat()
        if self._console.is_terminal:
            self._live.update(self._draw())

    def _heartbeat(self) -> None:
        """Where nothing can be redrawn: one line of progress every ten seconds."""
        if not self._console.is_terminal and time.monotonic() - self._printed > 10 and self._run is not None:
            self._printed = time.monotonic()
            self.say(_progress(self._run))

    def _draw(self) -> Group:
        parts: list[Text | ProgressBar | Panel] = []
        if self._run is not None:
            parts.append(Text(_progress(self._run), style="bold"))
            parts.append(ProgressBar(total=self._run.total_steps or 100, completed=self._run.step, width=70))
        parts.append(self._nodes)
        parts.append(Text("# training   x others   . idle   p planned for others", style="dim"))
        parts.append(Panel(Text("\n".join(self._events)), title="what happened and why", title_align="left"))
        return Group(*parts)


def _progress(run: RunView) -> str:
    members = [m for m in run.members if m.rank is not None]
    loss = "-" if run.loss is None else f"{run.loss:.4f}"
    return (
        f"step {run.step}/{run.total_steps or '?'}  loss {loss}  {run.samples_per_s:.1f} samples/s  "
        f"{len(members)} members: {' '.join(sorted(m.node for m in members))}"
    )
