"""Confirmation and help."""

from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from fallow.text import counted
from fallow_tui.palette import LABEL, MUTED

MOST = 999


class Confirm(ModalScreen[int | None]):
    """Asks for confirmation. Returns None for no, else the number of nodes (1 if the request takes none)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes", id="confirm.yes"),
        Binding("n,escape,q", "answer(False)", "No", id="confirm.no"),
        Binding("up,plus,k", "change(1)", "More", show=False, id="confirm.more"),
        Binding("down,minus,j", "change(-1)", "Fewer", show=False, id="confirm.fewer"),
    ]

    def __init__(self, question: str, consequence: str, *, takes_number: bool) -> None:
        super().__init__()
        self._question = question
        self._consequence = consequence
        self._takes_number = takes_number
        self.number = 1

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog"):
            yield Static(id="question")
            yield Static(Text(self._consequence, MUTED))
            with Horizontal():
                yield Button("No", id="no", compact=True)
                yield Button("Yes", id="yes", variant="warning", compact=True)

    def on_mount(self) -> None:
        self._draw()
        # "No" has the focus, so that an accidental enter does no harm.
        self.query_one("#no").focus()

    def action_change(self, by: int) -> None:
        """Change the number of nodes."""
        if self._takes_number:
            self.number = min(MOST, max(1, self.number + by))
            self._draw()

    def action_answer(self, yes: bool) -> None:
        """Close the dialog."""
        self.dismiss(self.number if yes else None)

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.action_answer(event.button.id == "yes")

    def _draw(self) -> None:
        text = Text(self._question, LABEL)
        text.append(f" by {counted(self.number, 'node')}?" if self._takes_number else "?")
        if self._takes_number:
            text.append("  (up, down)", MUTED)
        self.query_one("#question", Static).update(text)


class Help(ModalScreen[None]):
    """The valid keys of the screen below, and the meaning of the glyphs."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss", "Close", id="help.close")]

    def __init__(self, keys: list[tuple[str, str]]) -> None:
        super().__init__()
        self._keys = keys

    def compose(self) -> ComposeResult:
        text = Text("Keys\n", LABEL, end="")
        for key, description in self._keys:
            text.append(f"  {key:<12}", Style(bold=True))
            text.append(f"{description}\n")
        text.append("\nNodes\n", LABEL)
        for sign, meaning in _LEGEND:
            text.append(f"  {sign:<12}", Style(bold=True))
            text.append(f"{meaning}\n")
        with VerticalScroll(id="dialog"):
            yield Static(text)

    def on_mount(self) -> None:
        self.query_one("#dialog").border_title = "Help"
        self.query_one("#dialog").focus()


_LEGEND = (
    ("A B C", "member of that run, on a base node"),
    ("a b c", "member of that run, on a harvested node"),
    ("+", "ours, starting or ready"),
    ("-", "ours, leaving"),
    ("!", "ours, silent: its agent does not answer"),
    ("▒", "used by others"),
    ("·", "idle"),
    ("◇", "idle, set aside for a planned job"),
    ("×", "down or drained"),
    ("12/2-16", "nodes now / minimum-maximum"),
)
