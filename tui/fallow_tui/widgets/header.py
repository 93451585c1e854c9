"""The line at the top: which cluster, whose head, and how old the data is."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text
from textual.widgets import Static

from fallow_tui.palette import BAD, FRESHNESS, GOOD, LABEL, MUTED, WARN
from fallow_tui.text import clock, duration
from fallow_tui.view import View

LATE_POLLS = 3
"""Poll intervals after which Slurm's part of the picture counts as old."""


class HeaderBar(Static):
    """Cluster, state of the head, age of the data, age of Slurm's answer."""

    def show(self, view: View, now: float, mode: str) -> None:
        """Draws; `mode` is a word such as `read only`, or empty."""
        wide = self.app.size.width >= 100
        text = Text(" fallow ", Style(reverse=True, bold=True), no_wrap=True, overflow="ellipsis", end="")
        if mode:
            text.append(f" {mode} ", Style(color="#000000", bgcolor="#d7af00"))
        head = view.snapshot.head if view.snapshot is not None else None
        if head is not None:
            text.append(f"  {head.cluster or 'no Slurm'}", LABEL)
            if wide:
                text.append(f" Slurm {head.slurm_version}" if head.slurm_version else "", MUTED)
        if view.away_since is not None:
            text.append("  ✗ no head" if head is None else f"  ✗ head away since {clock(view.away_since)}", BAD)
        elif head is None:
            text.append("  … asking the head", WARN)
        else:
            text.append("  ● head", GOOD)
            if wide:
                text.append(f" {head.host}:{head.pid} term {head.term}", MUTED)
            text.append(f" up {duration(head.uptime_s)}", MUTED)
        age = view.age(now)
        if age is not None:
            fresh = view.freshness(now)
            text.append(f"  data {duration(age)} old", FRESHNESS[fresh])
            if fresh is not fresh.FRESH:
                text.append(f" {fresh.upper()}", FRESHNESS[fresh])
        if head is not None and head.slurm_error:
            text.append(f"  ✗ Slurm: {head.slurm_error}", BAD)
        elif head is not None and (poll := view.poll_age(now)) is not None:
            late = poll > LATE_POLLS * head.poll_interval_s
            text.append(f"  poll {duration(poll)}/{duration(head.poll_interval_s)}", WARN if late else MUTED)
        if view.away_since is not None and view.away_reason:
            text.append(f"  {view.away_reason}", MUTED)
        self.update(text)
