"""One run: its figures, its members and what happened to it."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Static

from fallow.model import MemberView, RunView
from fallow_tui.palette import LABEL, MUTED, PHASES, STATUSES, WARN, run_badge
from fallow_tui.screens.operator import OperatorScreen
from fallow_tui.text import count, duration, figure
from fallow_tui.view import View
from fallow_tui.widgets.events import EventLog
from fallow_tui.widgets.header import HeaderBar
from fallow_tui.widgets.table import Column, RowTable

LABELS = ("RANK", "MEMBER", "NODE", "ALLOCATION", "PHASE", "STEP", "SHARDS", "GOES IN", "SEEN")
COLUMNS = [Column(label) for label in LABELS]


def member_row(member: MemberView, since: float) -> list[Text]:
    """Cells under `COLUMNS` of a member as it was `since` seconds ago."""
    left = None if member.ends_in_s is None else member.ends_in_s - since
    return [
        Text("-" if member.rank is None else str(member.rank)),
        Text(member.member),
        Text(member.node),
        Text(str(member.allocation)),
        Text(str(member.phase), PHASES[member.phase]),
        Text(str(member.step)),
        Text(str(member.shards) if member.shards else "-"),
        Text(duration(left), WARN if left is not None and left < 60 else ""),
        Text(duration(member.last_seen_s + since), MUTED),
    ]


class RunScreen(OperatorScreen):
    """Details of one run."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "back", "Back", id="run.back")]
    PANELS = ("#members", "#events")

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = run

    def compose(self) -> ComposeResult:
        yield HeaderBar()
        yield Static(id="figures")
        yield RowTable("1 Members", id="members")
        yield EventLog(id="events", run=self._run, title="2 Events of this run")
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.query_one(RowTable).focus()
        self.call_after_refresh(self.top.draw)

    def show(self, view: View, now: float) -> None:
        self.query_one(HeaderBar).show(view, now, self.top.mode)
        self.query_one(EventLog).show(view)
        run = view.run(self._run)
        members = sorted(run.members if run is not None else [], key=lambda m: (m.rank is None, m.rank or 0, m.member))
        since = view.age(now) or 0.0
        self.query_one(RowTable).fill(COLUMNS, {member.member: member_row(member, since) for member in members})
        unknown = Text(f"The head no longer knows run {self._run}.", WARN)
        self.query_one("#figures", Static).update(unknown if run is None else self._figures(view, run, now))
        self.refresh_keys()

    def selected_run(self) -> RunView | None:
        return self.top.view.run(self._run)

    def selected_node(self) -> tuple[str, RunView] | None:
        run, selected = self.selected_run(), self.query_one(RowTable).selected
        if run is None or selected is None:
            return None
        node = next((member.node for member in run.members if member.member == selected), None)
        return (node, run) if node is not None else None

    @staticmethod
    def _figures(view: View, run: RunView, now: float) -> Text:
        sign, style = STATUSES[run.status]
        text = Text(end="")
        text.append_text(run_badge(view, run.run))
        text.append(f" {run.name or run.run}", LABEL)
        text.append(f"  {run.run}  ", MUTED)
        text.append(f"{sign} {run.status}", style)
        if run.change:
            text.append(f"  {run.change}", WARN)
        if run.message:
            text.append(f"  {run.message}")
        facts = {
            "nodes": f"{len(run.training)} of {run.min_nodes}-{run.max_nodes}, at most {run.limit} now",
            "workers": str(sum(member.workers for member in run.training)),
            "generation": str(run.generation),
            "step": f"{run.step}{f' of {run.total_steps}' if run.total_steps is not None else ''}",
            "epoch": str(run.epoch),
            "loss": figure(run.loss),
            "samples/s": count(run.samples_per_s),
            "next release in": duration(view.next_release(run, now)),
            **({"drained": ",".join(run.drained)} if run.drained else {}),
            **{name: figure(value) for name, value in run.scalars.items()},
        }
        text.append("\n")
        for name, value in facts.items():
            text.append(f"{name} ", MUTED)
            text.append(f"{value}  ")
        text.append("\n")
        for allocation in run.allocations:
            text.append(f"{allocation.kind} ", MUTED)
            text.append(f"{allocation.job_id or 'no job yet'} {allocation.state} {','.join(allocation.nodes)}  ")
            if allocation.reason:
                text.append(f"({allocation.reason})  ", MUTED)
        return text
