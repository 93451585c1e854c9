"""The first screen: all nodes, all runs, who was where when, and what happened."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import DataTable, Footer

from fallow.model import RunView
from fallow_tui.screens.operator import OperatorScreen
from fallow_tui.screens.run import RunScreen
from fallow_tui.view import View
from fallow_tui.widgets.events import EventLog
from fallow_tui.widgets.header import HeaderBar
from fallow_tui.widgets.nodes import NodeMap
from fallow_tui.widgets.runs import RunsTable
from fallow_tui.widgets.timeline import ChangeList, Timeline


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

    def show(self, view: View, now: float) -> None:
        self.query_one(HeaderBar).show(view, now, self.top.mode)
        self.query_one(NodeMap).show(view, now)
        self.query_one(RunsTable).show(view, now)
        self.query_one(Timeline).show(view, now)
        self.query_one(ChangeList).show(view)
        self.query_one(EventLog).show(view)
        self.refresh_keys()

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
