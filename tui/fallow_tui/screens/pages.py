"""The two screens: all nodes and runs with a timeline, and one run with its members. Both show the events."""

from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import DataTable, Footer, Static

from fallow.model import MemberView, RunView
from fallow_tui.palette import LABEL, MUTED, PHASES, STATUSES, WARN, run_badge
from fallow_tui.screens.operator import HeaderBar, OperatorScreen
from fallow_tui.text import count, duration, figure
from fallow_tui.view import View
from fallow_tui.widgets.events import EventLog
from fallow_tui.widgets.nodes import NodeMap
from fallow_tui.widgets.runs import Column, RowTable, RunsTable
from fallow_tui.widgets.timeline import ChangeList, Timeline

LABELS = ("RANK", "MEMBER", "NODE", "ALLOCATION", "PHASE", "STEP", "SHARDS", "ENDS IN", "SEEN")
COLUMNS = [Column(label) for label in LABELS]


class OverviewScreen(OperatorScreen):
    """Everything at a glance."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "back", "Clear filter", show=False, id="events.clear")]
    PANELS = ("#nodes", "#runs", "#timeline", "#events")

    def compose(self) -> ComposeResult:
        yield HeaderBar()
        yield NodeMap(id="nodes")
        yield RunsTable(id="runs")
        with Horizontal(id="membership"):
            yield Timeline(id="timeline")
            yield ChangeList()
        yield EventLog(id="events", title="4 Events")
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.query_one(RunsTable).focus()

    def draw(self, view: View, now: float) -> None:
        self.query_one(NodeMap).show(view, now)
        self.query_one(RunsTable).show(view, now)
        self.query_one(Timeline).show(view, now)
        self.query_one(ChangeList).show(view)

    def selected_run(self) -> RunView | None:
        run = self.query_one(RunsTable).selected
        return self.top.view.run(run) if run is not None else None

    def selected_node(self) -> tuple[str, RunView] | None:
        nodes = self.query_one(NodeMap)
        if not nodes.has_focus or nodes.selected is None:
            return None
        node = self.top.view.node(nodes.selected)
        run = self.top.view.run(node.run) if node is not None and node.run is not None else None
        return (nodes.selected, run) if run is not None else None

    def on_descendant_focus(self) -> None:
        self.refresh_keys()

    @on(DataTable.RowSelected)
    def _open(self, event: DataTable.RowSelected) -> None:
        if event.row_key.value is not None:
            self.app.push_screen(RunScreen(event.row_key.value))


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

    def draw(self, view: View, now: float) -> None:
        run = view.run(self._run)
        members = sorted(run.members if run is not None else [], key=lambda m: (m.rank is None, m.rank or 0, m.member))
        age_s = view.age(now) or 0.0
        self.query_one(RowTable).fill(COLUMNS, {member.member: member_row(member, age_s) for member in members})
        unknown = Text(f"The head no longer knows run {self._run}.", WARN)
        self.query_one("#figures", Static).update(unknown if run is None else self._figures(view, run, now))

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


def member_row(member: MemberView, age_s: float) -> list[Text]:
    """Cells of a member for `COLUMNS`. `age_s` is the age of its data in seconds."""
    remaining_s = None if member.ends_in_s is None else member.ends_in_s - age_s
    return [
        Text(member.ranks),
        Text(member.member),
        Text(member.node),
        Text(str(member.allocation)),
        Text(str(member.phase), PHASES[member.phase]),
        Text(str(member.step)),
        Text(str(member.shards) if member.shards else "-"),
        Text(duration(remaining_s), WARN if remaining_s is not None and remaining_s < 60 else ""),
        Text(duration(member.last_seen_s + age_s), MUTED),
    ]
