"""Live progress of the demo on standard error: who is in, step, loss, throughput, and each change with its reason."""

from __future__ import annotations

import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from fallow.model import EventRecord, NodeOwner, RunView, Snapshot
from fallow.text import clean

GLYPHS = {
    NodeOwner.IDLE: (".", "dim"),
    NodeOwner.OTHERS: ("x", "yellow"),
    NodeOwner.PLANNED: ("p", "magenta"),
    NodeOwner.DOWN: ("!", "red"),
    NodeOwner.OURS: ("#", "green"),
}
QUIET = frozenset(("job", "dismiss", "limit", "checkpoint", "slurm"))
"""Kinds of events that the story does not need."""

HEARTBEAT_S = 10.0
"""Where nothing can be redrawn, a line of progress is printed so often."""


class LiveView:
    """Prints what happens; below it a terminal shows how things stand."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._began = time.monotonic()
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
                self.say(item.text)
        elif self._console.is_terminal:
            self._live.update(_picture(item))
        elif item.runs and time.monotonic() - self._printed > HEARTBEAT_S:
            self._printed = time.monotonic()
            self.say(_progress(item.runs[0]))


def _picture(snapshot: Snapshot) -> Group:
    parts: list[Text | Padding] = []
    for run in snapshot.runs[:1]:
        parts.append(Text(_progress(run), style="bold"))
        # A bar by itself ends no line.
        parts.append(Padding(ProgressBar(total=run.total_steps or 100, completed=run.step, width=70), 0))
    nodes = ((node.node, *GLYPHS[node.owner]) for node in snapshot.nodes)
    parts.append(Text(" ").join(Text(f"{name}:{sign}", style=style) for name, sign, style in nodes))
    return Group(*parts, Text("# training   x others   . idle   p planned for others", style="dim"))


def _progress(run: RunView) -> str:
    loss = "-" if run.loss is None else f"{run.loss:.4f}"
    return (
        f"step {run.step}/{run.total_steps or '?'}  loss {loss}  {run.samples_per_s:.1f} samples/s  "
        f"{len(run.training)} members: {' '.join(sorted(m.node for m in run.training))}"
    )
