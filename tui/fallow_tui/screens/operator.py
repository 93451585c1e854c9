"""Common parts of both screens: the header, the event log, and the operator's requests."""

from typing import TYPE_CHECKING, ClassVar

from rich.style import Style
from rich.text import Text
from textual import work
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Static

from fallow.model import FallowError, RunView
from fallow.text import clean
from fallow_tui.palette import BAD, FRESHNESS, GOOD, LABEL, MUTED, WARN
from fallow_tui.screens.dialogs import Confirm, Help
from fallow_tui.text import clock, duration
from fallow_tui.view import View
from fallow_tui.widgets.events import EventLog

if TYPE_CHECKING:
    from fallow_tui.app import TopApp


ACTIONS = {
    "grow": ("g", "The run may have this many more nodes, as nodes become idle."),
    "shrink": (
        "s",
        "The youngest members leave at the next step boundary, and their nodes are given back. No work is lost.",
    ),
    "drain": (
        "d",
        "The node leaves at the next step boundary; no work is lost. The run does not use it until it is resumed.",
    ),
    "pause": (
        "p",
        "Harvested nodes are given back, and no nodes are requested until the run is resumed. Its base job goes on.",
    ),
    "resume": ("r", "Idle nodes are requested again, drained nodes, too."),
    "cancel": ("c", "The training ends, and all its nodes are given back. This cannot be undone."),
}
"""Request to the head -> its key, and its consequence. `drain` is for a node, the other requests are for a run."""

COUNTED = frozenset({"grow", "shrink"})
"""Requests that take a number of nodes."""

LATE_POLLS = 3
"""Poll intervals after which the data of Slurm counts as old."""


class HeaderBar(Static):
    """Cluster, state of the head, age of the data, age of Slurm's answer."""

    def show(self, view: View, now: float, mode: str) -> None:
        """Draw the header. `mode` is a text such as `read only`, or empty."""
        is_wide = self.app.size.width >= 100
        text = Text(" fallow ", Style(reverse=True, bold=True), no_wrap=True, overflow="ellipsis", end="")
        if mode:
            text.append(f" {mode} ", Style(color="#000000", bgcolor="#d7af00"))
        head = view.snapshot.head if view.snapshot is not None else None
        if head is not None:
            text.append(f"  {head.cluster or 'no Slurm'}", LABEL)
            if is_wide:
                text.append(f" Slurm {head.slurm_version}" if head.slurm_version else "", MUTED)
        if view.away_since is not None:
            text.append("  ✗ no head" if head is None else f"  ✗ head away since {clock(view.away_since)}", BAD)
        elif head is None:
            text.append("  … asking the head", WARN)
        else:
            text.append("  ● head", GOOD)
            if is_wide:
                text.append(f" {head.host}:{head.pid} term {head.term}", MUTED)
            text.append(f" up {duration(head.uptime_s)}", MUTED)
        age = view.age(now)
        if age is not None:
            freshness = view.freshness(now)
            text.append(f"  updated {duration(age)} ago", FRESHNESS[freshness])
            if freshness is not freshness.FRESH:
                text.append(f" {freshness.upper()}", FRESHNESS[freshness])
        if head is not None and head.slurm_error:
            text.append(f"  ✗ Slurm: {head.slurm_error}", BAD)
        elif head is not None and (poll := view.poll_age(now)) is not None:
            is_overdue = poll > LATE_POLLS * head.poll_interval_s
            text.append(f"  poll {duration(poll)}/{duration(head.poll_interval_s)}", WARN if is_overdue else MUTED)
        if view.away_since is not None and view.away_reason:
            text.append(f"  {view.away_reason}", MUTED)
        self.update(text)


class OperatorScreen(Screen[None]):
    """A screen with a selected run, and perhaps a selected node of it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(key, f"operate('{method}')", method.capitalize(), id=f"operate.{method}")
            for method, (key, _) in ACTIONS.items()
        ),
        Binding("slash", "filter", "Filter", key_display="/", id="events.filter"),
        *(Binding(str(n), f"panel({n})", f"Panel {n}", show=False, id=f"panel.{n}") for n in range(1, 5)),
        Binding("question_mark", "help", "Help", key_display="?", id="help"),
        Binding("q", "app.quit", "Quit", id="quit"),
    ]

    PANELS: ClassVar[tuple[str, ...]]
    "selectors of the panels for the keys 1, 2, ...; the last panel is the event log"

    _valid: tuple[bool | None, ...] = ()

    @property
    def top(self) -> "TopApp":
        """The application, with its own type."""
        from fallow_tui.app import TopApp

        assert isinstance(self.app, TopApp)
        return self.app

    def show(self, view: View, now: float) -> None:
        """Draw the view."""
        self.query_one(HeaderBar).show(view, now, self.top.mode)
        self.query_one(EventLog).show(view)
        self.draw(view, now)
        self.refresh_keys()

    def draw(self, view: View, now: float) -> None:
        """Draw the parts that only this screen has."""
        raise NotImplementedError

    def selected_run(self) -> RunView | None:
        """The run that requests are for."""
        raise NotImplementedError

    def selected_node(self) -> tuple[str, RunView] | None:
        """The node that `drain` is for, and its run."""
        raise NotImplementedError

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide the keys of requests that are not possible now."""
        if action == "panel":
            return parameters[0] in range(1, len(self.PANELS) + 1)
        if action != "operate":
            return True
        if self.top.read_only:
            return False
        if parameters == ("drain",):
            return self.selected_node() is not None
        run = self.selected_run()
        if run is None or run.status.ended:
            return False
        # A missing key `pause` shows that the run is paused.
        possible = {"pause": not run.paused, "resume": bool(run.paused or run.drained)}
        return possible.get(str(parameters[0]), True)

    def refresh_keys(self) -> None:
        """Draw the footer again if other keys are valid now.

        Only then: the footer makes all its parts anew, and the old parts stay in memory. If the footer were drawn every
        time, the monitor would become slower and slower.
        """
        valid = tuple(self.check_action("operate", (method,)) for method in ACTIONS)
        if valid != self._valid:
            self._valid = valid
            self.refresh_bindings()

    def action_panel(self, number: int) -> None:
        """Set the focus on a panel."""
        panel = self.query_one(self.PANELS[number - 1])
        if isinstance(panel, EventLog):
            panel.focus_lines()
        else:
            panel.focus()

    def action_filter(self) -> None:
        """Open the filter of the event log."""
        self.query_one(EventLog).start_filter()

    def action_back(self) -> None:
        """Close the filter of the event log; if no filter is open, close this screen, unless it is the first."""
        if not self.query_one(EventLog).clear_filter() and len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    def action_help(self) -> None:
        """Show the valid keys."""
        keys: dict[str, str] = {}
        for active in self.active_bindings.values():
            if active.enabled and active.binding.id and active.binding.description:
                binding = active.binding
                key = self.app.get_key_display(binding)
                keys[binding.description] = f"{keys.get(binding.description, '')} {key}".strip()
        self.app.push_screen(Help([(key, description) for description, key in keys.items()]))

    @work
    async def action_operate(self, method: str) -> None:
        """Ask for confirmation, send the request to the head, and show its answer."""
        node_and_run = self.selected_node() if method == "drain" else None
        run = node_and_run[1] if node_and_run is not None else self.selected_run()
        if run is None or (method == "drain" and node_and_run is None):
            return
        params: dict[str, str | int | list[str]] = {"run": run.run}
        run_label = f"run {run.name} ({run.run})" if run.name and run.name != run.run else f"run {run.run}"
        question = f"{method.capitalize()} {run_label}"
        if node_and_run is not None:
            params["nodes"] = [node_and_run[0]]
            question = f"{method.capitalize()} node {node_and_run[0]} of {run_label}"
        number = await self.app.push_screen_wait(Confirm(question, ACTIONS[method][1], takes_number=method in COUNTED))
        if number is None:
            return
        if method in COUNTED:
            params["by"] = number
        try:
            await self.top.source.call(method, **params)
        except (FallowError, OSError) as error:
            self.app.notify(clean(str(error)), title=question, severity="error", markup=False)
        else:
            self.app.notify(question, title="The head will do it", markup=False)
