"""The node map: one tile per node, with a glyph for its owner."""

from typing import ClassVar

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.widget import Widget

from fallow.model import AllocationKind, NodeOwner
from fallow_tui.palette import LABEL, MUTED, OWNERS, glyph, run_badge
from fallow_tui.text import duration, fit
from fallow_tui.view import View

LABEL_ROWS = 3
"""Most rows of tiles with names; more tiles have no names."""
ROW_LABEL = 12


class NodeMap(Widget, can_focus=True):
    """Tiles of all nodes. The last line describes the node under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1, 0)", "Left", show=False, id="node.left"),
        Binding("right,l", "move(1, 0)", "Right", show=False, id="node.right"),
        Binding("up,k", "move(0, -1)", "Up", show=False, id="node.up"),
        Binding("down,j", "move(0, 1)", "Down", show=False, id="node.down"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.border_title = "1 Nodes"
        self._view = View()
        self._now = 0.0
        self._names: list[str] = []
        self._labels: list[str] = []
        self._cursor = 0

    @property
    def selected(self) -> str | None:
        """The node under the cursor."""
        return self._names[self._cursor] if self._names else None

    def show(self, view: View, now: float) -> None:
        """Draw the view."""
        self._view, self._now = view, now
        names = sorted(view.cells)
        is_resized = len(names) != len(self._names)
        self._names, self._labels = names, short_names(names)
        self._cursor = min(self._cursor, max(0, len(names) - 1))
        self.border_title = self._summary()
        self.refresh(layout=is_resized)

    def action_move(self, columns: int, rows: int) -> None:
        """Move the cursor within the map."""
        goal = self._cursor + columns + rows * self._per_row(self.size.width)
        if 0 <= goal < len(self._names):
            self._cursor = goal
            self.refresh()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._row_count(width) + 1

    def render(self) -> Text:
        width, height = self.size.width, max(1, self.size.height - 1)
        per_row = self._per_row(width)
        first = max(0, self._cursor // per_row - height + 1)
        text = Text(no_wrap=True, end="")
        for row in range(first, min(first + height, self._row_count(width))):
            names = range(row * per_row, min((row + 1) * per_row, len(self._names)))
            if not self._has_labels(width):
                text.append(fit(self._labels[names[0]], ROW_LABEL - 1) + " ", MUTED)
            for index in names:
                self._tile(text, index, self._has_labels(width))
            text.append("\n")
        self._describe(text)
        return text

    def _tile(self, text: Text, index: int, has_label: bool) -> None:
        sign, style = glyph(self._view, self._view.cells[self._names[index]])
        is_at_cursor = self.has_focus and index == self._cursor
        text.append(sign, style + Style(reverse=True) if is_at_cursor and not has_label else style)
        if has_label:
            label = fit(self._labels[index], self._label_width())
            text.append(label, Style(reverse=True) if is_at_cursor else MUTED)
            text.append(" ")

    def _describe(self, text: Text) -> None:
        name = self.selected
        if name is None:
            # The text after the semicolon says what to do; on a line of its own it is not cut.
            text.append(self._view.away_reason.replace("; ", "\n", 1) or "no nodes known yet", MUTED)
            return
        cell = self._view.cells[name]
        text.append(name, LABEL)
        node = self._view.node(name)
        if node is not None:
            text.append(f"  {node.state.lower()}", MUTED)
        if cell.run is not None:
            text.append("  ")
            text.append_text(run_badge(self._view, cell.run))
            text.append(f" {cell.run} {cell.kind or ''} {cell.phase or 'starting'}")
            if node is not None and node.ends_in_s is not None:
                remaining_s = node.ends_in_s - (self._now - self._view.received_at)
                text.append(f"  ends in {duration(remaining_s)}")
        else:
            text.append(f"  {cell.owner}")
            if node is not None and node.unused:
                text.append(f"  {node.unused}")
        # Last, because a narrow screen cuts the end of the line.
        if node is not None:
            text.append(f"  {','.join(node.partitions)}", MUTED)
            text.append(f"  {node.gpus} GPUs" if node.gpus else "", MUTED)

    def _summary(self) -> Text:
        cells = list(self._view.cells.values())
        text = Text("1 Nodes ", end="")
        our_cells = [cell for cell in cells if cell.owner is NodeOwner.OURS]
        base = sum(cell.kind is AllocationKind.BASE for cell in our_cells)
        text.append(f" A base {base}  a harvest {len(our_cells) - base} ")
        for owner in (NodeOwner.OTHERS, NodeOwner.IDLE, NodeOwner.PLANNED, NodeOwner.DOWN):
            number = sum(cell.owner is owner for cell in cells)
            sign, style = OWNERS[owner]
            text.append(f" {sign}", style)
            text.append(f" {owner} {number} ")
        return text

    def _label_width(self) -> int:
        return max((cell_len(label) for label in self._labels), default=1)

    def _has_labels(self, width: int) -> bool:
        per_row = max(1, width // (self._label_width() + 2))
        return len(self._names) <= per_row * LABEL_ROWS

    def _per_row(self, width: int) -> int:
        return max(1, width // (self._label_width() + 2) if self._has_labels(width) else width - ROW_LABEL)

    def _row_count(self, width: int) -> int:
        return -(-len(self._names) // self._per_row(width))


def short_names(names: list[str]) -> list[str]:
    """Names without their common prefix, which ends before digits: `gpu001` and `gpu002` become `001` and `002`."""
    if len(names) < 2:
        return names
    # A prefix of the first and of the last name in order is a prefix of all names.
    pairs = enumerate(zip(min(names), max(names), strict=False))
    end = next((index for index, (one, other) in pairs if one != other), len(min(names)))
    end = len(min(names)[:end].rstrip("0123456789"))
    return [name[end:] or name for name in names]
