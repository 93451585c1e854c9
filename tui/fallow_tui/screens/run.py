"""One run: its figures, its members and what happened to it."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from fallow.model import MemberView, RunView
from fallow_tui.palette import LABEL, MUTED, PHASES, STATUSES, WARN, run_badge
from fallow_tui.screens.operator import OperatorScreen
from fallow_tui.text import count, duration
from fallow_tui.view import View
from fallow_tui.widgets.events import EventLog
from fallow_tui.widgets.header import HeaderBar

COLUMNS = ("RANK", "MEMBER", "NODE", "ALLOCATION", "PHASE", "STEP", "SHARDS", "GOES IN", "SEEN")


class MemberTable(DataTable[Text]):
    """Nodes of a run, those that compute first, by rank."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "Down", show=False, id="member.down"),
        Binding("k", "cursor_up", "Up", show=False, id="member.up"),
    ]

    def on_mount(self) -> None:
        self.cursor_type = "row"
        self.border_title = "1 Members"
        for label in COLUMNS:
            self.add_column(Text(label, MUTED), key=label)

    @property
    def selected(self) -> str | None:
        """The member under the cursor."""
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def show(self, members: list[MemberView], since: float) -> None:
        """Draws the members as they were `since` seconds ago; the cursor stays on its member."""
        members = sorted(members, key=lambda member: (member.rank is None, member.rank or 0, member.member))
        if [row.value for row in self.rows] != [member.member for member in members]:
            kept = self.selected
            self.clear()
            for member in members:
                self.add_row(*[Text("")] * len(COLUMNS), key=member.member)
            if kept in (row.value for row in self.rows):
                self.move_cursor(row=self.get_row_index(kept or ""))
        for member in members:
            left = None if member.ends_in_s is None else member.ends_in_s - since
            row = (
                Text("-" if member.rank is None else str(member.rank)),
                Text(member.member),
                Text(member.node),
                Text(str(member.allocation)),
                Text(str(member.phase), PHASES[member.phase]),
                Text(str(member.step)),
                Text(str(member.shards) if member.shards else "-"),
                Text(duration(left), WARN if left is not None and left < 60 else ""),
                Text(duration(member.last_seen_s + since), MUTED),
            )
            for label, value in zip(COLUMNS, row, strict=True):
                if self.get_cell(member.member, label) != value:
                    self.update_cell(member.member, label, value, update_width=True)


class RunScreen(OperatorScreen):
    """Details of one run."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back", id="run.back"),
        Binding("slash", "filter", "Filter", key_display="/", id="events.filter"),
        Binding("1", "panel(1)", "Members", show=False, id="panel.1"),
        Binding("2", "panel(2)", "Events", show=False, id="panel.2"),
    ]

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = run

    def compose(self) -> ComposeResult:
        yield HeaderBar()
        yield Static(id="figures")
        yield MemberTable(id="members")
        yield EventLog(id="events", run=self._run, title="2 Events of this run")
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.query_one(MemberTable).focus()
        self.call_after_refresh(self.top.draw)

    def show(self, view: View, now: float) -> None:
        self.query_one(HeaderBar).show(view, now, self.top.mode)
        self.query_one(EventLog).show(view)
        run = view.run(self._run)
        figures = self.query_one("#figures", Static)
        if run is None:
            figures.update(Text(f"The head no longer knows run {self._run}.", WARN))
            self.query_one(MemberTable).show([], 0.0)
        else:
            figures.update(self._figures(view, run, now))
            self.query_one(MemberTable).show(run.members, view.age(now) or 0.0)
        self.refresh_keys()

    def selected_run(self) -> RunView | None:
        return self.top.view.run(self._run)

    def selected_node(self) -> tuple[str, RunView] | None:
        run, selected = self.selected_run(), self.query_one(MemberTable).selected
        if run is None or selected is None:
            return None
        node = next((member.node for member in run.members if member.member == selected), None)
        return (node, run) if node is not None else None

    def action_back(self) -> None:
        """Clears the filter, else goes back to the overview."""
        if not self.query_one(EventLog).clear_filter():
            self.app.pop_screen()

    def action_filter(self) -> None:
        """Opens the filter of the event log."""
        self.query_one(EventLog).start_filter()

    def action_panel(self, number: int) -> None:
        """Goes to a panel."""
        if number == 1:
            self.query_one(MemberTable).focus()
        else:
            self.query_one(EventLog).focus_lines()

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
        members = [member for member in run.members if member.rank is not None]
        facts = {
            "nodes": f"{len(members)} of {run.min_nodes}-{run.max_nodes}, at most {run.limit} now",
            "workers": str(sum(member.workers for member in members)),
            "generation": str(run.generation),
            "step": f"{run.step}{f' of {run.total_steps}' if run.total_steps is not None else ''}",
            "epoch": str(run.epoch),
            "loss": _number(run.loss),
            "samples/s": count(run.samples_per_s),
            "next release in": duration(view.next_release(run, now)),
            **({"drained": ",".join(run.drained)} if run.drained else {}),
            **{name: _number(value) for name, value in run.scalars.items()},
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


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"
